"""Passes of garbage collection over real directories: what goes, what stays, what a crash leaves."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy.power_cut import RecordingFs
from toy.world import FastFs
from toy.yard import GRACE_S, Yard

from slurm_rl.errors import CorruptError, PrunedError
from slurm_rl.storage.commits import find_damage, read_commit
from slurm_rl.storage.control import read_control, write_pause
from slurm_rl.storage.leases import drop_lease, hold, take_lease
from slurm_rl.storage.retention import Act
from slurm_rl.storage.tombstones import is_condemned, is_pruned, publish_tombstone
from slurm_rl.types import Slot, StageRef


@pytest.fixture
def folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def names_below(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}


# -- what goes ------------------------------------------------------------------------------------


def test_the_last_and_every_nth_stay_and_samples_too(folder: Path) -> None:
    yard = Yard(folder, {"keep_last": 2, "keep_every": 3})
    yard.commit_until(8)
    yard.collect_all()
    assert yard.pruned() == {"i0000.train", "i0001.train", "i0003.train", "i0004.train"}
    yard.check()


def test_without_keep_samples_the_samples_go_with_the_checkpoint(folder: Path) -> None:
    yard = Yard(folder, {"keep_samples": False, "keep_every": 4}, {"shards": 3})
    yard.commit_until(7)
    yard.collect_all()
    gone = {i for i in range(5) if i != 3}
    assert yard.pruned() == {f"i{i:04d}.{kind}" for i in gone for kind in ("rollout", "train")}
    yard.check()


def test_first_a_mark_then_the_grace_then_the_deletion(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(4)
    report = yard.collect()
    assert [str(item) for item in report.having(Act.CONDEMN)] == [
        "i0000.train.t0",
        "i0001.train.t0",
    ]
    yard.now += GRACE_S - 1
    assert not yard.collect().having(Act.DELETE)
    assert yard.pruned() == set()
    yard.now += 2
    assert len(yard.collect().having(Act.DELETE)) == 2
    assert yard.pruned() == {"i0000.train", "i0001.train"}
    left = names_below(yard.run.slot_dir(yard.slot(0, "train")))
    assert "COMMIT" in left and "PRUNED" in left
    assert not any("TOMBSTONE" in name for name in left), left
    assert (yard.run.slot_dir(yard.slot(0, "train")) / "a0001-feed1" / "rank-0.log").exists()


def test_nothing_is_deleted_unless_it_was_asked_for(folder: Path) -> None:
    yard = Yard(folder, {"keep_last": None})
    yard.commit_until(6)
    dead = yard.abandon(yard.slot(1, "train"))
    yard.collect_all()
    assert yard.pruned() == set()
    assert (dead / "checkpoint" / "half").exists()


def test_a_dry_run_changes_nothing(folder: Path) -> None:
    from slurm_rl.chain.gc import collect

    yard = Yard(folder)
    yard.commit_until(8)
    yard.abandon(yard.slot(2, "train"))
    yard.collect()
    yard.now += GRACE_S + 1
    fs = RecordingFs(FastFs())
    report = collect(yard.keeper(fs=fs), dry_run=True)
    assert fs.ops == []
    assert len(report.having(Act.DELETE)) == 7


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("head", range(1, 7))
def test_what_the_next_stages_read_is_never_touched(folder: Path, head: int, lag: int) -> None:
    chain = {"tick_s": 300.0, "lag": lag, "window": 4}
    changes = {"chain": chain, "train": {"global_batch_size": 4, "use_kl_loss": True}}
    yard = Yard(folder, {"keep_samples": False}, changes)
    yard.commit_until(head)
    yard.commit(StageRef(head, "rollout"))
    yard.collect_all()
    yard.check()
    assert len(yard.pruned()) == 2 * max(0, head - 2)


# -- attempts -------------------------------------------------------------------------------------


def test_an_attempt_that_may_still_commit_is_never_touched(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(3)
    yard.commit(StageRef(3, "rollout"))
    alive = [yard.abandon(yard.slot(3, "train")) for _ in range(2)]
    for _ in range(3):
        yard.collect_all()
    for path in alive:
        assert (path / "checkpoint" / "half").exists()


def test_an_attempt_that_lost_its_slot_goes_but_for_its_records(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(3)
    yard.commit(StageRef(3, "rollout"))
    dead = yard.abandon(yard.slot(3, "train"))
    yard.commit(StageRef(3, "train"))
    report = yard.collect()
    assert str(report.having(Act.CONDEMN)[-1]) == f"i0003.train.t0/{dead.name}"
    assert (dead / "checkpoint" / "half").exists()
    yard.now += GRACE_S + 1
    yard.collect()
    assert names_below(dead) == {"order.json", "ended.json", "heartbeat", "rank-0.log"}
    assert not yard.missing(yard.slot(3, "train"))
    assert folder.exists(), "a link was followed"


def test_shards_are_told_apart(folder: Path) -> None:
    yard = Yard(folder, changes={"shards": 2})
    yard.commit_until(1)
    lost, open_ = Slot(1, "rollout", 0, 0), Slot(1, "rollout", 0, 1)
    dead = [yard.abandon(slot) for slot in (lost, open_)]
    commit = read_commit(yard.run, Slot(0, "rollout", 0, 0))
    assert commit is not None
    yard._commit_slot(lost, commit.parents)
    yard.collect_all()
    assert not (dead[0] / "checkpoint").exists()
    assert (dead[1] / "checkpoint" / "half").exists()


def test_what_a_timeline_set_aside_goes_when_it_is_left_behind(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(4)
    dead = yard.abandon(yard.slot(4, "train"))
    old = yard.slot(3, "train")
    yard.rewind(3)
    yard.collect_all()
    assert not (dead / "checkpoint").exists(), "its timeline is dead"
    assert not yard.missing(old), "set aside, not erased"
    yard.commit_until(6)
    yard.collect_all()
    assert is_pruned(yard.run, old) and yard.missing(old)
    yard.check()


# -- readers --------------------------------------------------------------------------------------


def test_a_reader_that_came_first_is_respected_until_it_leaves(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(4)
    slot = yard.slot(0, "train")
    lease = take_lease(yard.run, [slot], holder="me", now=yard.now)
    assert not is_condemned(yard.run, slot)
    publish_tombstone(yard.run, slot, clock=lambda: yard.now)  # a gc that had not seen it
    yard.now += GRACE_S + 1
    report = yard.collect()
    assert "in use: me" in [verdict.why for _, verdict in report.verdicts]
    assert not yard.missing(slot)
    drop_lease(yard.run, lease)
    yard.collect()
    assert yard.missing(slot)


def test_a_lease_between_look_and_deletion_is_seen(folder: Path) -> None:
    """The deleter reads the leases again after it has decided."""
    yard = Yard(folder)
    yard.commit_until(4)
    yard.collect()
    yard.now += GRACE_S + 1
    slots = [yard.slot(0, "train"), yard.slot(1, "train")]

    class LateReader(FastFs):
        has_read = False

        def list(self, path: Path) -> list[str]:
            found = super().list(path)
            if path.name == "leases" and not self.has_read:
                self.has_read = True  # the pass has begun: it knows of no lease
                take_lease(yard.run, slots, holder="late", now=yard.now)
            return found

    fs = LateReader()
    yard.collect(fs=fs)
    assert fs.has_read
    assert not yard.missing(slots[0]) and not yard.missing(slots[1])


def test_a_lease_of_a_holder_that_died_runs_out(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(4)
    slot = yard.slot(0, "train")
    take_lease(yard.run, [slot], holder="me", now=yard.now, lifetime_s=1_000.0)
    yard.collect_all()
    assert not yard.missing(slot)
    yard.now += 2_000.0
    yard.collect_all()
    assert yard.missing(slot)
    assert os.listdir(yard.run.root / "leases") == []


def test_a_reader_that_comes_after_the_mark_is_told(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(4)
    yard.collect()
    slots = [yard.slot(0, "train")]
    with (
        pytest.raises(PrunedError, match="marked for deletion") as told,
        hold(yard.run, slots, holder="me", clock=lambda: yard.now),
    ):
        pass
    assert told.value.blame == "system"
    yard.now += GRACE_S + 1
    yard.collect()
    with (
        pytest.raises(PrunedError, match="pruned by retention") as told,
        hold(yard.run, slots, holder="me", clock=lambda: yard.now),
    ):
        pass
    assert told.value.blame == "user"


def test_a_lease_that_cannot_be_read_holds_everything(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(4)
    yard.collect()
    yard.now += GRACE_S + 1
    (yard.run.root / "leases").mkdir()
    (yard.run.root / "leases" / "lease.ab12").write_text("{")
    with pytest.raises(CorruptError, match=r"lease\.ab12"):
        yard.collect()
    assert yard.pruned() == set()


# -- people interfere -----------------------------------------------------------------------------


def test_a_rewind_within_the_grace_takes_the_mark_back(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(5)
    yard.collect()
    assert is_condemned(yard.run, yard.slot(1, "train"))
    yard.rewind(2)  # it had looked before the mark: now train 1 is what it starts from
    yard.now += GRACE_S + 1
    yard.collect()
    assert not yard.missing(yard.slot(1, "train"))
    assert not is_condemned(yard.run, yard.slot(1, "train"))
    yard.check()


def test_a_rewind_while_a_pass_deletes_stops_it(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(6)
    yard.collect()
    yard.now += GRACE_S + 1

    class Rewinder(FastFs):
        has_rewound = False

        def create(self, path: Path, data: bytes) -> None:
            if "PRUNED" in path.name and not self.has_rewound:
                self.has_rewound = True  # the first deletion has begun
                yard.rewind(4)
            super().create(path, data)

    report = yard.collect(fs=Rewinder())
    assert report.problems == ["the run was changed meanwhile; the rest is the next pass's"]
    assert len(yard.pruned()) == 1
    yard.check()


def test_a_paused_or_halted_run_is_tidied_too(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(4)
    write_pause(yard.run, "lunch")
    yard.collect_all()
    assert len(yard.pruned()) == 2


def test_older_checkpoints_stay_while_a_newer_one_is_not_whole(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(5)
    yard.collect()
    yard.now += GRACE_S + 1
    newest = yard.run.slot_dir(yard.slot(4, "train")) / "a0001-feed1"
    (newest / "checkpoint" / "common").unlink()
    yard.collect_all()
    assert yard.pruned() == {"i0004.train"}


# -- crashes --------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process is gone."""


class CrashingFs(FastFs):
    """Lives for `left` changes."""

    def __init__(self, left: int) -> None:
        self.left = left

    def _count(self) -> None:
        if self.left == 0:
            raise Crash
        self.left -= 1

    def create(self, path: Path, data: bytes) -> None:
        self._count()
        super().create(path, data)

    def append(self, path: Path, data: bytes) -> None:
        self._count()
        super().append(path, data)

    def link(self, source: Path, target: Path) -> None:
        self._count()
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self._count()
        super().rmdir(path)

    def mkdir(self, path: Path) -> None:
        self._count()
        super().mkdir(path)


def rich(folder: Path) -> Yard:
    rules = {"keep_samples": False, "keep_every": 3}
    return Yard(folder, rules, {"shards": 2, "num_rollout": 6}, fold_behind=1)


def make_rich_yard(folder: Path) -> Yard:
    """Everything at once: shards, samples that go, abandoned attempts, a timeline set aside."""
    yard = rich(folder)
    yard.commit_until(2)
    yard.abandon(Slot(2, "rollout", 0, 1))
    yard.rewind(1)
    yard.commit_until(1)
    yard.abandon(yard.slot(1, "train"))
    yard.commit_until(6)
    return yard


def summarize(yard: Yard) -> dict[str, bytes]:
    """Files of the run, but for what differs from pass to pass."""
    found = {}
    for path in sorted(yard.run.root.rglob("*")):
        name, known = path.name, ("PRUNED", "settled")
        is_litter = name.startswith(".tmp-") or ".since-" in name  # gone once the iteration is old
        if path.is_file() and not is_litter and name not in known and "control" not in str(path):
            name = str(path.relative_to(yard.run.root))
            found[name] = b"" if name.endswith(".tar") else path.read_bytes()
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_before_any_change_the_next_pass_goes_on(folder: Path) -> None:
    """Two passes do it all; each is killed before every second of its changes in turn."""
    yard = make_rich_yard(folder / "whole")
    template = folder / "template"
    shutil.copytree(folder / "whole", template, symlinks=True)
    yard.collect_all()
    wanted, start = summarize(yard), 1_000.0
    assert len(yard.pruned()) == 6
    num_killed = 0
    for number_of_pass in range(2):
        for left in range(number_of_pass, 1_000, 2):
            again = folder / "again"
            shutil.rmtree(again, ignore_errors=True)
            shutil.copytree(template, again, symlinks=True)
            yard = rich(again)
            yard.now = start
            for _ in range(number_of_pass):
                yard.collect()
                yard.now += GRACE_S + 1
            fs = CrashingFs(left)
            try:
                yard.collect(fs=fs)
            except Crash:
                num_killed += 1
            yard.check()
            yard.collect_all()
            yard.check()
            assert summarize(yard) == wanted, f"killed in pass {number_of_pass} after {left}"
            if fs.left:
                break
    assert num_killed > 75, num_killed


@pytest.mark.slow
def test_two_passes_at_once_do_no_harm(folder: Path) -> None:
    """The second runs whole, just before each change of the first."""
    make_rich_yard(folder / "template")
    for number_of_pass in range(2):
        for left in range(0, 1_000, 7):
            again = folder / "again"
            shutil.rmtree(again, ignore_errors=True)
            shutil.copytree(folder / "template", again, symlinks=True)
            yard = rich(again)
            for _ in range(number_of_pass):
                yard.collect()
                yard.now += GRACE_S + 1

            class Interrupted(CrashingFs):
                def _count(self) -> None:
                    if self.left == 0:
                        other.collect()  # noqa: B023 (called in this very pass)
                    self.left -= 1

            other, fs = yard, Interrupted(left)
            yard.collect(fs=fs)
            yard.check()
            yard.collect_all()
            yard.check()
            assert len(yard.pruned()) == 6
            left_over = {path.name for path in yard.run.root.rglob("*TOMBSTONE*")}
            assert all(".since-" in name for name in left_over), left_over
            if fs.left > 0:
                break


def test_half_deleted_is_told_from_damaged(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(4)
    yard.collect()
    yard.now += GRACE_S + 1
    slot = yard.slot(0, "train")

    class DiesInTheFiles(FastFs):
        def unlink(self, path: Path) -> None:
            super().unlink(path)
            if "checkpoint" in str(path):
                raise Crash

    with pytest.raises(Crash):
        yard.collect(fs=DiesInTheFiles())
    commit = read_commit(yard.run, slot)
    assert commit is not None and 0 < len(yard.missing(slot)) < len(commit.files)
    assert find_damage(yard.run, slot, commit) == []
    other = yard.slot(3, "train")
    (yard.run.slot_dir(other) / "a0001-feed1" / "weights" / "model").unlink()
    commit = read_commit(yard.run, other)
    assert commit is not None and len(find_damage(yard.run, other, commit)) == 1


# -- the archive ----------------------------------------------------------------------------------


def test_files_are_in_the_archive_before_they_go(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(4)
    (folder / "cold").mkdir()
    archive = folder / "cold" / "toy-abcdef01"
    yard.collect_all(archive=archive)
    slot = yard.slot(0, "train")
    assert yard.missing(slot)
    place = archive / "iterations" / "000000" / "train.t0"
    assert (place / "COMMIT").read_bytes() == (yard.run.slot_dir(slot) / "COMMIT").read_bytes()
    shutil.copytree(place, yard.run.slot_dir(slot), dirs_exist_ok=True)
    assert not yard.missing(slot), "copied back, it is what was committed"
    with pytest.raises(PrunedError, match=str(place)):
        list_held(yard, slot)


def list_held(yard: Yard, slot: Slot) -> None:
    with hold(yard.run, [slot], holder="me", clock=lambda: yard.now):
        pass


class TornCopies(FastFs):
    """Writes one wrong byte into each copy for the archive."""

    def append(self, path: Path, data: bytes) -> None:
        super().append(path, data.replace(b"i", b"j", 1) if "cold" in str(path) else data)


def test_a_copy_that_is_not_what_was_committed_blocks_the_deletion(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(4)
    (folder / "cold").mkdir()
    archive = folder / "cold" / "toy-abcdef01"
    yard.collect()
    yard.now += GRACE_S + 1
    report = yard.collect(fs=TornCopies(), archive=archive)
    assert len(report.problems) == 2 and "the copy has digest" in report.problems[0]
    assert yard.pruned() == set()
    assert names_below(archive) == set(), "half copies are tidied away"
    yard.collect(archive=archive)
    assert len(yard.pruned()) == 2


def test_a_copy_that_was_damaged_later_blocks_the_deletion(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(3)
    (folder / "cold").mkdir()
    archive = folder / "cold" / "toy-abcdef01"
    yard.collect()
    yard.now += GRACE_S + 1

    class DiesBeforePruned(FastFs):
        def create(self, path: Path, data: bytes) -> None:
            if "PRUNED" in path.name:
                raise Crash
            super().create(path, data)

    with pytest.raises(Crash):
        yard.collect(fs=DiesBeforePruned(), archive=archive)
    (copy,) = archive.rglob("common")
    copy.write_bytes(copy.read_bytes().replace(b"t", b"u", 1))
    report = yard.collect(archive=archive)
    assert "the copy has digest" in report.problems[0]
    assert yard.pruned() == set()
    yard.collect(archive=archive)
    assert yard.pruned() == {"i0000.train"}


def test_a_damaged_original_is_not_archived_over(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(3)
    (folder / "cold").mkdir()
    victim = yard.run.slot_dir(yard.slot(0, "train")) / "a0001-feed1" / "weights" / "model"
    victim.write_bytes(victim.read_bytes().replace(b"t", b"u", 1))
    yard.collect()
    yard.now += GRACE_S + 1
    report = yard.collect(archive=folder / "cold" / "toy-abcdef01")
    assert "the copy has digest" in report.problems[0]
    assert victim.exists()


def test_an_archive_that_is_not_mounted_blocks_the_deletion(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(3)
    yard.collect_all(archive=folder / "cold" / "toy-abcdef01")
    assert yard.pruned() == set()
    assert not (folder / "cold").exists()


# -- inodes and cost ------------------------------------------------------------------------------


def test_old_iterations_keep_few_inodes(folder: Path) -> None:
    yard = Yard(folder, changes={"num_rollout": 20})
    yard.commit_until(20)
    before = len(list(yard.run.iteration_dir(3).rglob("*")))
    yard.collect_all()
    old = sorted(
        str(p.relative_to(yard.run.iteration_dir(3))) for p in yard.run.iteration_dir(3).rglob("*")
    )
    assert before > 30
    assert old == [
        "records.0001.tar",
        "rollout.t0",
        "rollout.t0/COMMIT",
        "rollout.t0/a0001-feed1",
        "rollout.t0/a0001-feed1/samples.jsonl",
        "rollout.t0/a0001-feed1/samples.safetensors",
        "rollout.t0/a0001-feed1/stats.json",
        "train.t0",
        "train.t0/COMMIT",
        "train.t0/PRUNED",
    ]
    assert (yard.run.iteration_dir(20 - 2 - 12) / "logs").exists()


def test_the_cost_does_not_grow_with_the_run(folder: Path) -> None:
    class CountingFs(FastFs):
        def __init__(self) -> None:
            self.seen: set[str] = set()

        def list(self, path: Path) -> list[str]:
            self.seen.add(str(path))
            return super().list(path)

        def read(self, path: Path) -> bytes:
            self.seen.add(str(path))
            return super().read(path)

    yard = Yard(folder, changes={"num_rollout": 40})
    counts = []
    for head in (20, 40):
        yard.commit_until(head)
        yard.collect_all()
        fs = CountingFs()
        yard.collect(fs=fs)
        counts.append(len(fs.seen))
    assert counts[1] <= counts[0] + 5, counts


def test_rules_that_change_look_at_everything_again(folder: Path) -> None:
    yard = Yard(folder, {"keep_every": 2})
    yard.commit_until(8)
    yard.collect_all()
    assert len(yard.pruned()) == 3
    other = Yard(folder, {"keep_every": 4})
    other.now = yard.now
    other.collect_all()
    assert len(other.pruned()) == 5


def test_control_is_read_before_anything_else(folder: Path) -> None:
    yard = Yard(folder)
    yard.commit_until(3)
    (yard.run.control_dir / "timeline-1").write_text("{")
    with pytest.raises(CorruptError):
        yard.collect()
    assert not list(yard.run.root.rglob("TOMBSTONE*"))
    (yard.run.control_dir / "timeline-1").unlink()
    assert read_control(yard.run).timelines == ()
