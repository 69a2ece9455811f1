"""The slots of a stage, and how its attempts fared: read for planning and for claiming."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_rl.chain.graph import Graph, Link
from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.chain.view import SlotView, Spec
from slurm_rl.storage.claims import (
    AttemptEnd,
    attempt_dir,
    read_claims,
    read_elapsed,
    read_end,
    read_latest_claim,
)
from slurm_rl.storage.commits import read_commit
from slurm_rl.storage.control import Control
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Claim, Slot, StageRef

_NO_FAILURES = ("stopped", "superseded", "committed", "deferred")
_WAITS = (JobState.PENDING, JobState.HELD)


def slots_of(graph: Graph, control: Control, ref: StageRef) -> list[Slot]:
    """The slots in which the stage is worked on."""
    timeline, shards = control.timeline_of(ref), graph.node(ref.kind).shards
    return [Slot(ref.iteration, ref.kind, timeline, shard) for shard in shards]


def link_slots(graph: Graph, control: Control, link: Link) -> list[Slot]:
    """The slots that a link's job is for: of a pool, its shards alone."""
    return [slot for ref in link.stages for slot in link_slots_of(graph, control, link, ref)]


def link_slots_of(graph: Graph, control: Control, link: Link, ref: StageRef) -> list[Slot]:
    """Those of one of its stages."""
    found = slots_of(graph, control, ref)
    return [slot for slot in found if not link.pool or graph.pool_of(slot) == link.pool]


@dataclass(frozen=True, slots=True)
class Tried:
    """One attempt that is over. `died` is when, by the clock of the run's file system.

    was_requeued: it was killed without a word, and its very job is back: the scheduler did it.
    """

    claim: Claim
    end: AttemptEnd | None
    died: float
    was_requeued: bool

    @property
    def has_failed(self) -> bool:
        if self.end is None:
            return not self.was_requeued
        return self.end.outcome not in _NO_FAILURES

    @property
    def was_stopped(self) -> bool:
        return self.was_requeued if self.end is None else self.end.outcome == "stopped"

    @property
    def was_deferred(self) -> bool:
        return self.end is not None and self.end.outcome == "deferred"

    @property
    def node(self) -> str:
        return (self.end.node if self.end is not None else "") or self.claim.host


def view_slot(
    run: RunDir,
    control: Control,
    slot: Slot,
    queue: tuple[QueuedJob, ...] | None,
    now: float,
    spec: Spec,
) -> SlotView:
    """A slot of a stage that is not committed as a whole.

    An attempt counts as failed if it ended without a commit, unless it was told to stop, was
    superseded, or found a service down; one that says it committed is believed (its COMMIT may show
    late). The last one does not count while its job may be at work.
    """
    name = str(slot)
    if slot.shard is not None and read_commit(run, slot) is not None:
        return SlotView(name, slot.shard, True)
    base = dict(control.forgiven).get(name, 0)
    all_tried = read_tried(run, slot, queue, alive_since=now - spec.lease_s)
    tried = [t for t in all_tried if t.claim.epoch > base]
    failed = [t for t in tried if t.has_failed]
    num_stops = sum(t.was_stopped for t in tried)
    epoch = all_tried[-1].claim.epoch if all_tried else 0
    view = SlotView(name, slot.shard, num_stops=num_stops, epoch=epoch)
    view = _add_outage(view, all_tried, now)
    return _add_failures(view, failed, run, slot, now, spec) if failed else view


def _add_failures(
    view: SlotView, failed: Sequence[Tried], run: RunDir, slot: Slot, now: float, spec: Spec
) -> SlotView:
    last = failed[-1]
    return dataclasses.replace(
        view,
        failures=len(failed),
        # Whoever left word of it may have read another clock: never wait longer for that.
        since_failure_s=max(0.0, now - last.died),
        last_error=last.end.message if last.end is not None else "killed without a word",
        log=str(attempt_dir(run, slot, last.claim)),
        is_repeating=_is_repeating(failed),
        bad_nodes=_find_bad_nodes(failed, now - spec.exclude_s),
        is_users=last.end is not None and last.end.blame == "user",
    )


def _add_outage(view: SlotView, tried: Sequence[Tried], now: float) -> SlotView:
    """What the attempts say of a service that is down: those in a row up to the last.

    One that was told to stop, or was taken over, says nothing about it.
    """
    telling = [t for t in tried if t.was_deferred or t.has_failed]
    row = list(itertools.takewhile(lambda t: t.was_deferred, reversed(telling)))
    if not row or row[0].end is None:
        return view
    return dataclasses.replace(
        view,
        num_deferrals=len(row),
        # By whatever clock the words were dated: never wait longer for that.
        since_deferral_s=max(0.0, now - row[0].died),
        outage_s=max(0.0, now - row[-1].died),
        service=row[0].end.service,
        last_outage=row[0].end.message,
    )


def read_tried(
    run: RunDir,
    slot: Slot,
    queue: tuple[QueuedJob, ...] | None,
    *,
    alive_since: float = math.inf,
) -> list[Tried]:
    """The attempts at a slot that are over, as far as anyone can tell, by epoch.

    The last one may be at work though the queue does not know its job: that may be younger than
    the reading, or another person's. Then a sign of life after `alive_since` is believed.
    """
    jobs = queue or ()
    known = {job.claim_token for job in jobs}
    at_work = {job.claim_token for job in jobs if job.state.may_be_at_work}
    waiting = {job.claim_token for job in jobs if job.state in _WAITS}
    claims = read_claims(run, slot)
    found = []
    for number, claim in enumerate(claims):
        end = read_end(run, slot, claim)
        is_last = number == len(claims) - 1
        if end is None and is_last and (queue is None or claim.job_token in at_work):
            continue
        died = end.ended if end is not None else claim.claimed + read_elapsed(run, slot, claim)
        is_unknown = end is None and is_last and claim.job_token not in known
        if is_unknown and died > alive_since:
            continue
        later = {other.job_token for other in claims[number + 1 :]} | waiting
        found.append(Tried(claim, end, died, end is None and claim.job_token in later))
    return found


def is_at_work(run: RunDir, slot: Slot, queue: tuple[QueuedJob, ...] | None) -> bool:
    """Whether the last attempt at a slot may be at work, as far as anyone can tell."""
    last = read_latest_claim(run, slot)
    over = {tried.claim.epoch for tried in read_tried(run, slot, queue)}
    return last is not None and last.epoch not in over


def _is_repeating(failed: Sequence[Tried]) -> bool:
    """Whether the last two failed in the same way, in a way that a retry does not mend."""
    ends = [tried.end for tried in failed[-2:]]
    if len(ends) < 2 or ends[0] is None or ends[1] is None:
        return False
    first, second = ends[0], ends[1]
    same = (first.error, first.place) == (second.error, second.place)
    return same and bool(second.place) and second.blame == "repeat"


def _find_bad_nodes(failed: Sequence[Tried], since: float) -> tuple[str, ...]:
    """Where attempts failed after `since`, if it may have been the node's fault."""
    nodes = {
        tried.node for tried in failed if tried.died > since and not _is_no_nodes_fault(tried.end)
    }
    return tuple(sorted(nodes - {""}))


def _is_no_nodes_fault(end: AttemptEnd | None) -> bool:
    """The user's, or the shared file system's."""
    return end is not None and (end.blame == "user" or end.error == "SpaceError")
