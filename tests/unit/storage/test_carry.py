"""Files that a commit takes over: whole, durable, and its own."""

import dataclasses
import errno
from pathlib import Path

import pytest

from slurm_rl.errors import CorruptError, SpaceError
from slurm_rl.storage.carry import carry_files
from slurm_rl.storage.durable import seal_files
from slurm_rl.storage.fs import POSIX, PosixFs
from slurm_rl.types import Input


class WithoutLinks(PosixFs):
    """A file system that has no hard links."""

    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")


@pytest.fixture
def source(tmp_path: Path) -> Input:
    root = tmp_path / "old"
    (root / "weights").mkdir(parents=True)
    (root / "weights" / "a.bin").write_bytes(b"weights" * 100)
    (root / "weights" / "config.json").write_bytes(b"{}")
    (root / "other.bin").write_bytes(b"x")
    names = ["weights/a.bin", "weights/config.json", "other.bin"]
    entries = seal_files(root, names)
    return Input(
        "checkpoint",
        0,
        "train",
        "xxh3:1",
        str(root),
        {name: str(root / name) for name in names},
        {"files": [dataclasses.asdict(entry) for entry in entries]},
    )


WEIGHTS = ["weights/a.bin", "weights/config.json"]


@pytest.mark.parametrize("fs", [POSIX, WithoutLinks()], ids=["linked", "copied"])
def test_what_is_carried_is_what_was_committed_and_outlives_it(
    source: Input, tmp_path: Path, fs: PosixFs
) -> None:
    new = tmp_path / "new"
    new.mkdir()
    carried = carry_files(source, WEIGHTS, new, fs=fs)
    assert [entry.path for entry in carried] == WEIGHTS
    assert carried == seal_files(new, WEIGHTS)
    is_linked = (new / WEIGHTS[0]).samefile(source.files[WEIGHTS[0]])
    assert is_linked == (fs is POSIX)
    for name in WEIGHTS:
        Path(source.files[name]).unlink()
    assert carried == seal_files(new, WEIGHTS)


def test_under_another_name(source: Input, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    carried = carry_files(source, WEIGHTS, new, renamed=("weights", "reference"))
    assert [entry.path for entry in carried] == ["reference/a.bin", "reference/config.json"]
    assert carried == seal_files(new, [entry.path for entry in carried])


def test_links_to_elsewhere_stay_links(source: Input, tmp_path: Path) -> None:
    place = Path(source.files[WEIGHTS[0]])
    away = tmp_path / "away.bin"
    away.write_bytes(place.read_bytes())
    place.unlink()
    place.symlink_to(away)
    new = tmp_path / "new"
    new.mkdir()
    carry_files(source, WEIGHTS, new)
    assert (new / WEIGHTS[0]).is_symlink()
    assert (new / WEIGHTS[0]).resolve() == away


@pytest.mark.parametrize("fs", [POSIX, WithoutLinks()], ids=["linked", "copied"])
def test_another_size_is_damage(source: Input, tmp_path: Path, fs: PosixFs) -> None:
    Path(source.files[WEIGHTS[0]]).write_bytes(b"short")
    new = tmp_path / "new"
    new.mkdir()
    with pytest.raises(CorruptError, match="5 bytes, but 700 were committed"):
        carry_files(source, WEIGHTS, new, fs=fs)


def test_a_link_whose_reply_was_lost_is_there(source: Input, tmp_path: Path) -> None:
    class Twice(PosixFs):
        """Links, and says that the name is taken: the first reply was lost."""

        def link(self, source: Path, target: Path) -> None:
            super().link(source, target)
            super().link(source, target)

    new = tmp_path / "new"
    new.mkdir()
    carry_files(source, WEIGHTS, new, fs=Twice())
    assert (new / WEIGHTS[0]).samefile(source.files[WEIGHTS[0]])


def test_a_full_disk_is_not_copied_around(source: Input, tmp_path: Path) -> None:
    class Full(PosixFs):
        def link(self, source: Path, target: Path) -> None:
            raise SpaceError("no space left")

    new = tmp_path / "new"
    new.mkdir()
    with pytest.raises(SpaceError):
        carry_files(source, WEIGHTS, new, fs=Full())
    assert not (new / WEIGHTS[0]).exists()


def test_a_copy_of_other_bytes_is_damage(source: Input, tmp_path: Path) -> None:
    Path(source.files[WEIGHTS[0]]).write_bytes(b"WEIGHTS" * 100)
    new = tmp_path / "new"
    new.mkdir()
    with pytest.raises(CorruptError, match=r"weights/a\.bin has digest .*, but .* was committed"):
        carry_files(source, WEIGHTS, new, fs=WithoutLinks())
