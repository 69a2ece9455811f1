"""The doctor's probes of a file system: each broken promise must be found, and only that one."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from slurm_rl.storage.fs import Fs, PosixFs
from slurm_rl.storage.probe import (
    Finding,
    judge_clock,
    judge_mount,
    judge_space,
    parse_mounts,
    probe_files,
    probe_flock,
)


class OpenCreate(PosixFs):
    """Exclusive creation that is not: O_EXCL does nothing."""

    def create(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)


class ReplacingLink(PosixFs):
    """A hard link that replaces what is there."""

    def link(self, source: Path, target: Path) -> None:
        target.unlink(missing_ok=True)
        super().link(source, target)


class NoLinks(PosixFs):
    def link(self, source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")


class NoLinksAndReplacingRename(NoLinks):
    """Neither way of publishing once is there: a directory replaces one that is not empty."""

    def rename(self, source: Path, target: Path) -> None:
        if target.is_dir():
            for inner in target.iterdir():
                inner.unlink()
        super().rename(source, target)


class TwoStepRename(PosixFs):
    """The target is gone for a moment."""

    def rename(self, source: Path, target: Path) -> None:
        target.unlink(missing_ok=True)
        time.sleep(0.005)
        super().rename(source, target)


class ShortAppend(PosixFs):
    def append(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)


class NoDirectorySync(PosixFs):
    def fsync_dir(self, path: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


class StaleListing(PosixFs):
    def list(self, path: Path) -> list[str]:
        return [name for name in super().list(path) if name != "new"]


class LastingListing(PosixFs):
    """A listing that still has what was removed."""

    seen: set[Path]

    def __init__(self) -> None:
        self.seen = set()

    def list(self, path: Path) -> list[str]:
        names = super().list(path)
        self.seen.update(path / name for name in names)
        return sorted({*names, *(p.name for p in self.seen if p.parent == path)})


class FullDisk(PosixFs):
    def create(self, path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def levels(found: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.level for finding in found if finding.level != "ok"}


def test_a_good_file_system_is_found_good(tmp_path: Path) -> None:
    found = probe_files(tmp_path)
    assert levels(found) == {} and len(found) == 6


@pytest.mark.parametrize(
    ("fs", "expected"),
    [
        (OpenCreate(), {"exclusive create": "bad"}),
        (ReplacingLink(), {"publish without replacing": "bad"}),
        (NoLinks(), {"publish without replacing": "warn"}),
        (NoLinksAndReplacingRename(), {"publish without replacing": "bad"}),
        (TwoStepRename(), {"atomic rename": "bad"}),
        (ShortAppend(), {"append": "bad"}),
        (StaleListing(), {"listing": "bad"}),
        (LastingListing(), {"listing": "bad"}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PosixFs) else "",
)
def test_each_broken_promise_is_found(tmp_path: Path, fs: Fs, expected: dict[str, str]) -> None:
    assert levels(probe_files(tmp_path, fs=fs)) == expected


def test_a_directory_that_cannot_be_synced_is_bad(tmp_path: Path) -> None:
    found = {finding.name: finding for finding in probe_files(tmp_path, fs=NoDirectorySync())}
    assert found["fsync"].level == "bad" and "Invalid argument" in found["fsync"].found
    assert found["exclusive create"].level == "ok", "one failure hides no other answer"


def test_a_full_disk_is_a_finding_and_no_traceback(tmp_path: Path) -> None:
    found = probe_files(tmp_path, fs=FullDisk())
    assert {finding.level for finding in found if finding.name != "append"} == {"bad"}
    assert any("No space left" in finding.found for finding in found)


def test_flock_is_told_and_never_bad(tmp_path: Path) -> None:
    assert probe_flock(tmp_path).level == "ok"
    assert probe_flock(tmp_path / "missing").level == "ok"


MOUNTS = r"""
sysfs /sys sysfs rw 0 0
/dev/sda1 / ext4 rw,relatime 0 0
server:/home /home nfs4 rw,hard,vers=4.2 0 0
server:/soft /soft nfs rw,soft 0 0
mds@tcp:/fs /scratch lustre rw,flock 0 0
auto /proj autofs rw 0 0
srv:/p /proj nfs ro,hard 0 0
tmpfs /dev/shm tmpfs rw 0 0
/dev/sdb /with\040space xfs rw 0 0
""".strip()


@pytest.mark.parametrize(
    ("path", "kind", "point"),
    [
        ("/etc/x", "ext4", "/"),
        ("/home/me/runs", "nfs4", "/home"),
        ("/homely", "ext4", "/"),  # a name that only begins alike
        ("/scratch", "lustre", "/scratch"),
        ("/proj/run", "nfs", "/proj"),  # of two at one place the later one is on top
        ("/with space/run", "xfs", "/with space"),
    ],
)
def test_the_mount_of_a_path(path: str, kind: str, point: str) -> None:
    mount = parse_mounts(MOUNTS, path)
    assert mount is not None and (mount.kind, mount.point) == (kind, point)


@pytest.mark.parametrize(
    ("path", "is_shared", "level"),
    [
        ("/home/me", True, "ok"),
        ("/soft/me", True, "warn"),
        ("/scratch/me", True, "ok"),
        ("/proj/run", True, "bad"),
        ("/etc", True, "warn"),
        ("/etc", False, "ok"),
        ("/dev/shm/x", True, "warn"),
        ("/dev/shm/x", False, "warn"),
    ],
)
def test_what_a_type_of_file_system_means(path: str, is_shared: bool, level: str) -> None:
    finding = judge_mount(parse_mounts(MOUNTS, path), is_shared=is_shared)
    assert finding.level == level, finding.line
    assert finding.fix or level == "ok"


def test_no_mount_table_is_said() -> None:
    assert parse_mounts("rubbish", "/x") is None
    assert judge_mount(None, is_shared=True).level == "warn"


@pytest.mark.parametrize(
    ("off_s", "level", "word"),
    [(0.0, "ok", "behind"), (59.0, "ok", "ahead"), (600.0, "warn", "ahead"), (-600, "warn", "beh")],
)
def test_clocks(off_s: float, level: str, word: str) -> None:
    finding = judge_clock(1e9 + off_s, 1e9)
    assert finding.level == level and word in finding.found


@pytest.mark.parametrize(
    ("free_bytes", "free_inodes", "each_bytes", "kept", "expected"),
    [
        (10**12, 10**6, 10**9, 10, ["ok", "ok"]),
        (10**9, 10**6, 10**9, 10, ["bad", "ok"]),  # not even one beside the one before
        (3 * 10**9, 10**6, 10**9, 10, ["warn", "ok"]),
        (10**12, 10, 10**9, 10, ["ok", "bad"]),
        (10**12, 2000, 10**9, 100, ["ok", "warn"]),
        (10**12, None, None, 10, ["ok", "ok"]),
    ],
)
def test_space_against_what_the_run_keeps(
    free_bytes: int, free_inodes: int | None, each_bytes: int | None, kept: int, expected: list[str]
) -> None:
    found = list(judge_space(free_bytes, free_inodes, each_bytes=each_bytes, kept=kept))
    assert [finding.level for finding in found] == expected


def test_nothing_is_left_outside_of_the_folder(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    probe_files(place)
    assert os.listdir(tmp_path) == ["place"]
