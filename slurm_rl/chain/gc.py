"""Garbage collection: one pass over what a run holds.

A pass marks what is to go, deletes what was marked a grace ago, and folds the records of old
iterations. It may be killed between any two effects and run by any number of processes at once.
Its cost does not grow with the run: it starts where everything before is settled for good.

It is called by ticks, by the watcher of a local run and by `slurm-rl gc`; never by a job with GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rl.chain.evals import read_evals
from slurm_rl.chain.graph import Graph
from slurm_rl.chain.needs import find_needed, find_open, find_open_evals
from slurm_rl.chain.observe import find_head, read_current
from slurm_rl.config.schema import Retention
from slurm_rl.errors import CorruptError, SlurmRlError, StorageError
from slurm_rl.storage.commits import read_commit
from slurm_rl.storage.control import Control, read_control
from slurm_rl.storage.digest import digest_value
from slurm_rl.storage.durable import write_hint
from slurm_rl.storage.leases import Lease, forget_dead_leases, read_leases
from slurm_rl.storage.prune import (
    attempt_dirs,
    committed_files,
    delete_attempt,
    delete_bulk,
    find_unwhole,
    measure_leftovers,
)
from slurm_rl.storage.records import find_records, fold_records
from slurm_rl.storage.retention import (
    CHECKPOINT_KINDS,
    FOLD_BEHIND,
    Act,
    Item,
    Scene,
    Verdict,
    judge,
    keep_last,
    may_fold,
)
from slurm_rl.storage.rundir import RunDir
from slurm_rl.storage.tombstones import (
    is_pruned,
    publish_tombstone,
    read_tombstone,
    remove_tombstone,
    tombstones_in,
)
from slurm_rl.types import Commit, Slot, StageRef

logger = logging.getLogger(__name__)

_STAGE = re.compile(r"(.+)\.t(\d+)")
_SHARD = re.compile(r"shard-(\d{4,})")
_ATTEMPT = re.compile(r"a\d{4,}-[0-9a-zA-Z]+")
_HINT = "settled"
#: A tick's job lasts ten minutes by default; what a pass has begun then still has time to end.
TICK_LIMIT_S = 180.0


@dataclass(frozen=True)
class Keeper:
    """What a pass needs to know of a run.

    archive: the run's own directory in the archive; None: nothing is archived.
    fold_behind: iterations beyond `keep_last`, and beyond the window, whose records stay files.
    """

    run: RunDir
    graph: Graph
    rules: Retention
    window: int
    clock: Callable[[], float]
    archive: Path | None = None
    fold_behind: int = FOLD_BEHIND


@dataclass
class Report:
    """What a pass found and did (with `dry_run`: would do).

    problems: one line for each thing that could not be done; the rest was done all the same.
    """

    verdicts: list[tuple[Item, Verdict]] = field(default_factory=list)
    num_folded: int = 0
    problems: list[str] = field(default_factory=list)

    def having(self, act: Act) -> list[Item]:
        return [item for item, verdict in self.verdicts if verdict.act is act]


class _ControlChanged(Exception):
    """Somebody rewound, paused or changed the run while we looked: what we know is stale."""


def collect(
    keeper: Keeper, *, dry_run: bool = False, is_late: Callable[[], bool] = lambda: False
) -> Report:
    """One pass. `is_late` is asked between two items; what is left then is the next pass's.

    Raises CorruptError if control or a lease cannot be read; nothing is deleted then.
    """
    run, report = keeper.run, Report()
    control = read_control(run)
    head = find_head(run, keeper.graph, control)
    leases = read_leases(run)
    first = _read_settled(keeper, control, head)
    open_refs = find_open(run, keeper.graph, control, first=first, head=head)
    open_refs |= find_open_evals(read_evals(run, keeper.graph, control, head=head))
    scene = Scene(
        head,
        find_needed(keeper.graph, open_refs),
        keeper.clock(),
        _find_damage(keeper, control, head),
    )
    settled = first
    # Evaluations of the last version lie behind the last iteration.
    end = keeper.graph.num_iterations + bool(keeper.graph.evals)
    last = min(head + keeper.window + 1, end)
    try:
        for iteration in range(first, last):
            if is_late():
                break
            is_settled = _collect_iteration(
                keeper, control, scene, leases, iteration, report, dry_run=dry_run
            )
            has_open = any(ref.iteration == iteration for ref in open_refs)
            if is_settled and not has_open and settled == iteration:
                settled += 1
    except _ControlChanged:
        report.problems.append("the run was changed meanwhile; the rest is the next pass's")
    if not dry_run:
        _write_settled(keeper, control, settled)
        forget_dead_leases(run, leases, now=scene.now)
    return report


def _find_damage(keeper: Keeper, control: Control, head: int) -> str:
    """Why the newest two checkpoints cannot be gone back to; empty if they can."""
    for iteration in range(max(0, head - 2), head):
        for node in keeper.graph.stages(iteration):
            if node.kind not in CHECKPOINT_KINDS:
                continue
            ref = StageRef(iteration, node.kind)
            slot = Slot(iteration, node.kind, control.timeline_of(ref))
            try:
                commit = read_current(keeper.run, keeper.graph, control, ref)
            except CorruptError as error:
                return str(error)
            problem = "" if commit is None else find_unwhole(keeper.run, slot, commit)
            if problem:
                return problem
    return ""


def collect_quietly(keeper: Keeper, *, limit_s: float = TICK_LIMIT_S) -> None:
    """A pass beside something else: it does nothing unless `retention.keep_last` is set, begins
    nothing after `limit_s`, and its failure fails nobody."""
    if keeper.rules.keep_last is None:
        return
    began = time.monotonic()
    try:
        report = collect(keeper, is_late=lambda: time.monotonic() - began > limit_s)
    except (SlurmRlError, OSError) as error:
        logger.warning("gc: %s", error)
    except Exception:  # a bug of ours there must not cost an advance
        logger.exception("gc")
    else:
        for problem in report.problems:
            logger.warning("gc: %s", problem)


# -- one iteration --------------------------------------------------------------------------------


def _collect_iteration(
    keeper: Keeper,
    control: Control,
    scene: Scene,
    leases: list[Lease],
    iteration: int,
    report: Report,
    *,
    dry_run: bool,
) -> bool:
    """Judge and treat all that an iteration holds; whether it is settled for good."""
    verdicts = []
    try:
        for item in read_items(keeper.run, control, iteration, leases, now=scene.now):
            verdict = judge(item, rules=keeper.rules, scene=scene)
            if not dry_run:
                verdict = _treat(keeper, control, scene, item, verdict)
            report.verdicts.append((item, verdict))
            verdicts.append(verdict)
        rules, behind = keeper.rules, max(keeper.window, keeper.fold_behind)
        if not may_fold(iteration, verdicts=verdicts, head=scene.head, rules=rules, behind=behind):
            return False
        if _has_open_eval(keeper, iteration, scene.head):
            return False  # its claims and intents are no records yet
        return _fold(keeper, iteration, report, dry_run=dry_run)
    except (SlurmRlError, OSError) as error:
        report.problems.append(str(error))
        return False


def _has_open_eval(keeper: Keeper, version: int, head: int) -> bool:
    """Whether an evaluation of a version may still be done; perhaps it is wanted since just now."""
    evals = read_evals(keeper.run, keeper.graph, read_control(keeper.run), head=head)
    return any(not evals.is_settled(ref) for ref in evals.wanted(version, version))


def _treat(keeper: Keeper, control: Control, scene: Scene, item: Item, verdict: Verdict) -> Verdict:
    """Carry a verdict out; what is to be said of the item then."""
    run = keeper.run
    if verdict.act is Act.CONDEMN:
        publish_tombstone(run, item.slot, item.attempt, clock=keeper.clock)
        logger.info("%s: marked: %s", item, verdict.why)
    elif verdict.act is Act.PARDON:
        remove_tombstone(run, item.slot, item.attempt)
        logger.info("%s: stays after all: %s", item, verdict.why)
    elif verdict.act is Act.DELETE:
        return _delete(keeper, control, scene, item, verdict)
    return verdict


def _delete(
    keeper: Keeper, control: Control, scene: Scene, item: Item, verdict: Verdict
) -> Verdict:
    """Look at leases, tombstone and control once more, then delete."""
    run = keeper.run
    leases = read_leases(run)
    if read_control(run) != control:
        raise _ControlChanged
    now = keeper.clock()
    fresh = dataclasses.replace(
        item,
        held_by=_find_holder(leases, item.slot, now),
        tombstone=read_tombstone(run, item.slot, item.attempt),
        is_pruned=is_pruned(run, item.slot),
    )
    again = judge(fresh, rules=keeper.rules, scene=dataclasses.replace(scene, now=now))
    if again.act is not Act.DELETE:
        return again  # taken back or finished by another gc, or somebody reads it
    if item.attempt:
        is_clean = delete_attempt(run, item.slot, item.attempt)
    else:
        commit = read_commit(run, item.slot)
        if commit is None:
            raise StorageError(f"{item}: its COMMIT is gone; nothing of it is deleted")
        is_clean = delete_bulk(run, item.slot, commit, archive=keeper.archive)
    logger.info("%s: deleted: %s", item, verdict.why)
    return Verdict(Act.DELETE, verdict.why, is_final=is_clean)


def _fold(keeper: Keeper, iteration: int, report: Report, *, dry_run: bool) -> bool:
    """Fold the records of an iteration; whether none are left."""
    run = keeper.run
    committed = _committed_files(run, iteration)
    records = find_records(run, iteration, committed=committed)
    if dry_run:
        report.num_folded += len(records)
        return not records
    report.num_folded += fold_records(run, iteration, committed=committed)
    return not find_records(run, iteration, committed=committed)


# -- reading --------------------------------------------------------------------------------------


def read_items(
    run: RunDir, control: Control, iteration: int, leases: list[Lease], *, now: float
) -> Iterator[Item]:
    """All that takes space in an iteration, on every timeline. Raises CorruptError."""
    for stage in _stage_slots(run, iteration):
        names = run.fs.list(run.slot_dir(stage))
        shards = [
            dataclasses.replace(stage, shard=int(match[1]))
            for name in names
            if (match := _SHARD.fullmatch(name))
        ]
        has_whole = "COMMIT" in names
        is_current = control.timeline_of(stage.stage) == stage.timeline
        for slot in [stage, *shards]:
            held_by = _find_holder(leases, slot, now)
            base = Item(slot, is_current=is_current, held_by=held_by)
            yield from _read_slot(run, base, is_part=slot.shard is not None and has_whole)


def _read_slot(run: RunDir, base: Item, *, is_part: bool) -> Iterator[Item]:
    """Items of one slot. `is_part`: its bulk belongs to the commit of the whole stage."""
    slot, folder = base.slot, run.slot_dir(base.slot)
    names = run.fs.list(folder)
    condemned = set(tombstones_in(names))
    commit = read_commit(run, slot) if "COMMIT" in names else None
    if commit is not None and not is_part:
        yield _read_bulk(run, base, commit)
    elif "" in condemned:
        yield dataclasses.replace(base, tombstone=read_tombstone(run, slot), is_committed=False)
    winner = None if commit is None else commit.provenance.get("attempt")
    attempts = {name for name in names if _ATTEMPT.fullmatch(name)} | (condemned - {""})
    for attempt in sorted(attempts - {winner}):
        num_files, size_bytes = measure_leftovers(folder / attempt)
        if num_files or attempt in condemned:
            yield dataclasses.replace(
                base,
                attempt=attempt,
                is_committed=commit is not None,
                tombstone=read_tombstone(run, slot, attempt),
                num_files=num_files,
                size_bytes=size_bytes,
            )


def _read_bulk(run: RunDir, base: Item, commit: Commit) -> Item:
    was_pruned = is_pruned(run, base.slot)
    left = 0
    if was_pruned:
        committed = committed_files(run, base.slot, commit)
        folders = attempt_dirs(run, base.slot, commit)
        left = sum(measure_leftovers(folder, committed)[0] for folder in folders)
    return dataclasses.replace(
        base,
        tombstone=read_tombstone(run, base.slot),
        is_pruned=was_pruned,
        is_done=was_pruned and not left,
        num_files=len(commit.files),
        size_bytes=sum(entry.size_bytes for entry in commit.files),
    )


def _stage_slots(run: RunDir, iteration: int) -> Iterator[Slot]:
    for name in run.fs.list(run.iteration_dir(iteration)):
        match = _STAGE.fullmatch(name)
        if match:
            yield Slot(iteration, match[1], int(match[2]))


def _committed_files(run: RunDir, iteration: int) -> list[Path]:
    """Files that any COMMIT of the iteration names, also on timelines that were set aside."""
    found: list[Path] = []
    for stage in _stage_slots(run, iteration):
        names = run.fs.list(run.slot_dir(stage))
        shards = [m for name in names if (m := _SHARD.fullmatch(name))]
        slots = [stage, *(dataclasses.replace(stage, shard=int(m[1])) for m in shards)]
        for slot in slots:
            commit = read_commit(run, slot)
            if commit is not None:
                found += committed_files(run, slot, commit)
    return found


def _find_holder(leases: list[Lease], slot: Slot, now: float) -> str:
    return next((x.holder for x in leases if x.is_live(now) and x.covers(slot)), "")


# -- where to begin -------------------------------------------------------------------------------


def _settled_key(keeper: Keeper, control: Control) -> str:
    """What was settled is so for these rules and timelines alone."""
    timelines = [start.number for start in control.timelines]
    return digest_value([keeper.rules.model_dump(mode="json"), timelines])


def _read_settled(keeper: Keeper, control: Control, head: int) -> int:
    try:
        raw = json.loads(keeper.run.fs.read(keeper.run.root / _HINT))
        if raw["key"] != _settled_key(keeper, control):
            return 0
        return min(max(0, int(raw["iteration"])), max(0, head - keep_last(keeper.rules)))
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # a hint: without it a pass looks at everything


def _write_settled(keeper: Keeper, control: Control, iteration: int) -> None:
    value = {"iteration": iteration, "key": _settled_key(keeper, control)}
    if _read_settled(keeper, control, keeper.graph.num_iterations * 2) == iteration:
        return
    with contextlib.suppress(OSError, StorageError):  # no room, or no right: the next looks again
        write_hint(keeper.run.root / _HINT, json.dumps(value).encode(), fs=keeper.run.fs)
