"""Reading the run directory and the queue into a `View`.

The order matters: control, intents, queue, commits, attempts. Commits are read after the queue, or
a stage that commits in between would be submitted again. The cost does not grow with the run: the
search for the first incomplete iteration starts at a hint and only walks forward.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rl.chain.evals import Evals, read_evals
from slurm_rl.chain.graph import Graph, Link
from slurm_rl.chain.scheduler import JobState, QueuedJob, Scheduler
from slurm_rl.chain.slots import link_slots_of, view_slot
from slurm_rl.chain.usage import read_usage
from slurm_rl.chain.view import MAX_EVALS, LinkView, SlotView, Spec, View
from slurm_rl.errors import SchedulerUnavailable, StorageError
from slurm_rl.storage.commits import has_commit, read_stage_commit
from slurm_rl.storage.control import Control, read_control
from slurm_rl.storage.durable import write_hint
from slurm_rl.storage.intents import POOL_FOLDER, Intent, read_intents, read_silent
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Commit, Slot, StageRef

_EVAL_JOB = re.compile(r".*\.i(\d+)\.(eval-[\w-]+)\.\w+")


@dataclass(frozen=True)
class CommitReader:
    """The commits of one look: each stage is read once, however many others come from it.

    What was not there stays so until the next look, which takes a new reader: a stage and what is
    made from it are seen at one time.
    """

    run: RunDir
    graph: Graph
    control: Control
    _found: dict[StageRef, Commit | None] = field(default_factory=dict)

    def read(self, ref: StageRef) -> Commit | None:
        """As `read_current`."""
        if ref not in self._found:
            self._found[ref] = read_current(self.run, self.graph, self.control, ref)
        return self._found[ref]


@dataclass(frozen=True)
class _Scene:
    """What every part of one reading shares."""

    run: RunDir
    graph: Graph
    spec: Spec
    control: Control
    queue: tuple[QueuedJob, ...] | None
    now: float
    commits: CommitReader

    def read(self, ref: StageRef) -> Commit | None:
        return self.commits.read(ref)


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
    for _ in range(num_looks):
        view = _look(run, graph, spec, scheduler, now, own)
        if view is not None:
            return view
    raise StorageError(f"{run.root}: listings and files disagree about what is committed")


def _look(
    run: RunDir,
    graph: Graph,
    spec: Spec,
    scheduler: Scheduler,
    now: float,
    own: tuple[str, int | None] | None,
) -> View | None:
    """One look; None if all of the window was committed since it was found: that is not the end."""
    control = read_control(run)
    head = find_head(run, graph, control)
    window = _read_window(run, graph, control, spec.window, head)
    evals = read_evals(run, graph, control, head=head)
    wanted, has_more = _read_open_evals(evals, spec, window)
    intents = {
        link: read_intents(run, link_folder(run, control, link)) for link in (*window, *wanted)
    }
    queue = read_queue(scheduler, spec.short_id)
    scene = _Scene(run, graph, spec, control, queue, now, CommitReader(run, graph, control))
    pairs = [_view_link(scene, link, intents[link]) for link in window]
    views = [seen for seen, _ in pairs]
    if window and all(seen.is_done for seen in views):
        return None
    has_budget = spec.gpu_hours is not None
    return View(
        control=control,
        links=tuple(itertools.dropwhile(lambda seen: seen.is_done, views)),
        queue=queue,
        own=own,
        conflict=next((text for _, text in pairs if text), ""),
        now=now,
        gpu_s=read_usage(run, graph, control, spec, head=head) if has_budget else 0.0,
        evals=tuple(_view_evals(scene, evals, wanted, intents, window)),
        has_more_evals=has_more,
    )


def _read_open_evals(evals: Evals, spec: Spec, window: list[Link]) -> tuple[list[Link], bool]:
    """The first evaluations that are to be done, and whether there are more.

    Of weights that are there; where they are submitted ahead, also of those that the window makes.
    """
    first_open: StageRef | None = None
    links: list[Link] = []
    num_seen = 0
    for ref in evals.open_evals():
        first_open = first_open or ref
        num_seen += 1
        if len(links) == MAX_EVALS:
            break
        if evals.can_begin(ref):
            links += evals.graph.links_of(ref)
    evals.write_hint(spec, first_open)
    has_more = num_seen > len(links)
    if spec.is_ahead and window:
        links += (
            link
            for ref in evals.wanted(evals.newest + 1, window[-1].iteration + 1)
            if _will_begin(evals, ref, window) and not evals.is_settled(ref)
            for link in evals.graph.links_of(ref)
        )
    return links, has_more


def _view_evals(
    scene: _Scene,
    evals: Evals,
    wanted: list[Link],
    intents: dict[Link, list[Intent]],
    window: list[Link],
) -> Iterator[LinkView]:
    """Those of `wanted`, and others that have jobs already; not what was committed meanwhile."""
    links = dict.fromkeys(wanted)
    for job in scene.queue or ():
        match = _EVAL_JOB.fullmatch(job.name)
        if match is None or job.state is JobState.ENDED:
            continue
        link = Link(int(match[1]), (match[2],))
        if link not in links and _is_open(evals, link.anchor, window):
            links[link] = None
    for link in links:
        known = intents.get(link)
        if known is None:
            known = read_intents(scene.run, link_folder(scene.run, scene.control, link))
        seen, _ = _view_link(scene, link, known)
        if not seen.is_done:
            yield seen


def _is_open(evals: Evals, ref: StageRef, window: list[Link]) -> bool:
    if not evals.is_wanted(ref) or evals.is_settled(ref):
        return False
    return _will_begin(evals, ref, window) and evals.can_begin(ref)


def _will_begin(evals: Evals, ref: StageRef, window: list[Link]) -> bool:
    """Whether its weights are there, or a link of the window makes them."""
    weights = evals.graph.weights(ref.iteration)
    return ref.iteration <= evals.newest or set(evals.graph.links_of(weights)) <= set(window)


def read_queue(scheduler: Scheduler, short_id: str) -> tuple[QueuedJob, ...] | None:
    """The run's jobs, or None where the scheduler does not answer.

    Another run of the same user may have the same name: tokens tell them apart.
    """
    try:
        return tuple(job for job in scheduler.query() if job.token.startswith(short_id))
    except SchedulerUnavailable:
        return None


def link_folder(run: RunDir, control: Control, link: Link) -> Path:
    """Where the intents of a link lie: with its last stage, those of a pool in a folder of it."""
    ref = link.anchor
    folder = run.stage_dir(ref.iteration, ref.kind, control.timeline_of(ref))
    return folder / f"{POOL_FOLDER}{link.pool}" if link.pool else folder


def read_current(run: RunDir, graph: Graph, control: Control, ref: StageRef) -> Commit | None:
    """The commit of a stage on its current timeline. Raises CorruptError."""
    num_shards = graph.node(ref.kind).num_shards
    timeline = control.timeline_of(ref)
    return read_stage_commit(run, ref, timeline=timeline, num_shards=num_shards)


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


def _read_window(run: RunDir, graph: Graph, control: Control, size: int, head: int) -> list[Link]:
    """Links from the first incomplete iteration on: those of it, and of `size` stages that are not
    done. (The pools of a stage count as one.)"""
    write_head(run, head)
    links: list[Link] = []
    num_open = 0
    for ref, of_stage in graph.stages_from(head):
        num_open += not has_commit(run, Slot(ref.iteration, ref.kind, control.timeline_of(ref)))
        links += of_stage
        if num_open >= size:
            break
    return links


def _view_link(scene: _Scene, link: Link, intents: list[Intent]) -> tuple[LinkView, str]:
    """One link, and in words what is wrong with its commits."""
    slots: list[SlotView] = []
    conflict = ""
    for ref in link.stages:
        commit = scene.read(ref)
        conflict = conflict or _find_conflict(scene, ref, commit)
        slots += _view_stage(scene, link, ref, commit)
    missing = tuple(s.shard for s in slots if s.shard is not None and not s.committed)
    view = LinkView(
        link,
        intents=tuple((intent, scene.now - intent.created) for intent in intents),
        slots=tuple(slots),
        num_lost=_count_lost(scene, link, intents, missing),
        waits_for=scene.graph.link_parents(link),
        ready_s=_read_ready(scene, link) if scene.spec.fallbacks else None,
    )
    return view, conflict


def _find_conflict(scene: _Scene, ref: StageRef, commit: Commit | None) -> str:
    """In words, if a commit was not made from the commits that are current now.

    A parent that is not there is none: this node may see it late. If it is gone, the next job that
    needs it finds that out (`chain/late.py`).
    """
    if commit is None:
        return ""
    for role, parent in scene.graph.parents(ref).items():
        current, used = scene.read(parent), commit.parents.get(role)
        if current is not None and used != current.digest and not was_unasked(commit, role, parent):
            return f"{ref} was made from {role} {used}, but {parent} is {current.digest}"
    return ""


def was_unasked(commit: Commit, role: str, parent: StageRef) -> bool:
    """Whether a commit was made without an input that later settings ask for (`train.use_kl_loss`
    was set on the way): of the initial models alone, since which stages there are is fixed."""
    return parent.kind == "init" and role not in commit.parents


def _view_stage(scene: _Scene, link: Link, ref: StageRef, commit: Commit | None) -> list[SlotView]:
    run, control = scene.run, scene.control
    slots = link_slots_of(scene.graph, control, link, ref)
    if commit is not None:
        return [SlotView(str(slot), slot.shard, True) for slot in slots]
    return [view_slot(run, control, slot, scene.queue, scene.now, scene.spec) for slot in slots]


def _count_lost(scene: _Scene, link: Link, intents: list[Intent], missing: tuple[int, ...]) -> int:
    """Jobs of a link that never got as far as looking for work, and are not in the queue; of an
    array, for the shard that has most of them.

    0 while the scheduler does not answer: absence says nothing then. One whose place a job of the
    fallback took was cancelled by us.
    """
    if scene.queue is None or len(intents) < 2:
        return 0
    forgiven = dict(scene.control.forgiven).get(str(link), 0)
    silent = read_silent(scene.run, link_folder(scene.run, scene.control, link))
    live = {job.token for job in scene.queue if job.state is not JobState.ENDED}
    lost = [0]
    for shard in missing or (None,):
        ours = [i for i in intents if shard is None or not i.shards or shard in i.shards]
        gone = max((i.number for i in ours if i.fallback), default=0)
        counted = (i for i in ours if i.number > forgiven and (i.fallback or i.number > gone))
        lost.append(sum(i.number in silent and i.token not in live for i in counted))
    return max(lost)


def _read_ready(scene: _Scene, link: Link) -> float | None:
    """Seconds since the last of a link's parents committed; None while one has not."""
    parents = {ref for stage in link.stages for ref in scene.graph.parents(stage).values()}
    since = []
    for ref in parents - set(link.stages):
        commit = scene.read(ref)
        if commit is None:
            return None
        since.append(scene.now - float(commit.provenance.get("committed", 0.0)))
    return min(since, default=None)
