"""shell: the environment of a stage, to look around in; it cannot commit (`launch/shell.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from slurm_rl.chain.observe import find_head
from slurm_rl.cli.runs import check_iteration, find_run
from slurm_rl.cli.terminal import say
from slurm_rl.errors import NoRunError, StorageError
from slurm_rl.launch.build import OpenRun
from slurm_rl.launch.doctor_folder import SHELL, work_folder
from slurm_rl.launch.shell import Scratch, find_inputs, make_scratch, run_shell
from slurm_rl.storage.control import Control, read_control
from slurm_rl.storage.leases import check_lease, hold
from slurm_rl.types import Slot, StageRef


def open_shell(
    path: Path,
    *,
    iteration: int | None,
    stage: str,
    shard: int,
    command: str | None,
    time: str | None,
    scratch_dir: Path | None,
) -> None:
    """Open it, stay until it ends, and end as it did. Raises NothingDone if the stage's inputs
    are not committed, NoRunError for a stage that there is not."""
    opened = find_run(path)
    control = read_control(opened.run)
    ref = find_stage(opened, control, iteration, stage, shard)
    inputs = find_inputs(opened, control, ref)
    parent = scratch_dir or opened.run.control_dir
    try:
        with (
            hold_inputs(opened, list(inputs), ref) as beat,
            work_folder(parent.absolute(), prefix=SHELL) as folder,
        ):
            scratch = make_scratch(
                opened, control, ref, inputs=list(inputs.values()), folder=folder, shard=shard
            )
            if command is None:
                _say_where(scratch, ref)
            status = run_shell(scratch, command=command, time=time, beat=beat)
    except PermissionError as error:
        raise StorageError(
            f"{error.filename}: not yours to write in",
            hint="name a folder of yours on the shared file system with --scratch",
        ) from error
    raise typer.Exit(status if status >= 0 else 128 - status)


def find_stage(
    opened: OpenRun, control: Control, iteration: int | None, stage: str, shard: int
) -> StageRef:
    """The stage that is meant; of the first iteration that is not complete if none is named.

    An evaluation is named by the version of its weights.
    """
    graph = opened.chain.graph
    evals = [rule.kind for rule in graph.evals]
    if stage in evals:
        return _find_eval(opened, control, iteration, stage, shard)
    check_iteration(graph, iteration)
    if iteration is None:
        iteration = min(find_head(opened.run, graph, control), graph.num_iterations - 1)
    nodes = {node.kind: node for node in graph.stages(iteration)}
    if stage not in nodes:
        known = ", ".join([*nodes, *evals])
        raise NoRunError(f"iteration {iteration} has no stage {stage!r}; it has {known}")
    if not 0 <= shard < nodes[stage].num_shards:
        raise NoRunError(f"{stage} has {nodes[stage].num_shards} shard(s), and no {shard}")
    return StageRef(iteration, stage)


def _find_eval(
    opened: OpenRun, control: Control, version: int | None, stage: str, shard: int
) -> StageRef:
    graph = opened.chain.graph
    check_iteration(graph, version, of="version")
    if version is None:
        version = min(find_head(opened.run, graph, control), graph.num_iterations)
    if shard != 0:
        raise NoRunError(f"{stage} has 1 shard, and no {shard}")
    return StageRef(version, stage)


@contextlib.contextmanager
def hold_inputs(opened: OpenRun, slots: list[Slot], ref: StageRef) -> Iterator[Callable[[], None]]:
    """Keep retention away from the inputs; yields what renews that. In a run of somebody else's
    one may only look, and hope."""
    run, clock = opened.run, opened.chain.clock
    with contextlib.ExitStack() as stack:
        try:
            lease = stack.enter_context(hold(run, slots, holder=f"shell {ref}", clock=clock))
        except PermissionError:
            say("this run is not yours to write in: its retention may delete what you look at")
            yield lambda: None
            return
        held = [lease]

        def beat() -> None:
            held[0] = check_lease(run, held[0], slots, now=clock())

        yield beat


def _say_where(scratch: Scratch, ref: StageRef) -> None:
    say(f"{ref}: the stage's own environment, and nothing in it can commit")
    say("  $SLURM_RL_ORDER    what the stage is told; $SLURM_RL_INPUT_<ROLE> what it reads")
    say("  $SLURM_RL_PYTHON   its interpreter: $SLURM_RL_PYTHON -m slurm_rl.stages $SLURM_RL_ORDER")
    say(f"  {scratch.folder} is yours until you leave, and is then removed")
