"""What this node may not see yet: commits of other nodes that show late.

A job is woken when its parent's job has ended; on NFS its node may go on for a while believing that
the parent's COMMIT is absent, since it looked there before. These questions tell that case from a
parent that failed, by what else the disk says. They decide who waits, never what is committed.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_rl.chain.graph import Graph
from slurm_rl.chain.observe import find_head, read_current
from slurm_rl.chain.slots import slots_of
from slurm_rl.errors import CorruptError
from slurm_rl.storage.claims import read_claims, read_end
from slurm_rl.storage.commits import commit_path, read_commit
from slurm_rl.storage.control import Control
from slurm_rl.storage.durable import refresh
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Slot, StageRef

#: Last words after which a slot has no commit of that attempt. One that was superseded says nothing
#: about the attempt that came after it.
_NO_COMMIT = ("failed", "stopped", "timed_out", "deferred")


def may_show_late(run: RunDir, graph: Graph, control: Control, refs: Sequence[StageRef]) -> bool:
    """Whether every parent that stages `refs` still miss may be committed, out of our sight.

    False if none is missing: then nothing is waited for. Their directories are refreshed.
    """
    missing = _missing_parents(run, graph, control, refs)
    for ref in missing:
        for slot in slots_of(graph, control, ref):
            refresh(commit_path(run, slot), fs=run.fs)
    known: dict[StageRef, bool] = {}
    return bool(missing) and all(_may_be_there(run, graph, control, r, known) for r in missing)


def _missing_parents(
    run: RunDir, graph: Graph, control: Control, refs: Sequence[StageRef]
) -> list[StageRef]:
    """Parents without a commit, of stages without one; but for those that are of `refs`."""
    open_refs = [ref for ref in refs if read_current(run, graph, control, ref) is None]
    parents = {parent for ref in open_refs for parent in graph.parents(ref).values()}
    return [
        parent
        for parent in sorted(parents - set(refs))
        if read_current(run, graph, control, parent) is None
    ]


def _may_be_there(
    run: RunDir, graph: Graph, control: Control, ref: StageRef, known: dict[StageRef, bool]
) -> bool:
    """Not if a last word denies it; nor, where nobody claimed, if its own parents deny it.

    known: what was found out already; stages share their ancestors.
    """
    if ref not in known:
        known[ref] = _look_for(run, graph, control, ref, known)
    return known[ref]


def _look_for(
    run: RunDir, graph: Graph, control: Control, ref: StageRef, known: dict[StageRef, bool]
) -> bool:
    for slot in slots_of(graph, control, ref):
        if read_commit(run, slot) is not None:
            continue
        claims = read_claims(run, slot)
        if claims:
            end = read_end(run, slot, claims[-1])
            if end is not None and end.outcome in _NO_COMMIT:
                return False
        else:
            parents = graph.parents(ref).values()
            missing = [p for p in parents if read_current(run, graph, control, p) is None]
            if not all(_may_be_there(run, graph, control, parent, known) for parent in missing):
                return False
    return True


def says_committed(run: RunDir, slot: Slot) -> bool:
    """Whether the last attempt at a slot left word that it committed."""
    claims = read_claims(run, slot)
    end = read_end(run, slot, claims[-1]) if claims else None
    return end is not None and end.outcome == "committed"


def check_not_gone(
    run: RunDir, graph: Graph, control: Control, slots: Sequence[Slot], refs: Sequence[StageRef]
) -> None:
    """Raises CorruptError for a commit of `slots`, or of a parent of `refs`, that was published and
    is not there any more.

    To be asked when what shows late has been waited for. An attempt says that it committed only
    after it had read its own COMMIT again; and a complete iteration was committed as a whole.
    """
    head = find_head(run, graph, control)
    for parent in _missing_parents(run, graph, control, refs):
        slots = [*slots, *slots_of(graph, control, parent)]
        if parent.iteration < head:
            raise _gone(run, Slot(parent.iteration, parent.kind, control.timeline_of(parent)))
    for slot in slots:
        if says_committed(run, slot) and read_commit(run, slot) is None:
            raise _gone(run, slot)


def _gone(run: RunDir, slot: Slot) -> CorruptError:
    return CorruptError(
        f"{commit_path(run, slot)}: it was published, and is gone",
        hint="put it back from a copy, or `slurm-rl rewind` to before it",
    )
