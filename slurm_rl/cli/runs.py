"""Finding the run that a person means, and checking the iteration of it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from slurm_rl.chain.graph import Graph
from slurm_rl.errors import NoRunError
from slurm_rl.launch.build import OpenRun, open_run
from slurm_rl.storage.control import read_control
from slurm_rl.storage.owner import check_owner, share_with_group


def find_own_run(path: Path) -> OpenRun:
    """The run at `path`, to be changed or moved on. Raises OwnerError if it is not ours."""
    opened = find_run(path)
    check_owner(opened.run, opened.identity, read_control(opened.run))
    return opened


def find_run(path: Path) -> OpenRun:
    """The run at `path`, or the one that the configuration at `path` makes.

    What this process makes in it belongs to the run's group. Raises NoRunError, with what to type.
    """
    opened = _find_run(path)
    share_with_group(opened.settings.run.group)
    return opened


def _find_run(path: Path) -> OpenRun:
    """The run at `path`, or the one that the configuration at `path` makes.

    Raises NoRunError, with what to type.
    """
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        from slurm_rl.config.load import load_settings

        settings = load_settings(path)
        if not (settings.run_dir / "run.json").exists():
            raise NoRunError(
                f"{path}: its run {settings.run_dir} does not exist yet",
                hint=f"start it with `slurm-rl submit {path}`",
            )
        return open_run(settings.run_dir)
    if path.exists() and not path.is_dir():
        raise NoRunError(f"{path}: is a file", hint="give the run's directory, or its .yaml")
    return open_run(path)


def check_iteration(
    graph: Graph, number: int | None, *, of: Literal["iteration", "version"] = "iteration"
) -> None:
    """Raises NoRunError for an iteration, or a version of the weights, that the run will never
    have. Version 0 is what it starts from: there is one more of them. None is any."""
    last = graph.num_iterations - (of == "iteration")
    if number is not None and not 0 <= number <= last:
        raise NoRunError(f"{of} {number} is not one of 0 to {last}")
