"""Every prefix of every durable write, with what was not synced dropped: no reader is misled.

Then each sync is left out of the record in turn, and the same test must see it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from toy.power_cut import Op, RecordingFs, replay, survivors, write_tree
from toy.world import FastFs

from slurm_rl.errors import CorruptError, NoRunError
from slurm_rl.storage.claims import attempt_dir, read_claims, try_claim
from slurm_rl.storage.commits import find_damage, publish_commit, read_commit
from slurm_rl.storage.control import Halt, read_control, start_timeline, write_halt, write_pause
from slurm_rl.storage.durable import publish, read_published, seal_files, write_file
from slurm_rl.storage.intents import Intent, publish_intent, read_intents
from slurm_rl.storage.rundir import RunDir, RunIdentity, create_run, read_identity
from slurm_rl.types import Claim, Slot, StageRef

SLOT = Slot(0, "rollout", 0, 1)
CLAIM = Claim(1, "job", "attempt")
IDENTITY = RunIdentity("abcdef01", "toy", 0.0, "me", "0", {"a": 1}, "text")


@pytest.fixture
def folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Story:
    """Durable writes, recorded; `done` notes after how many operations each had returned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "disk"
        self.root.mkdir()
        self.fs = RecordingFs(FastFs())
        self.run = RunDir(self.root / "toy", self.fs)
        self.done: dict[str, int] = {}

    def note(self, what: str) -> None:
        self.done[what] = len(self.fs.ops)

    def check(self, ops: list[Op], look: Callable[[RunDir, set[str]], None]) -> None:
        """`look` at every tree that a power cut after any prefix of `ops` may leave.

        It is told which writes had returned by then: those must have survived.
        """
        skipped = [op for op in self.fs.ops if op not in ops]
        seen: set[tuple[object, ...]] = set()
        for length in range(len(ops) + 1):
            # A prefix of a record with holes ends where the whole record's prefix would.
            reached = self._position(ops, length, skipped)
            returned = {what for what, number in self.done.items() if number <= reached}
            for tree in survivors(replay(ops[:length], self.root)):
                key = (tuple(sorted(tree.items())), tuple(sorted(returned)))
                if key not in seen:
                    seen.add(key)
                    self._look(tree, returned, look)

    def _position(self, ops: list[Op], length: int, skipped: list[Op]) -> int:
        if not skipped or length == 0:
            return length
        whole = [op for op in self.fs.ops if op in ops or op in skipped]
        last = ops[length - 1]
        number = max(i for i, op in enumerate(whole, 1) if op is last)
        while number < len(whole) and whole[number] in skipped:
            number += 1
        return number

    def _look(
        self,
        tree: dict[str, bytes | None],
        returned: set[str],
        look: Callable[[RunDir, set[str]], None],
    ) -> None:
        after = self.folder / "after"
        shutil.rmtree(after, ignore_errors=True)
        write_tree(tree, after)
        look(RunDir(after / "toy", FastFs()), returned)


def tell_story(folder: Path) -> Story:
    """A run is made, a stage submitted, claimed, worked on and committed; people interfere."""
    story = Story(folder)
    run = story.run
    assert create_run(run, IDENTITY)
    story.note("run")
    stage = run.stage_dir(0, "rollout", 0)
    assert publish_intent(run, stage, Intent(1, "token", 0.0))
    story.note("intent")
    assert try_claim(run, SLOT, CLAIM)
    story.note("claim")
    attempt = attempt_dir(run, SLOT, CLAIM)
    write_file(attempt / "order.json", b"{}", fs=run.fs)
    run.fs.mkdir(attempt / "weights")
    run.fs.create(attempt / "weights" / "state", b"state")
    run.fs.create(attempt / "samples", b"samples")
    files = seal_files(attempt, ["samples", "weights/state"], fs=run.fs)
    content = {
        "files": [{"path": f.path, "size_bytes": f.size_bytes, "digest": f.digest} for f in files]
    }
    assert publish_commit(run, SLOT, content=content, provenance={"attempt": CLAIM.attempt_name})
    story.note("commit")
    write_pause(run, "a person")
    story.note("pause")
    assert start_timeline(run, StageRef(0, "train"), after=0, reason="why")
    story.note("timeline")
    assert write_halt(run, Halt("reason"))
    story.note("halt")
    return story


def look(run: RunDir, returned: set[str]) -> None:
    """What readers see is nothing, or whole; and what had returned is there."""
    try:
        assert read_identity(run) == IDENTITY
    except NoRunError:
        assert "run" not in returned, "the run is gone"
    intents = read_intents(run, run.stage_dir(0, "rollout", 0))
    assert [intent.token for intent in intents] in ([], ["token"])
    assert intents or "intent" not in returned, "the intent is gone"
    claims = read_claims(run, SLOT)
    assert claims in ([], [CLAIM])
    assert claims or "claim" not in returned, "the claim is gone"
    commit = read_commit(run, SLOT)
    assert commit is not None or "commit" not in returned, "the commit is gone"
    if commit is not None:
        assert find_damage(run, SLOT, commit) == []
    control = read_control(run)
    assert control.paused in (None, "a person")
    assert control.paused is not None or "pause" not in returned
    assert control.timelines or "timeline" not in returned
    assert control.halt in (None, Halt("reason"))
    assert control.halt is not None or "halt" not in returned


def test_no_prefix_of_a_stages_life_misleads_a_reader(folder: Path) -> None:
    story = tell_story(folder)
    story.check(story.fs.ops, look)


#: Which sync is left out: the kind, and what its path contains (in the order of the story).
SYNCS = {
    "the identity's data": ("fsync", "run.json"),
    "the identity's name": ("fsync_dir", "/toy"),
    "the run's own name": ("fsync_dir", "/disk"),
    "the intent's data": ("fsync", "submit.0001"),
    "the intent's name": ("fsync_dir", "/rollout.t0"),
    "the iteration's name": ("fsync_dir", "/iterations"),
    "the stage's name": ("fsync_dir", "/000000"),
    "the claim's data": ("fsync", "claim.0001"),
    "names in the shard": ("fsync_dir", "/shard-0001"),
    "the samples' data": ("fsync", "/samples"),
    "the weights' data": ("fsync", "/weights/state"),
    "names in the attempt": ("fsync_dir", "-attempt"),
    "names of the weights": ("fsync_dir", "/weights"),
    "the commit's data": ("fsync", "COMMIT"),
    "the pause's data": ("fsync", "timeline-1"),
    "the halt's data": ("fsync", "HALT"),
    "names in control": ("fsync_dir", "/control"),
}


@pytest.mark.parametrize("name", SYNCS)
def test_a_sync_left_out_is_noticed(folder: Path, name: str) -> None:
    kind, part = SYNCS[name]
    story = tell_story(folder)

    def is_left_out(op: Op) -> bool:
        path = str(op.path)
        return op.kind == kind and (path.endswith(part) if kind == "fsync_dir" else part in path)

    kept = [op for op in story.fs.ops if not is_left_out(op)]
    assert len(kept) < len(story.fs.ops), "nothing was left out"
    with pytest.raises((AssertionError, CorruptError)):
        story.check(kept, look)


def test_write_file_leaves_the_old_bytes_or_the_new(folder: Path) -> None:
    story = Story(folder)
    path = story.root / "toy" / "file"
    story.fs.mkdir(path.parent)
    story.fs.fsync_dir(story.root)
    write_file(path, b"old", fs=story.fs)
    story.note("old")
    write_file(path, b"new", fs=story.fs)
    story.note("new")

    def look_at_file(run: RunDir, returned: set[str]) -> None:
        data = read_published(run.root / "file", fs=run.fs)
        assert data in (
            [b"new"] if "new" in returned else [b"old", b"new"] if returned else [None, b"old"]
        )

    story.check(story.fs.ops, look_at_file)
    for kind in ("fsync", "fsync_dir"):
        kept = [op for op in story.fs.ops if op.kind != kind or op.path == story.root]
        with pytest.raises(AssertionError):
            story.check(kept, look_at_file)


def test_publish_without_hard_links_is_as_safe(folder: Path) -> None:
    story = Story(folder)

    class NoLinks(FastFs):
        def link(self, source: Path, target: Path) -> None:
            raise PermissionError(1, "Operation not permitted")

    story.fs.inner = NoLinks()
    path = story.root / "toy" / "COMMIT"
    story.fs.mkdir(path.parent)
    story.fs.fsync_dir(story.root)
    assert publish(path, b"data", fs=story.fs)
    story.note("published")

    def look_at_file(run: RunDir, returned: set[str]) -> None:
        data = read_published(run.root / "COMMIT", fs=run.fs)
        assert data in ((b"data",) if returned else (None, b"data"))

    story.check(story.fs.ops, look_at_file)
