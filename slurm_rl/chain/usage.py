"""GPU time that a run has used: every attempt counts, whatever came of it.

The commit of an iteration's last stage carries the sum up to it, so that reading does not grow with
the run. An attempt that was killed counts up to its last heartbeat. Evaluations come at any time:
they are summed up on their own (`chain/evals.py`).
"""

from __future__ import annotations

from slurm_rl.chain.evals import read_evals
from slurm_rl.chain.graph import Graph
from slurm_rl.chain.slots import slots_of
from slurm_rl.chain.view import Spec
from slurm_rl.storage.claims import read_claims, read_elapsed
from slurm_rl.storage.commits import read_commit
from slurm_rl.storage.control import Control
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Slot, StageRef


def read_usage(run: RunDir, graph: Graph, control: Control, spec: Spec, *, head: int) -> float:
    """GPU seconds of the whole run up to now; `head` is its first incomplete iteration.

    What timelines set aside is in the control directory.
    """
    if not any(gpus for _, gpus in spec.gpus):
        return 0.0
    set_aside = sum(start.gpu_s for start in control.timelines)
    last = min(head + 2, graph.num_iterations)
    now = sum(read_iteration(run, graph, control, spec, i) for i in range(head, last))
    evals_s = read_evals(run, graph, control, head=head).read_gpu_s(spec)
    return set_aside + read_total(run, graph, control, head - 1) + now + evals_s


def read_total(run: RunDir, graph: Graph, control: Control, iteration: int) -> float:
    """GPU seconds of all iterations up to a complete one, as its last commit says."""
    if iteration < 0:
        return 0.0
    ref = graph.last_stage(iteration)
    commit = read_commit(run, Slot(iteration, ref.kind, control.timeline_of(ref)))
    return 0.0 if commit is None else float(commit.provenance.get("gpu_s", 0.0))


def read_iteration(
    run: RunDir, graph: Graph, control: Control, spec: Spec, iteration: int
) -> float:
    """GPU seconds of the attempts of one iteration."""
    gpus = dict(spec.gpus)
    return sum(
        gpus.get(graph.job_kind(slot), 0) * read_elapsed(run, slot, claim)
        for node in graph.stages(iteration)
        for slot in slots_of(graph, control, StageRef(iteration, node.kind))
        for claim in read_claims(run, slot)
    )
