"""Commits: publishing, reading, assembling and verifying the results of slots.

COMMIT holds `content` (digested), `provenance` (not) and the digest of the content. Readers follow
COMMIT and nothing else. It names files relative to the attempt directory; the provenance says
which attempt that is. A stage of several shards has a COMMIT for each and one for the whole, which
anyone may assemble, since it is a pure function of theirs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from slurm_rl.errors import CorruptError
from slurm_rl.storage.damage import describe_damage
from slurm_rl.storage.digest import digest_value
from slurm_rl.storage.durable import exists, publish, read_published
from slurm_rl.storage.rundir import RunDir
from slurm_rl.storage.tombstones import is_pruned
from slurm_rl.types import Commit, Input, Result, Slot, StageRef, canonical_json

_NAME = "COMMIT"
#: Seconds in the provenance, by one machine's steady clock; of shards, those of the slowest.
DURATIONS = ("work_s", "startup_s", "save_s")


def commit_path(run: RunDir, slot: Slot) -> Path:
    return run.slot_dir(slot) / _NAME


def has_commit(run: RunDir, slot: Slot) -> bool:
    """Whether something was published for `slot` (it is not read).

    A listing may be late, or a lookup: commits stay, so whichever shows it is right.
    """
    path = commit_path(run, slot)
    return path.name in run.fs.list(path.parent) or exists(path, fs=run.fs)


def read_commit(run: RunDir, slot: Slot) -> Commit | None:
    """The commit of `slot`, its digest checked; None if there is none. Raises CorruptError."""
    path = commit_path(run, slot)
    data = read_published(path, fs=run.fs)
    if data is None:
        return None
    try:
        commit, found = _parse_commit(data)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(
            f"{path}: not a commit ({error})", hint="see `slurm-rl verify`"
        ) from error
    if found != commit.digest:
        raise CorruptError(
            f"{path}: digest = {commit.digest}, but its content has {found}",
            hint="the file was changed or damaged; see `slurm-rl verify`",
        )
    return commit


@functools.lru_cache(maxsize=64)  # who waits reads the same bytes every second
def _parse_commit(data: bytes) -> tuple[Commit, str]:
    """A commit, and the digest that its content has."""
    raw = json.loads(data)
    commit = Commit(raw["content"], raw["provenance"], raw["digest"])
    if not {"attempt", "attempts"} & set(commit.provenance):
        raise ValueError("its provenance names no attempt")
    return commit, digest_value(commit.content)


def make_content(
    slot: Slot, result: Result, *, parents: dict[str, str], settings_digest: str
) -> dict[str, Any]:
    """The content of a commit: what the program left, and what it was made from."""
    content: dict[str, Any] = {
        **result.content,
        "stage": slot.kind,
        "iteration": slot.iteration,
        "settings": settings_digest,
        "parents": parents,
        "files": [dataclasses.asdict(entry) for entry in result.files],
    }
    if slot.shard is not None:
        content["shard"] = slot.shard
    return content


def publish_commit(
    run: RunDir, slot: Slot, *, content: dict[str, Any], provenance: dict[str, Any]
) -> bool:
    """Publish the result of an attempt; True if the slot's COMMIT is this one.

    `provenance` must carry the attempt's token, or two attempts could both believe they won.
    Everything that `content` names is durable already. On losing, nothing is deleted.
    """
    data = {"content": content, "provenance": provenance, "digest": digest_value(content)}
    return publish(commit_path(run, slot), canonical_json(data), fs=run.fs)


def read_stage_commit(
    run: RunDir, ref: StageRef, *, timeline: int, num_shards: int
) -> Commit | None:
    """The commit of a whole stage; assembles and publishes it if all its shards are there."""
    stage = Slot(ref.iteration, ref.kind, timeline)
    commit, is_published = find_stage_commit(run, stage, num_shards=num_shards)
    if commit is None or is_published:
        return commit
    publish_commit(run, stage, content=commit.content, provenance=commit.provenance)
    # Somebody else's may not show here yet; it is the same, since it is made of the same shards.
    return read_commit(run, stage) or commit


def find_stage_commit(run: RunDir, stage: Slot, *, num_shards: int) -> tuple[Commit | None, bool]:
    """The commit of a whole stage, and whether it is published as such; if not, as its shards make
    it. Writes nothing."""
    commit = read_commit(run, stage)
    if commit is not None or num_shards == 1:
        return commit, commit is not None
    shards = []
    for index in range(num_shards):
        shard = read_commit(run, dataclasses.replace(stage, shard=index))
        if shard is None:
            return None, False
        shards.append(shard)
    content, provenance = assemble(shards)
    return Commit(content, provenance, digest_value(content)), False


def assemble(shards: list[Commit]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Content and provenance of a stage from its shards' commits, in shard order.

    Facts that all shards share stay as they are, counts (`num_…`) add up, and files are listed
    under `shard-NNNN/`. Raises CorruptError where shards disagree about anything else: they
    were not made from the same inputs.
    """
    merged: dict[str, Any] = {}
    for key in sorted({key for shard in shards for key in shard.content}):
        values = [shard.content.get(key) for shard in shards]
        if key == "files":
            merged[key] = [
                {**entry, "path": f"shard-{index:04d}/{entry['path']}"}
                for index, files in enumerate(values)
                for entry in files or []
            ]
        elif key.startswith("num_"):
            merged[key] = sum(int(value or 0) for value in values)
        elif key != "shard":
            if any(value != values[0] for value in values):
                raise CorruptError(f"shards disagree about `{key}`: {values}")
            merged[key] = values[0]
    merged["shards"] = [shard.digest for shard in shards]
    attempts = {
        f"shard-{index:04d}": f"shard-{index:04d}/{shard.provenance['attempt']}"
        for index, shard in enumerate(shards)
    }
    metrics = _fold_metrics(shards)
    times = [shard.provenance for shard in shards if "work_s" in shard.provenance]
    slowest = max(times, key=lambda facts: float(facts["work_s"]), default={})
    facts = {name: slowest[name] for name in DURATIONS if name in slowest}
    committed = [s.provenance["committed"] for s in shards if "committed" in s.provenance]
    if committed:
        facts["committed"] = max(committed)
    for shard in shards:
        if "versions" in shard.provenance:
            facts["versions"] = facts.get("versions", {}) | shard.provenance["versions"]
    return merged, {"attempts": attempts, "metrics": metrics, **facts}


def resolve_input(run: RunDir, role: str, ref: StageRef, slot: Slot, commit: Commit) -> Input:
    """What a stage program is told of one of its inputs."""
    folder = run.slot_dir(slot)
    attempt = commit.provenance.get("attempt")
    return Input(
        role=role,
        iteration=ref.iteration,
        kind=ref.kind,
        digest=commit.digest,
        path=str(folder / attempt if attempt else folder),
        files={entry.path: str(file_path(run, slot, commit, entry.path)) for entry in commit.files},
        content=commit.content,
    )


def file_path(run: RunDir, slot: Slot, commit: Commit, logical: str) -> Path:
    """Where the committed file `logical` lies."""
    folder = run.slot_dir(slot)
    if "attempt" in commit.provenance:
        return Path(folder / commit.provenance["attempt"] / logical)
    shard, _, rest = logical.partition("/")
    return Path(folder / commit.provenance["attempts"][shard] / rest)


def find_damage(run: RunDir, slot: Slot, commit: Commit) -> list[str]:
    """Re-read everything that the commit names; one line for each file that is not as it was.

    What retention deletes, or deleted while we read, is gone on purpose: that is no damage.
    """
    if is_pruned(run, slot):
        return []
    damage = []
    for entry in commit.files:
        path = file_path(run, slot, commit, entry.path)
        try:
            found = describe_damage(path, entry, fs=run.fs)
        except OSError as error:
            found = f"{path}: {error.strerror or error}"
        if found:
            damage.append(found)
    return [] if damage and is_pruned(run, slot) else damage


def _fold_metrics(shards: list[Commit]) -> dict[str, float]:
    """Metrics of a stage: means over the samples of all shards, and rates added up."""
    folded: dict[str, float] = {}
    for name in sorted({n for shard in shards for n in shard.provenance.get("metrics", {})}):
        having = [shard for shard in shards if name in shard.provenance.get("metrics", {})]
        values = [float(shard.provenance["metrics"][name]) for shard in having]
        weights = [float(shard.content.get("num_samples", 1)) or 1.0 for shard in having]
        if name.endswith(("_per_s", "groups_taken_over")):
            folded[name] = sum(values)
        else:
            pairs = zip(values, weights, strict=True)
            folded[name] = sum(v * w for v, w in pairs) / sum(weights)
    return folded
