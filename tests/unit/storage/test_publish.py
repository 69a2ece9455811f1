"""Durable writes on file systems that lie, refuse or are full."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from slurm_rl.errors import SpaceError
from slurm_rl.storage.durable import list_files, publish, read_published, write_file, write_hint
from slurm_rl.storage.fs import PosixFs


class BadLink(PosixFs):
    """`link` answers `error`, after having worked or not."""

    def __init__(self, number: int, *, works: bool) -> None:
        self.number, self.works = number, works

    def link(self, source: Path, target: Path) -> None:
        if self.works:
            super().link(source, target)
        raise OSError(self.number, errno.errorcode[self.number])


def test_the_first_wins_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "COMMIT"
    assert publish(path, b"mine")
    assert not publish(path, b"theirs")
    assert read_published(path) == b"mine"
    assert list_files(tmp_path) == ["COMMIT"]


def test_publishing_the_same_again_is_winning_again(tmp_path: Path) -> None:
    assert publish(tmp_path / "x", b"same")
    assert publish(tmp_path / "x", b"same")


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
def test_an_error_after_a_link_that_worked_is_a_success(tmp_path: Path, number: int) -> None:
    assert publish(tmp_path / "COMMIT", b"mine", fs=BadLink(number, works=True))
    assert read_published(tmp_path / "COMMIT") == b"mine"


def test_an_error_is_no_success_where_somebody_else_was_first(tmp_path: Path) -> None:
    publish(tmp_path / "COMMIT", b"theirs")
    assert not publish(tmp_path / "COMMIT", b"mine", fs=BadLink(errno.EIO, works=False))
    assert read_published(tmp_path / "COMMIT") == b"theirs"


def test_an_error_with_nothing_published_is_raised(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="EIO"):
        publish(tmp_path / "COMMIT", b"mine", fs=BadLink(errno.EIO, works=False))
    assert read_published(tmp_path / "COMMIT") is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_so(tmp_path: Path, number: int) -> None:
    with pytest.raises(SpaceError, match="no space left"):
        publish(tmp_path / "COMMIT", b"mine", fs=BadLink(number, works=False))


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK])
def test_without_hard_links_a_directory_takes_the_name(tmp_path: Path, number: int) -> None:
    fs = BadLink(number, works=False)
    assert publish(tmp_path / "COMMIT", b"mine", fs=fs)
    assert (tmp_path / "COMMIT").is_dir()
    assert not publish(tmp_path / "COMMIT", b"theirs", fs=fs)
    assert read_published(tmp_path / "COMMIT") == b"mine"
    assert list_files(tmp_path) == ["COMMIT/content"]  # the loser left nothing behind


def test_a_file_published_with_links_is_not_replaced_by_a_directory(tmp_path: Path) -> None:
    assert publish(tmp_path / "COMMIT", b"mine")
    assert not publish(tmp_path / "COMMIT", b"theirs", fs=BadLink(errno.EPERM, works=False))
    assert read_published(tmp_path / "COMMIT") == b"mine"


def test_a_directory_published_without_links_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    assert publish(tmp_path / "COMMIT", b"mine", fs=BadLink(errno.EPERM, works=False))
    assert not publish(tmp_path / "COMMIT", b"theirs")


@pytest.mark.parametrize("write", [write_file, write_hint])
def test_writing_replaces_and_leaves_nothing_else(tmp_path: Path, write: object) -> None:
    assert callable(write)
    write(tmp_path / "file", b"old")
    write(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert list_files(tmp_path) == ["file"]


def test_a_failed_write_leaves_the_old_bytes(tmp_path: Path) -> None:
    class Full(PosixFs):
        def create(self, path: Path, data: bytes) -> None:
            raise SpaceError("full")

    write_file(tmp_path / "file", b"old")
    with pytest.raises(SpaceError):
        write_file(tmp_path / "file", b"new", fs=Full())
    assert (tmp_path / "file").read_bytes() == b"old"
