"""The Typer application, and the arguments that many commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Reinforcement learning of language models on Slurm: each training step is a job.",
    epilog="Exit codes: 0 done, 2 your input is wrong, 3 nothing could be done, 4 the run is"
    " halted, 5 the run directory is damaged, 6 the scheduler refused.",
)

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, or the config it was made from.")
]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML configuration.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Override a value; may be given many times."),
]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Stay, show progress, and end when the run does.")
]


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and more log.")] = False,
) -> None:
    """Runs before every command."""
    from slurm_rl.cli.terminal import configure_logging

    configure_logging(debug=debug)
