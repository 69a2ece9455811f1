"""Retention: what may be deleted, decided by pure functions over what was seen.

    judge(item, rules, scene) -> verdict

An *item* is what takes space: the bulk of a commit (its files; the COMMIT itself always stays), or
what an attempt left that lost its slot. A *scene* is what the chain needs, and what time it is.
Effects are in `prune`, the gathering of items in `chain/gc.py`.

What may never go: an input of a stage that is not committed, the initial weights, an attempt that
may still commit, the newest `keep_last` iterations, anything somebody holds a lease on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from slurm_rl.config.schema import Retention
from slurm_rl.storage.tombstones import Tombstone
from slurm_rl.types import Slot, StageRef

#: Stages whose commits may hold checkpoints or weights, and those whose commits are of samples.
CHECKPOINT_KINDS = frozenset({"train", "critic", "reference"})
SAMPLE_KINDS = frozenset({"rollout", "score", "teacher"})
#: So many iterations beyond what `keep_last` keeps still have their logs as files.
FOLD_BEHIND = 12
#: What a run without `keep_last` keeps whole before it folds records.
_DEFAULT_KEEP = 8


@dataclass(frozen=True, slots=True)
class Item:
    """The bulk of a slot's commit (`attempt` is empty), or what one attempt at the slot left.

    is_current:   the slot is on the timeline that counts now.
    is_committed: the slot has a COMMIT; of a shard's bulk: whose stage has none.
    is_winner:    `attempt` is the one that the COMMIT names.
    held_by:      who holds a lease on the slot; empty: nobody.
    is_done:      it was pruned, and nothing of it is left to delete.
    """

    slot: Slot
    attempt: str = ""
    is_current: bool = True
    is_committed: bool = True
    is_winner: bool = False
    held_by: str = ""
    tombstone: Tombstone | None = None
    is_pruned: bool = False
    is_done: bool = False
    size_bytes: int = 0
    num_files: int = 0

    def __str__(self) -> str:
        return f"{self.slot}/{self.attempt}" if self.attempt else str(self.slot)


@dataclass(frozen=True, slots=True)
class Scene:
    """What the chain needs now.

    head:   first iteration that is not complete.
    needed: stages that are parents of a stage without a commit.
    now:    by the clock of the run's file system.
    damage: why the newest checkpoints cannot be trusted; older ones stay while there is a reason.
    """

    head: int
    needed: frozenset[StageRef]
    now: float
    damage: str = ""


class Act(Enum):
    """What is to be done about an item."""

    KEEP = "keep"
    CONDEMN = "condemn"  # publish the tombstone
    WAIT = "wait"  # for the grace, or a reader
    PARDON = "pardon"  # take the tombstone back
    DELETE = "delete"
    GONE = "gone"  # deleted already


@dataclass(frozen=True, slots=True)
class Verdict:
    """An act and its reason in words. is_final: it will be the same for as long as rules are."""

    act: Act
    why: str
    is_final: bool = False


def judge(item: Item, *, rules: Retention, scene: Scene) -> Verdict:
    """What to do about one item. Pure."""
    if item.is_pruned and not item.attempt:
        # Past the point of no return, whatever the rules say by now.
        if item.is_done and item.tombstone is None:
            return Verdict(Act.GONE, "pruned", is_final=True)
        return Verdict(Act.DELETE, "its deletion was begun")
    kept = _find_reason(item, rules, scene)
    if kept is not None:
        return kept if item.tombstone is None else Verdict(Act.PARDON, kept.why)
    if item.tombstone is None:
        if item.held_by:
            return Verdict(Act.WAIT, f"in use: {item.held_by}")
        return Verdict(Act.CONDEMN, _describe(item))
    if item.tombstone.since is None:
        return Verdict(Act.CONDEMN, "its grace has not begun")
    left_s = item.tombstone.since + rules.gc_grace_s - scene.now
    if left_s > 0:
        return Verdict(Act.WAIT, f"marked; goes in {left_s:.0f} s")
    if item.held_by:
        return Verdict(Act.WAIT, f"in use: {item.held_by}")
    return Verdict(Act.DELETE, _describe(item))


def may_fold(
    iteration: int,
    *,
    verdicts: Iterable[Verdict],
    head: int,
    rules: Retention,
    behind: int = FOLD_BEHIND,
) -> bool:
    """Whether the records of an iteration may go into one file: nothing more will happen there,
    and people are done with its logs."""
    return iteration < head - keep_last(rules) - behind and all(v.is_final for v in verdicts)


def keep_last(rules: Retention) -> int:
    """Newest iterations that stay whole: never below one valid checkpoint and one new."""
    return _DEFAULT_KEEP if rules.keep_last is None else max(2, rules.keep_last)


def is_every(iteration: int, rules: Retention) -> bool:
    """Whether `keep_every` keeps an iteration: those after which the version is a multiple."""
    return rules.keep_every is not None and (iteration + 1) % rules.keep_every == 0


def _find_reason(item: Item, rules: Retention, scene: Scene) -> Verdict | None:
    """Why an item stays; None if it may go."""
    if item.attempt:
        return _keep_attempt(item, rules)
    return _keep_bulk(item, rules, scene)


def _keep_attempt(item: Item, rules: Retention) -> Verdict | None:
    if item.is_winner:
        return Verdict(Act.KEEP, "committed", is_final=True)
    if item.is_current and not item.is_committed:
        return Verdict(Act.KEEP, "it may still commit")
    if rules.keep_last is None:
        return Verdict(Act.KEEP, "retention.keep_last is not set", is_final=True)
    return None


def _keep_bulk(item: Item, rules: Retention, scene: Scene) -> Verdict | None:
    """Of what timelines set aside, only the rule of the newest iterations holds."""
    slot = item.slot
    if not item.is_committed:
        return Verdict(Act.KEEP, "not committed")
    if rules.keep_last is None:
        return Verdict(Act.KEEP, "retention.keep_last is not set", is_final=True)
    if slot.kind not in CHECKPOINT_KINDS | SAMPLE_KINDS:
        why = "initial weights" if slot.kind == "init" else "results, not bulk"
        return Verdict(Act.KEEP, why, is_final=True)
    if slot.iteration >= scene.head - keep_last(rules):
        return Verdict(Act.KEEP, f"one of the last {keep_last(rules)} iterations")
    if item.is_current:
        if slot.stage in scene.needed or slot.shard is not None:
            return Verdict(Act.KEEP, "a stage that is not committed needs it")
        if is_every(slot.iteration, rules):
            return Verdict(Act.KEEP, f"retention.keep_every = {rules.keep_every}", is_final=True)
    if slot.kind in SAMPLE_KINDS and rules.keep_samples:
        return Verdict(Act.KEEP, "samples stay (retention.keep_samples)", is_final=True)
    if scene.damage:
        return Verdict(Act.KEEP, f"a newer checkpoint is not whole: {scene.damage}")
    return None


def _describe(item: Item) -> str:
    if item.attempt:
        return "lost its slot" if item.is_current else "its timeline was set aside"
    return "older than what is kept" if item.is_current else "set aside, and left behind"
