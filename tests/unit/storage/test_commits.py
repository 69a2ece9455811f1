"""Commits: what is read, what is refused, and what shards make together."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.errors import CorruptError
from slurm_rl.storage.claims import attempt_dir, try_claim
from slurm_rl.storage.commits import (
    assemble,
    commit_path,
    find_damage,
    publish_commit,
    read_commit,
    read_stage_commit,
    resolve_input,
)
from slurm_rl.storage.digest import digest_value
from slurm_rl.storage.durable import seal_files
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Claim, Commit, Slot, StageRef

REF = StageRef(3, "rollout")


def make_run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def commit_shard(run: RunDir, slot: Slot, *, token: str = "a", **facts: Any) -> bool:
    """An attempt that leaves `data` with its shard's number in it and commits."""
    claim = Claim(1, "job", token)
    try_claim(run, slot, claim)
    folder = attempt_dir(run, slot, claim)
    folder.mkdir(exist_ok=True)
    (folder / "data").write_text(f"shard {slot.shard}")
    files = [
        {"path": e.path, "size_bytes": e.size_bytes, "digest": e.digest}
        for e in seal_files(folder, ["data"])
    ]
    content = {"stage": slot.kind, "iteration": slot.iteration, "files": files, **facts}
    if slot.shard is not None:
        content["shard"] = slot.shard
    provenance = {"attempt": claim.attempt_name, "metrics": {"reward": float(slot.shard or 0)}}
    return publish_commit(run, slot, content=content, provenance=provenance)


def test_a_slot_takes_one_commit_and_the_loser_keeps_its_files(tmp_path: Path) -> None:
    run, slot = make_run(tmp_path), Slot(0, "train", 0)
    assert commit_shard(run, slot, token="first")
    assert not commit_shard(run, slot, token="second")
    commit = read_commit(run, slot)
    assert commit is not None
    assert commit.provenance["attempt"] == "a0001-first"
    assert (run.slot_dir(slot) / "a0001-second" / "data").exists()


def test_what_differs_in_provenance_alone_has_the_same_digest(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    slots = [Slot(0, "train", timeline) for timeline in (0, 1)]
    for slot, token in zip(slots, ("one", "two"), strict=True):
        commit_shard(run, slot, token=token)
    first, second = (read_commit(run, slot) for slot in slots)
    assert first is not None and second is not None
    assert first.provenance != second.provenance
    assert first.digest == second.digest


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"{}",
        lambda data: b"[1]",
        lambda data: data.replace(b'"iteration":0', b'"iteration":1'),
    ],
    ids=["empty", "half", "nothing in it", "not a mapping", "changed"],
)
def test_a_damaged_commit_is_never_read_as_none(tmp_path: Path, damage: Any) -> None:
    run, slot = make_run(tmp_path), Slot(0, "train", 0)
    commit_shard(run, slot)
    path = commit_path(run, slot)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptError, match="COMMIT"):
        read_commit(run, slot)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p.unlink(), "No such file"),
        (lambda p: p.write_text("longer than it was"), "bytes, but 10 were committed"),
        (lambda p: p.write_text("SHARD None"), "digest"),
    ],
)
def test_verification_names_each_file_that_is_not_as_it_was(
    tmp_path: Path, change: Any, says: str
) -> None:
    run, slot = make_run(tmp_path), Slot(0, "train", 0)
    commit_shard(run, slot)
    commit = read_commit(run, slot)
    assert commit is not None
    assert find_damage(run, slot, commit) == []
    change(run.slot_dir(slot) / "a0001-a" / "data")
    (line,) = find_damage(run, slot, commit)
    assert says in line
    assert "a0001-a/data" in line


def test_the_last_shard_or_anybody_else_makes_the_stage_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    facts = {"cursor": {"position": 8}, "num_samples": 4}
    for shard in (1, 0):
        assert read_stage_commit(run, REF, timeline=0, num_shards=2) is None
        commit_shard(run, Slot(3, "rollout", 0, shard), **facts)
    commit = read_stage_commit(run, REF, timeline=0, num_shards=2)
    assert commit is not None
    assert [entry.path for entry in commit.files] == ["shard-0000/data", "shard-0001/data"]
    assert commit.content["num_samples"] == 8
    assert commit.content["cursor"] == {"position": 8}
    assert "shard" not in commit.content
    assert commit.provenance["metrics"] == {"reward": 0.5}
    assert find_damage(run, Slot(3, "rollout", 0), commit) == []
    found = resolve_input(run, "rollout", REF, Slot(3, "rollout", 0), commit)
    assert [Path(path).read_text() for path in found.named("data")] == ["shard 0", "shard 1"]


def make_commit(shard: int, **facts: Any) -> Commit:
    content = {"shard": shard, "files": [], **facts}
    return Commit(content, {"attempt": f"a{shard}"}, digest_value(content))


def test_assembly_is_pure(tmp_path: Path) -> None:
    shards = [make_commit(i, num_samples=i, seed=7) for i in range(3)]
    before = json.dumps([shard.content for shard in shards])
    assert assemble(shards) == assemble(shards)
    assert json.dumps([shard.content for shard in shards]) == before


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6))
def test_counts_add_up_and_shards_are_named_in_order(counts: list[int]) -> None:
    shards = [make_commit(i, num_samples=n) for i, n in enumerate(counts)]
    content, provenance = assemble(shards)
    assert content["num_samples"] == sum(counts)
    assert content["shards"] == [shard.digest for shard in shards]
    assert list(provenance["attempts"]) == [f"shard-{i:04d}" for i in range(len(counts))]


@pytest.mark.parametrize("key", ["seed", "cursor", "parents", "weights", "settings"])
def test_shards_that_disagree_are_refused(key: str) -> None:
    with pytest.raises(CorruptError, match=key):
        assemble([make_commit(0, **{key: 1}), make_commit(1, **{key: 2})])


def test_a_fact_that_only_a_later_shard_has_is_a_disagreement() -> None:
    for order in itertools.permutations(({}, {"seed": 1})):
        with pytest.raises(CorruptError, match="seed"):
            assemble([make_commit(i, **facts) for i, facts in enumerate(order)])
