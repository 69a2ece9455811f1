"""Which commits are needed: by stages that are still to run, or to run again after a rewind.

Pure facts of the graph, and the looks at the disk that go with them. What is deleted is decided in
`storage/retention.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from slurm_rl.chain.evals import Evals
from slurm_rl.chain.graph import Graph
from slurm_rl.chain.observe import find_head
from slurm_rl.errors import PrunedError
from slurm_rl.storage.commits import has_commit
from slurm_rl.storage.control import Control
from slurm_rl.storage.rundir import RunDir
from slurm_rl.storage.tombstones import is_condemned
from slurm_rl.types import Slot, StageRef

#: Roles of which a stage reads the content of the COMMIT only, never a file.
CONTENT_ROLES = frozenset({"previous"})


def find_open(
    run: RunDir, graph: Graph, control: Control, *, first: int, head: int
) -> frozenset[StageRef]:
    """Stages without a commit, from `first` to as far ahead as any of them reaches back."""
    last = min(head + reach(graph) + 1, graph.num_iterations)
    refs = [
        StageRef(iteration, node.kind)
        for iteration in range(first, last)
        for node in graph.stages(iteration)
    ]
    slots = {ref: Slot(ref.iteration, ref.kind, control.timeline_of(ref)) for ref in refs}
    return frozenset(ref for ref in refs if not has_commit(run, slots[ref]))


def find_open_evals(evals: Evals) -> frozenset[StageRef]:
    """Evaluations that may still be done, of every version that there is: what they evaluate stays.

    The newest versions of all stay anyway.
    """
    return frozenset(evals.open_evals())


def find_needed(graph: Graph, open_refs: Iterable[StageRef]) -> frozenset[StageRef]:
    """Every stage that is an input of a stage without a commit. Pure."""
    return frozenset(parent for ref in open_refs for parent in graph.parents(ref).values())


def inputs_from(
    graph: Graph, control: Control, iteration: int, *, stage: str | None = None
) -> list[Slot]:
    """Commits before `stage` of `iteration` (its first one if None) whose files are read from
    there on. Pure."""
    found: dict[Slot, None] = {}
    again: set[StageRef] = set()
    for i in range(iteration, min(iteration + reach(graph) + 1, graph.num_iterations)):
        kinds = [node.kind for node in graph.stages(i)]
        if i == iteration and stage is not None:
            kinds = kinds[kinds.index(stage) :]
        for ref in (StageRef(i, kind) for kind in kinds):
            again.add(ref)
            for role, parent in graph.parents(ref).items():
                if role not in CONTENT_ROLES and parent not in again:
                    timeline = control.timeline_of(parent)
                    found[Slot(parent.iteration, parent.kind, timeline)] = None
    return list(found)


def find_pruned_from(
    run: RunDir, graph: Graph, control: Control, iteration: int, *, stage: str | None = None
) -> list[StageRef]:
    """Inputs that running again from `stage` of `iteration` needs, and that are gone or marked.

    Empty: it can be rewound to. Nothing goes between this look and the new timeline if that is
    made within `retention.gc_grace_s`, or under a lease on `inputs_from`.
    """
    slots = inputs_from(graph, control, iteration, stage=stage)
    return [slot.stage for slot in slots if is_condemned(run, slot)]


def find_rewindable(run: RunDir, graph: Graph, control: Control) -> list[int]:
    """Iterations up to the head that can be made again, in order. Looks at every one of them."""
    head = min(find_head(run, graph, control), graph.num_iterations - 1)
    return [i for i in range(head + 1) if not find_pruned_from(run, graph, control, i)]


def check_rewindable(
    run: RunDir, graph: Graph, control: Control, iteration: int, *, stage: str | None = None
) -> None:
    """Raises PrunedError, naming the iterations that can be, if this one cannot be made again."""
    gone = find_pruned_from(run, graph, control, iteration, stage=stage)
    if not gone:
        return
    left = format_ranges(find_rewindable(run, graph, control))
    raise PrunedError(
        f"{run.root}: iteration {iteration} cannot be made again: {', '.join(map(str, gone))}"
        " was pruned by retention, or is about to be",
        hint=f"these can: {left}; or copy it back from the archive and remove its PRUNED",
    )


def format_ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers, short.

    >>> format_ranges([0, 4, 5, 6, 9])
    '0, 4 to 6, 9'
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in spans)


def reach(graph: Graph) -> int:
    """How many iterations back the parents of a stage lie at most."""
    backs = [need.back for node in graph.stages(0) for need in node.needs]
    return max((back for back in backs if back <= graph.num_iterations), default=1)
