"""Every fault of a file system at every step of a durable write: what is left, and what is said."""

from __future__ import annotations

import errno
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy.faulty_fs import EVERY, WRITES, FaultyFs, StorageFault
from toy.world import FastFs

from slurm_rl.errors import CorruptError, SpaceError, StorageError
from slurm_rl.storage.claims import read_claims, try_claim
from slurm_rl.storage.commits import (
    find_damage,
    has_commit,
    publish_commit,
    read_commit,
    read_stage_commit,
)
from slurm_rl.storage.control import (
    Control,
    Halt,
    clear_stops,
    read_control,
    write_halt,
    write_pause,
)
from slurm_rl.storage.damage import check_inputs
from slurm_rl.storage.durable import (
    list_files,
    look_at_size,
    publish,
    read_patiently,
    read_published,
    remove_published,
    seal_files,
    write_file,
    write_hint,
)
from slurm_rl.storage.fs import PosixFs
from slurm_rl.storage.rundir import RunDir, RunIdentity, create_run, filesystem_now
from slurm_rl.types import Claim, Input, Slot, StageRef

NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
SLOT = Slot(0, "train", 0)
IDENTITY = RunIdentity("abcdef01", "toy", 1.0, "me", "0.1", {"a": 1}, "a: 1\n")


def faulty(*faults: StorageFault) -> FaultyFs:
    return FaultyFs(FastFs(), list(faults))


def raised_for(number: int) -> type[BaseException]:
    """The class that a person is told."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return SpaceError
    return StorageError if number == errno.EROFS else OSError


# -- one fault at one step ------------------------------------------------------------------------

#: Steps of `publish` before the name is there, in order.
BEFORE = ("create", "fsync", "link")


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EROFS]
)
@pytest.mark.parametrize("op", BEFORE)
def test_a_write_that_fails_before_the_name_leaves_nothing_at_all(
    tmp_path: Path, op: str, number: int
) -> None:
    path = tmp_path / "COMMIT"
    fs = faulty(StorageFault(number, ops=(op,)))
    with pytest.raises(raised_for(number)) as said:
        publish(path, b"mine", fs=fs)
    assert "COMMIT" in str(said.value)
    assert list_files(tmp_path) == []
    assert publish(path, b"mine", fs=fs)  # the fault has gone


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("write", [publish, write_file, write_hint])
def test_a_torn_write_leaves_no_torn_file(
    tmp_path: Path, write: Callable[..., object], part: float
) -> None:
    fs = faulty(StorageFault(errno.ENOSPC, ops=("create",), part=part))
    with pytest.raises(SpaceError):
        write(tmp_path / "x", b"all of it", fs=fs)
    assert list_files(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO, errno.ESTALE, errno.ENOSPC])
def test_a_success_that_was_reported_as_an_error_is_a_success(tmp_path: Path, number: int) -> None:
    fs = faulty(StorageFault(number, ops=("link",), happens=True))
    assert publish(tmp_path / "COMMIT", b"mine", fs=fs)
    assert list_files(tmp_path) == ["COMMIT"]
    assert not publish(tmp_path / "COMMIT", b"theirs")


def test_a_name_that_is_perhaps_not_durable_is_no_success_yet(tmp_path: Path) -> None:
    """The next to publish finds it, makes it durable, and learns whose it is."""
    path = tmp_path / "COMMIT"
    fs = faulty(StorageFault(errno.EIO, ops=("fsync_dir",)))
    with pytest.raises(OSError, match="Input/output"):
        publish(path, b"mine", fs=fs)
    assert read_published(path) == b"mine"
    assert not publish(path, b"theirs")
    assert publish(path, b"mine")


@pytest.mark.parametrize("op", ["unlink", "read"])
def test_what_fails_after_the_name_changes_nothing(tmp_path: Path, op: str) -> None:
    path = tmp_path / "COMMIT"
    fs = faulty(StorageFault(errno.ESTALE, ops=(op,)))
    assert publish(path, b"mine", fs=fs)
    left = [name for name in list_files(tmp_path) if name != "COMMIT"]
    assert len(left) == (op == "unlink")  # nobody reads it, and nobody could take it away
    assert all(name.startswith(".tmp-") for name in left)


@pytest.mark.parametrize("number", NO_LINKS)
@pytest.mark.parametrize("op", [*WRITES, "read", "list"])
def test_without_hard_links_each_step_may_fail_too(tmp_path: Path, number: int, op: str) -> None:
    if op == "link":
        return
    path = tmp_path / "COMMIT"
    no_links = StorageFault(number, ops=("link",), times=None)
    fs = faulty(no_links, StorageFault(errno.EIO, ops=(op,), skip=op == "create"))
    try:
        won = publish(path, b"mine", fs=fs)
    except OSError:
        won = False
    assert publish(path, b"other", fs=faulty(no_links)) is (read_published(path) == b"other")
    assert read_published(path) in (b"mine", b"other")
    assert not won or read_published(path) == b"mine"
    if op not in ("unlink", "rmdir"):
        assert list_files(tmp_path) == ["COMMIT/content"]


def test_without_hard_links_the_lost_reply_of_a_rename_is_a_success(tmp_path: Path) -> None:
    fs = faulty(
        StorageFault(errno.EPERM, ops=("link",), times=None),
        StorageFault(errno.EIO, ops=("rename",), happens=True),
    )
    assert publish(tmp_path / "COMMIT", b"mine", fs=fs)
    assert list_files(tmp_path) == ["COMMIT/content"]


@pytest.mark.parametrize("op", ["create", "fsync", "rename"])
def test_a_replacement_that_fails_leaves_the_old_bytes_alone(tmp_path: Path, op: str) -> None:
    path = tmp_path / "file"
    write_file(path, b"old")
    with pytest.raises(SpaceError):
        write_file(path, b"new", fs=faulty(StorageFault(errno.EDQUOT, ops=(op,), part=0.5)))
    assert path.read_bytes() == b"old"
    assert list_files(tmp_path) == ["file"]


# -- any faults at any steps ----------------------------------------------------------------------

NUMBERS = st.sampled_from(
    [errno.EIO, errno.ESTALE, errno.EEXIST, errno.ENOSPC, errno.EDQUOT, errno.EROFS, *NO_LINKS]
)
FAULTS = st.builds(
    StorageFault,
    NUMBERS,
    ops=st.sets(st.sampled_from(EVERY), min_size=1, max_size=3).map(tuple),
    happens=st.booleans(),
    part=st.none() | st.floats(0, 1),
    skip=st.integers(0, 3),
    times=st.integers(1, 3) | st.none(),
)


@given(data=st.data())
def test_of_many_writers_one_wins_and_its_bytes_are_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever strikes each of three writers: never two winners, never another's bytes."""
    path = tmp_path_factory.mktemp("faults") / "COMMIT"
    winners = []
    for number in range(3):
        fs = faulty(*data.draw(st.lists(FAULTS, max_size=3)))
        mine = f"writer {number} ".encode() * 10
        try:
            if publish(path, mine, fs=fs):
                winners.append(mine)
        except (OSError, StorageError):
            pass  # it does not know whether it won; who reads next does
    last = b"the last, with nothing in its way"
    if publish(path, last):
        winners.append(last)
    found = read_published(path)
    assert found is not None and found in [f"writer {n} ".encode() * 10 for n in range(3)] + [last]
    assert winners in ([], [found])


@given(faults=st.lists(FAULTS, max_size=3))
def test_a_claim_is_whole_or_absent_whatever_strikes(
    tmp_path_factory: pytest.TempPathFactory, faults: list[StorageFault]
) -> None:
    root = tmp_path_factory.mktemp("faults") / "run"
    claim = Claim(1, "job", "aaa")
    try:
        won = try_claim(RunDir(root, faulty(*faults)), SLOT, claim)
    except (OSError, StorageError):
        won = False
    run = RunDir(root)
    assert read_claims(run, SLOT) in ([], [claim])
    assert not won or read_claims(run, SLOT) == [claim]
    assert try_claim(run, SLOT, Claim(2, "other", "bbb"))


# -- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_a_name_that_is_listed_and_not_found_is_looked_at_again(
    tmp_path: Path, number: int
) -> None:
    publish(tmp_path / "COMMIT", b"mine")
    fault = StorageFault(number, ops=("read",), times=2)
    assert read_published(tmp_path / "COMMIT", fs=faulty(fault)) == b"mine"
    assert len(fault.struck) == 2


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_what_is_listed_and_never_found_is_not_read_as_nothing(tmp_path: Path, number: int) -> None:
    publish(tmp_path / "COMMIT", b"mine")
    fault = StorageFault(number, ops=("read",), times=None)
    with pytest.raises(StorageError, match=r"COMMIT: its directory lists it"):
        read_published(tmp_path / "COMMIT", fs=faulty(fault))


def test_an_unreadable_name_is_not_read_as_nothing(tmp_path: Path) -> None:
    publish(tmp_path / "COMMIT", b"mine")
    with pytest.raises(OSError, match="Input/output"):
        read_published(tmp_path / "COMMIT", fs=faulty(StorageFault(errno.EIO, ops=("read",))))


def test_a_directory_where_nothing_was_published_is_damage(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (run.slot_dir(SLOT) / "COMMIT").mkdir(parents=True)
    with pytest.raises(CorruptError, match="COMMIT: a directory in which nothing was published"):
        read_commit(run, SLOT)


def test_a_commit_that_is_listed_late_or_looked_up_late_is_there(tmp_path: Path) -> None:
    class Unlisted(FastFs):
        def list(self, path: Path) -> list[str]:
            return []

    publish_commit(RunDir(_slot(tmp_path)), SLOT, content={}, provenance={"attempt": "a"})
    assert has_commit(RunDir(tmp_path, Unlisted()), SLOT)
    lookup = StorageFault(errno.ENOENT, ops=("read", "size"), times=None)
    assert has_commit(RunDir(tmp_path, faulty(lookup)), SLOT)
    assert not has_commit(RunDir(tmp_path), Slot(1, "train", 0))


def test_a_stage_is_known_by_its_shards_while_its_own_commit_does_not_show(tmp_path: Path) -> None:
    ref = StageRef(0, "rollout")

    class Blind(FastFs):
        """Whatever is published for the whole stage is not seen here."""

        def read(self, path: Path) -> bytes:
            if path.parent.name == "rollout.t0":
                raise FileNotFoundError(errno.ENOENT, "not yet", str(path))
            return super().read(path)

        def list(self, path: Path) -> list[str]:
            names = super().list(path)
            return [name for name in names if path.name != "rollout.t0" or name != "COMMIT"]

    run, blind = RunDir(tmp_path), RunDir(tmp_path, Blind())
    for shard in range(2):
        slot = Slot(0, "rollout", 0, shard)
        run.fs.mkdir(run.slot_dir(slot))
        content = {"num_samples": 3, "shard": shard, "files": []}
        publish_commit(run, slot, content=content, provenance={"attempt": "a"})
    whole = read_stage_commit(run, ref, timeline=0, num_shards=2)
    assert whole is not None and whole.content["num_samples"] == 6
    assert read_commit(blind, Slot(0, "rollout", 0)) is None
    assert read_stage_commit(blind, ref, timeline=0, num_shards=2) == whole


def _slot(root: Path) -> Path:
    RunDir(root).slot_dir(SLOT).mkdir(parents=True)
    return root


def test_a_late_file_is_waited_for_and_its_directories_are_refreshed(tmp_path: Path) -> None:
    folder = tmp_path / "attempt"

    def appear() -> None:
        time.sleep(0.3)
        folder.mkdir()
        write_file(folder / "order.json", b"order")

    listed: list[str] = []

    class Listing(FastFs):
        def list(self, path: Path) -> list[str]:
            listed.append(str(path))
            return super().list(path)

    thread = threading.Thread(target=appear)
    thread.start()
    assert read_patiently(folder / "order.json", patience_s=10.0, fs=Listing()) == b"order"
    thread.join()
    assert {str(folder), str(tmp_path)} <= set(listed)
    with pytest.raises(FileNotFoundError):
        read_patiently(folder / "other", patience_s=0.0)


def test_a_size_that_shows_late_is_looked_at_twice(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"whole")
    assert look_at_size(path, 5, fs=faulty(StorageFault(errno.ENOENT, ops=("size",)))) == 5
    assert look_at_size(path, 6) == 5
    assert look_at_size(tmp_path / "none", 6) == -1
    with pytest.raises(OSError, match="Input/output"):
        look_at_size(path, 5, fs=faulty(StorageFault(errno.EIO, ops=("size",))))


# -- committed files ------------------------------------------------------------------------------


def commit_files(root: Path) -> tuple[RunDir, Path, Input]:
    """A run with one commit of two files, and that commit as an input."""
    run, claim = RunDir(root), Claim(1, "job", "aaa")
    try_claim(run, SLOT, claim)
    folder = run.slot_dir(SLOT) / claim.attempt_name
    for name in ("one", "two"):
        (folder / name).write_text(f"bytes of {name}")
    files = [
        {"path": e.path, "size_bytes": e.size_bytes, "digest": e.digest}
        for e in seal_files(folder, ["one", "two"])
    ]
    content = {"files": files}
    publish_commit(run, SLOT, content=content, provenance={"attempt": claim.attempt_name})
    paths = {name: str(folder / name) for name in ("one", "two")}
    return run, folder, Input("weights", 0, "train", "", str(folder), paths, content)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: path.unlink(), "No such file, but it was committed"),
        (lambda path: path.write_text("short"), "5 bytes, but 12 were committed"),
        (lambda path: path.write_text("bytes of TWO"), "digest"),
        (lambda path: path.write_text(""), "0 bytes, but 12 were committed"),
    ],
    ids=["vanished", "torn", "changed", "empty"],
)
def test_verification_and_every_stage_make_the_same_comparison(
    tmp_path: Path, change: Callable[[Path], object], says: str
) -> None:
    run, folder, source = commit_files(tmp_path)
    check_inputs(source, ["one", "two"], patience_s=0.0)
    change(folder / "two")
    commit = read_commit(run, SLOT)
    assert commit is not None
    (line,) = find_damage(run, SLOT, commit)
    assert says in line and str(folder / "two") in line
    with pytest.raises(CorruptError) as said:
        check_inputs(source, ["one", "two"], patience_s=0.0)
    assert said.value.message == line
    check_inputs(source, ["one"], patience_s=0.0)
    check_inputs(source, ["one", "two"], share=(0, 2), patience_s=0.0)  # the other rank's file


def test_a_file_that_cannot_be_read_is_not_called_damaged_by_a_stage(tmp_path: Path) -> None:
    run, _, source = commit_files(tmp_path)
    fs = faulty(StorageFault(errno.EIO, ops=("size",), path="two", times=None))
    with pytest.raises(StorageError, match="Input/output") as said:
        check_inputs(source, ["one", "two"], patience_s=0.0, fs=fs)
    assert not isinstance(said.value, CorruptError)
    commit = read_commit(run, SLOT)
    assert commit is not None
    (line,) = find_damage(RunDir(tmp_path, fs), SLOT, commit)
    assert "Input/output" in line


# -- control --------------------------------------------------------------------------------------


def test_a_control_directory_that_is_gone_is_not_read_as_nothing_decided(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    create_run(run, IDENTITY)
    assert read_control(run) == Control()
    run.control_dir.rmdir()
    with pytest.raises(CorruptError, match="control: gone"):
        read_control(run)
    assert write_halt(run, Halt("control was gone"))  # makes it again, to say so
    assert read_control(run).halt == Halt("control was gone")


def test_a_run_that_is_not_made_yet_has_no_control(tmp_path: Path) -> None:
    assert read_control(RunDir(tmp_path / "run")) == Control()


@pytest.mark.parametrize("number", [0, *NO_LINKS])
def test_stops_are_taken_away_whatever_they_were_made_of(tmp_path: Path, number: int) -> None:
    faults = [StorageFault(number, ops=("link",), times=None)] if number else []
    run = RunDir(tmp_path / "run", faulty(*faults))
    create_run(run, IDENTITY)
    write_pause(run, "why")
    assert write_halt(run, Halt("reason"))
    assert (run.control_dir / "PAUSE").is_dir() is bool(number)
    assert (read_control(run).paused, read_control(run).halt) == ("why", Halt("reason"))
    clear_stops(run)
    assert read_control(run) == Control()


def test_a_directory_that_a_person_made_pauses_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    create_run(run, IDENTITY)
    (run.control_dir / "PAUSE").mkdir()
    (run.control_dir / "HALT").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda seconds: pytest.fail("nothing is waited for"))
        assert read_control(run).paused == "by hand"
    assert read_control(run).halt == Halt("by hand")
    clear_stops(run)
    assert read_control(run) == Control()


def test_what_else_lies_in_such_a_directory_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "PAUSE").mkdir()
    (tmp_path / "PAUSE" / "notes").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        remove_published(tmp_path / "PAUSE")
    assert (tmp_path / "PAUSE" / "notes").read_text() == "mine"


# -- the clock ------------------------------------------------------------------------------------


def test_ages_are_by_the_clock_of_the_file_system_not_of_the_node(tmp_path: Path) -> None:
    class Ahead(FastFs):
        def now(self, folder: Path) -> float:
            return time.time() + 600.0

    run = RunDir(tmp_path / "run", Ahead())
    create_run(run, IDENTITY)
    assert filesystem_now(run) - time.time() > 590.0


def test_reading_the_clock_leaves_nothing_and_no_other_stands_in(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    create_run(run, IDENTITY)
    assert abs(PosixFs().now(run.control_dir) - time.time()) < 5.0
    assert list_files(run.control_dir) == []
    dead = StorageFault(errno.EROFS, ops=("now",), times=None)
    with pytest.raises(StorageError, match="read-only"):
        filesystem_now(RunDir(run.root, faulty(dead)))


# -- a real full file system ----------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB and 24 inodes; skipped where it cannot be mounted."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=24", "tmpfs", str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip("a file system cannot be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_without_room_is_named_and_nothing_is_left_on_it(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(b"x" * 60_000)
    with pytest.raises(SpaceError, match=r"COMMIT.*no space left"):
        publish(small_disk / "COMMIT", b"y" * 20_000)
    with pytest.raises(SpaceError, match=r"half.*no space left"):
        PosixFs().create(small_disk / "half", b"y" * 20_000)
    assert list_files(small_disk) == ["ballast"]
    (small_disk / "ballast").unlink()
    assert publish(small_disk / "COMMIT", b"y" * 20_000)


def test_a_disk_without_inodes_is_named_and_still_has_a_clock(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        for number in range(100):
            (small_disk / str(number)).touch()
    before = list_files(small_disk)
    with pytest.raises(SpaceError, match="no space left"):
        publish(small_disk / "COMMIT", b"y")
    with pytest.raises(SpaceError, match="no space left"):
        PosixFs().mkdir(small_disk / "folder")
    assert list_files(small_disk) == before
    assert abs(PosixFs().now(small_disk) - time.time()) < 5.0


def test_a_disk_that_is_mounted_read_only_is_named(small_disk: Path) -> None:
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    if subprocess.run(remount, capture_output=True, check=False).returncode:
        pytest.skip("it cannot be mounted read-only")
    with pytest.raises(StorageError, match=r"COMMIT.*read-only"):
        publish(small_disk / "COMMIT", b"y")
