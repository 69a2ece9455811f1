"""`slurm-rl shell`: a stage's own environment, for a person to look around in.

The same options, setup lines, container, interpreter and environment as the stage's, by the same
code; under Slurm an allocation of its own (`salloc`, and `srun --pty` in it), locally a child
process. Inputs are the stage's, committed, in an `order.json` like its own.

It cannot commit, whatever is typed in it. A COMMIT is published by a supervisor, and none runs
here; it is read only in a slot, and names an attempt directory in that slot which a claim has
made; no claim is made here, and the scratch directory lies in `control/.shell-<token>/`, outside of
every slot. A stage program started by hand leaves its result in the scratch directory, which goes
when the shell ends. On top of that the run is mounted read-only for the shell, where the machine
allows that (`readonly.py`), or bound read-only into the container.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rl.chain.observe import read_current
from slurm_rl.chain.scheduler import LinkRequest
from slurm_rl.config.derive import model_folders, stage_container, stage_slurm
from slurm_rl.config.pools import settings_of_shard
from slurm_rl.config.schema import Settings
from slurm_rl.errors import NothingDone, SchedulerUnavailable
from slurm_rl.launch.build import OpenRun
from slurm_rl.launch.environment import scrub_environment
from slurm_rl.launch.payload import (
    enter_stage,
    stage_binds,
    stage_environment,
    stage_interpreter,
)
from slurm_rl.launch.sbatch import plan_options
from slurm_rl.launch.stage_settings import find_stage_settings, parse_settings
from slurm_rl.storage.commits import resolve_input
from slurm_rl.storage.control import Control
from slurm_rl.storage.durable import write_file
from slurm_rl.types import Input, Order, Slot, StageRef, dump_record

#: sbatch's options that salloc does not have, and those that make no sense without a chain.
_NOT_SALLOC = frozenset(
    "output error input open_mode requeue no_requeue signal array dependency begin batch export"
    " export_file propagate parsable test_only wrap wait ignore_pbs chdir".split()
)
_BEAT_S = 600.0
_BOTH = "command -v bash >/dev/null && exec bash; exec sh"


@dataclass(frozen=True)
class Scratch:
    """Where a shell works, and what it has: `order_path` lies in `folder`."""

    settings: Settings
    order: Order
    folder: Path

    @property
    def order_path(self) -> Path:
        return self.folder / "order.json"

    @property
    def kind(self) -> str:
        return self.order.kind


def find_inputs(opened: OpenRun, control: Control, ref: StageRef) -> dict[Slot, Input]:
    """What the stage reads, by the slot that holds it. Raises NothingDone if it is not all
    committed."""
    found = {}
    graph = opened.chain.graph
    for role, parent in graph.parents(ref).items():
        commit = read_current(opened.run, graph, control, parent)
        if commit is None:
            raise NothingDone(
                f"{ref}: its {role}, {parent}, is not committed",
                hint="choose an earlier iteration (-i)",
            )
        slot = Slot(parent.iteration, parent.kind, control.timeline_of(parent))
        found[slot] = resolve_input(opened.run, role, parent, slot, commit)
    return found


def make_order(
    opened: OpenRun,
    control: Control,
    ref: StageRef,
    *,
    inputs: Sequence[Input],
    attempt: Path,
    shard: int = 0,
) -> Order:
    """An order like the stage's own, for an attempt that no claim has made."""
    own = find_stage_settings(opened.run, opened.identity, control, ref)
    return Order(
        run_dir=str(opened.run.root),
        run_id=opened.identity.run_id,
        kind=ref.kind,
        iteration=ref.iteration,
        timeline=control.timeline_of(ref),
        attempt_dir=str(attempt),
        settings_path=own.path,
        code_dir=own.code_dir,
        inputs={entry.role: entry for entry in inputs},
        shard=shard,
        num_shards=opened.chain.graph.node(ref.kind).num_shards,
    )


def make_scratch(
    opened: OpenRun,
    control: Control,
    ref: StageRef,
    *,
    inputs: Sequence[Input],
    folder: Path,
    shard: int = 0,
) -> Scratch:
    """The scratch attempt in `folder`, which exists."""
    attempt = folder / f"scratch-{folder.name.rpartition('-')[2]}"
    attempt.mkdir()
    settings = parse_settings(opened.identity, control, at=ref)
    order = make_order(opened, control, ref, inputs=inputs, attempt=attempt, shard=shard)
    write_file(attempt / "order.json", dump_record(order))
    return Scratch(settings, order, attempt)


def run_shell(
    scratch: Scratch, *, command: str | None, time: str | None, beat: Callable[[], None]
) -> int:
    """Open the shell, or run `command` in its place; its exit status.

    time: of the allocation, if not the stage's. beat: called now and then while it is open.
    Raises SchedulerUnavailable where Slurm's commands are missing.
    """
    is_terminal = command is None and sys.stdin.isatty()
    inner = ["sh", "-c", command if command is not None else _BOTH]
    if scratch.settings.launcher == "local":
        argv = render_local(scratch, inner)
    else:
        argv = render_salloc(scratch, inner, time=time, is_terminal=is_terminal)
    env = shell_environment(scratch, os.environ)
    try:
        child = subprocess.Popen(argv, env=env, cwd=scratch.folder)
    except FileNotFoundError as error:
        hint = "Slurm's commands are not on PATH here"
        raise SchedulerUnavailable(f"{argv[0]} is not there", hint=hint) from error
    while True:
        try:
            return child.wait(_BEAT_S)
        except KeyboardInterrupt:
            continue  # it is the shell's, which has heard it too
        except subprocess.TimeoutExpired:
            beat()


def shell_variables(scratch: Scratch) -> dict[str, str]:
    """What names order, inputs and interpreter: `SLURM_RL_INPUT_WEIGHTS`, …"""
    named = {
        f"SLURM_RL_INPUT_{role.upper()}": entry.path for role, entry in scratch.order.inputs.items()
    }
    return {
        "SLURM_RL_ORDER": str(scratch.order_path),
        "SLURM_RL_SCRATCH": str(scratch.folder),
        "SLURM_RL_PYTHON": stage_interpreter(scratch.settings, scratch.kind),
        "SLURM_RL_STAGE": scratch.kind,
        **named,
    }


def shell_environment(scratch: Scratch, base: Mapping[str, str]) -> dict[str, str]:
    """The stage's environment and `shell_variables`, without what a surrounding job left."""
    more = shell_variables(scratch)
    return stage_environment(scratch.settings, scratch.kind, scrub_environment(base), more=more)


def render_local(scratch: Scratch, inner: Sequence[str]) -> list[str]:
    """The command that runs `inner` here."""
    return [*_setup_words(scratch.settings, ()), *_render_inside(scratch, inner)]


def render_salloc(
    scratch: Scratch, inner: Sequence[str], *, time: str | None, is_terminal: bool
) -> list[str]:
    """The command that runs `inner` on the first node of an allocation like the stage's.

    Setup lines run on the node, before the container; with pyxis, whose container begins with
    the step itself, on this machine, and the step takes their environment over.
    """
    settings, kind = scratch.settings, scratch.kind
    shaped = settings_of_shard(settings, kind, scratch.order.shard)
    options = plan_shell_options(shaped, kind, token=scratch.folder.name.rpartition("-")[2])
    if time is not None:
        options["time"] = time
    flags = [render_flag(name, value) for name, value in options.items() if value is not False]
    step = ["srun", "--nodes=1", "--ntasks=1", "--overlap", f"--chdir={scratch.folder}"]
    cpus = stage_slurm(shaped, kind).get("cpus_per_task")
    step += [f"--cpus-per-task={cpus}"] if cpus is not None else []
    step += ["--pty"] if is_terminal else []
    setup = _setup_words(settings, settings.setup)
    inside = _render_inside(scratch, inner)
    if stage_container(settings, kind).runtime == "pyxis":
        return ["salloc", "--quiet", *flags, *setup, *step, *inside]
    return ["salloc", "--quiet", *flags, *step, *setup, *inside]


def plan_shell_options(settings: Settings, kind: str, *, token: str) -> dict[str, Any]:
    """The stage's options as salloc takes them."""
    name = f"{settings.run.name}.shell-{kind}.shell{token}"
    planned = plan_options(settings, LinkRequest(name, (), (StageRef(0, kind),)))
    return {key: value for key, value in planned.items() if key not in _NOT_SALLOC}


def render_flag(name: str, value: Any) -> str:
    """An option on a command line; true is a bare flag."""
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag}={value}"


def _setup_words(settings: Settings, lines: Sequence[str]) -> list[str]:
    """What to put before a command so that the setup lines run first."""
    return ["bash", "-c", "\n".join([*lines, 'exec "$@"']), "slurm-rl"] if lines else []


def _render_inside(scratch: Scratch, inner: Sequence[str]) -> list[str]:
    """`inner` where the stage's program would run, the run's files protected."""
    settings, kind = scratch.settings, scratch.kind
    protected = [path for path in _protected(settings) if Path(path).exists()]
    if stage_container(settings, kind).runtime == "none":
        host = settings.host_python or sys.executable
        readonly = [host, "-m", "slurm_rl.launch.readonly", str(scratch.folder), *protected, "--"]
        return [*readonly, *inner]
    # What lies deeper comes later, else the run's own mount would hide it.
    binds = [f"{path}:{path}:ro" for path in dict.fromkeys(stage_binds(settings))]
    return enter_stage(
        settings,
        inner,
        kind=kind,
        attempt_name=scratch.folder.name,
        env=shell_variables(scratch),
        binds=[*binds, f"{scratch.folder}:{scratch.folder}"],
    )


def _protected(settings: Settings) -> list[str]:
    return [str(settings.run_dir.absolute()), *model_folders(settings).values()]
