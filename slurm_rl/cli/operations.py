"""Commands for trouble and upkeep: thin, like those of `main.py`, one function each."""

from __future__ import annotations

from slurm_rl.cli.app import RunArgument, app


@app.command()
def explain(run: RunArgument) -> None:
    """Why a run is not moving, and what to type. Example: slurm-rl explain runs/demo"""
    from slurm_rl.cli.explain import explain_run

    explain_run(run)
