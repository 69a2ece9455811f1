"""Reading the run directory and the queue into a `View`.

The order matters: control, intents, queue, commits, attempts. Commits are read after the queue, or
a stage that commits in between would be submitted again. The cost does not grow with the run: the
search for the first incomplete iteration starts at a hint and only walks forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

from slurm_rl.chain.graph import Graph, Link
from slurm_rl.chain.plan import LinkView, SlotView, Spec, View
from slurm_rl.chain.scheduler import JobState, QueuedJob, Scheduler
from slurm_rl.errors import SchedulerUnavailable, StorageError
from slurm_rl.storage.claims import attempt_dir, read_claims, read_end
from slurm_rl.storage.commits import has_commit, read_commit, read_stage_commit
from slurm_rl.storage.control import Control, read_control
from slurm_rl.storage.durable import write_hint
from slurm_rl.storage.intents import Intent, read_intents, read_silent
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Commit, Slot, StageRef

_NO_FAILURES = ("stopped", "superseded", "committed")


def observe(
    run: RunDir,
    graph: Graph,
    spec: Spec,
    scheduler: Scheduler,
    *,
    now: float,
    own: tuple[str, int | None] | None = None,
    num_looks: int = 3,
) -> View:
    """Everything that `plan` needs. Assembles stages whose shards are all there, on the way.

    num_looks: how often to look again when the whole window was committed meanwhile.
    """
    control = read_control(run)
    window = _read_window(run, graph, control, spec.window)
    intents = {link: read_intents(run, link_folder(run, control, link)) for link in window}
    queue = read_queue(scheduler, spec.short_id)
    conflict = ""
    views = []
    for link in window:
        slots: list[SlotView] = []
        for ref in link.stages:
            commit = read_current(run, graph, control, ref)
            conflict = conflict or _find_conflict(run, graph, control, ref, commit)
            slots += _view_stage(run, graph, control, ref, commit, queue, now)
        aged = tuple((intent, now - intent.created) for intent in intents[link])
        num_lost = _count_lost(run, control, link, intents[link], queue)
        views.append(LinkView(link, aged, tuple(slots), num_lost))
    if window and all(seen.is_done for seen in views):
        # All of it was committed since the window was found: that is not the end of the run.
        if num_looks > 1:
            looks = num_looks - 1
            return observe(run, graph, spec, scheduler, now=now, own=own, num_looks=looks)
        raise StorageError(f"{run.root}: listings and files disagree about what is committed")
    while views and views[0].is_done:
        views.pop(0)
    return View(control, tuple(views), queue, own, conflict)


def read_queue(scheduler: Scheduler, short_id: str) -> tuple[QueuedJob, ...] | None:
    """The run's jobs, or None where the scheduler does not answer.

    Another run of the same user may have the same name: tokens tell them apart.
    """
    try:
        return tuple(job for job in scheduler.query() if job.token.startswith(short_id))
    except SchedulerUnavailable:
        return None


def link_folder(run: RunDir, control: Control, link: Link) -> Path:
    """Where the intents of a link lie: with its last stage."""
    ref = link.anchor
    return run.stage_dir(ref.iteration, ref.kind, control.timeline_of(ref))


def read_current(run: RunDir, graph: Graph, control: Control, ref: StageRef) -> Commit | None:
    """The commit of a stage on its current timeline. Raises CorruptError."""
    num_shards = graph.node(ref.kind).num_shards
    timeline = control.timeline_of(ref)
    return read_stage_commit(run, ref, timeline=timeline, num_shards=num_shards)


def slots_of(graph: Graph, control: Control, ref: StageRef) -> list[Slot]:
    """The slots in which the stage is worked on."""
    num_shards = graph.node(ref.kind).num_shards
    timeline = control.timeline_of(ref)
    if num_shards == 1:
        return [Slot(ref.iteration, ref.kind, timeline)]
    return [Slot(ref.iteration, ref.kind, timeline, shard) for shard in range(num_shards)]


def find_head(run: RunDir, graph: Graph, control: Control) -> int:
    """The first iteration that is not complete; `graph.num_iterations` if all are.

    Starts at the hint; where that is missing or too far ahead (a rewind), it bisects on the
    existence of COMMITs.
    """

    def complete(iteration: int) -> bool:
        ref = graph.last_stage(iteration)
        return has_commit(run, Slot(iteration, ref.kind, control.timeline_of(ref)))

    head = _read_hint(run)
    if head is None or head > graph.num_iterations or (head > 0 and not complete(head - 1)):
        low, high = 0, graph.num_iterations
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if complete(middle) else (low, middle)
        head = low
    while head < graph.num_iterations and complete(head):
        head += 1
    return head


def write_head(run: RunDir, head: int) -> None:
    """Leave a hint where to start looking. It may be stale or lost."""
    if _read_hint(run) != head:
        with contextlib.suppress(OSError, StorageError):  # a reader may lack the right, or room
            write_hint(run.root / "head", json.dumps({"iteration": head}).encode(), fs=run.fs)


def _read_hint(run: RunDir) -> int | None:
    try:
        return max(0, int(json.loads(run.fs.read(run.root / "head"))["iteration"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None  # a hint: any damage to it costs a bisection


def _read_window(run: RunDir, graph: Graph, control: Control, size: int) -> list[Link]:
    """Links from the first incomplete iteration on: those of it, and `size` that are not done."""
    head = find_head(run, graph, control)
    write_head(run, head)
    links: list[Link] = []
    open_links = 0
    for link in graph.links_from(head):
        ref = link.anchor
        done = has_commit(run, Slot(ref.iteration, ref.kind, control.timeline_of(ref)))
        open_links += not done
        links.append(link)
        if open_links >= size:
            break
    return links


def _find_conflict(
    run: RunDir, graph: Graph, control: Control, ref: StageRef, commit: Commit | None
) -> str:
    """In words, if a commit was not made from the commits that are current now."""
    if commit is None:
        return ""
    for role, parent in graph.parents(ref).items():
        current = read_current(run, graph, control, parent)
        found = None if current is None else current.digest
        if commit.parents.get(role) != found:
            return f"{ref} was made from {role} {commit.parents.get(role)}, but {parent} is {found}"
    return ""


def _count_lost(
    run: RunDir,
    control: Control,
    link: Link,
    intents: list[Intent],
    queue: tuple[QueuedJob, ...] | None,
) -> int:
    """Jobs of a link that never got as far as looking for work, and are not in the queue.

    0 while the scheduler does not answer: absence says nothing then.
    """
    if queue is None or len(intents) < 2:
        return 0
    forgiven = dict(control.forgiven).get(str(link.anchor), 0)
    silent = read_silent(run, link_folder(run, control, link))
    live = {job.token for job in queue if job.state is not JobState.ENDED}
    return sum(i.number > forgiven and i.number in silent and i.token not in live for i in intents)


def _view_stage(
    run: RunDir,
    graph: Graph,
    control: Control,
    ref: StageRef,
    commit: Commit | None,
    queue: tuple[QueuedJob, ...] | None,
    now: float,
) -> list[SlotView]:
    slots = slots_of(graph, control, ref)
    if commit is not None:
        return [SlotView(str(slot), slot.shard, True) for slot in slots]
    return [view_slot(run, control, slot, queue, now) for slot in slots]


def view_slot(
    run: RunDir, control: Control, slot: Slot, queue: tuple[QueuedJob, ...] | None, now: float
) -> SlotView:
    """A slot of a stage that is not committed as a whole.

    An attempt counts as failed if it ended without a commit, unless it was told to stop or was
    superseded; one that says it committed is believed (its COMMIT may show late). The last one
    does not count while its job may be at work.
    """
    name = str(slot)
    if slot.shard is not None and read_commit(run, slot) is not None:
        return SlotView(name, slot.shard, True)
    claims = read_claims(run, slot)
    base = dict(control.forgiven).get(name, 0)
    running = {
        j.claim_token for j in queue or () if j.state in (JobState.RUNNING, JobState.UNKNOWN)
    }
    failures, view = 0, SlotView(name, slot.shard)
    for claim in claims:
        end = read_end(run, slot, claim)
        is_last = claim is claims[-1]
        if claim.epoch <= base or (end is not None and end.outcome in _NO_FAILURES):
            continue
        if end is None and is_last and (queue is None or claim.job_token in running):
            continue  # at work, as far as anyone can tell
        failures += 1
        view = dataclasses.replace(
            view,
            failures=failures,
            since_failure_s=now - end.ended if end is not None else 1e9,
            last_error=end.message if end is not None else "killed without a word",
            log=str(attempt_dir(run, slot, claim)),
        )
    return view
