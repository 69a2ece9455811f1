"""The everyday commands. Each is thin: it reads its arguments and calls one other module.

Imports of that module happen inside the command, so that `slurm-rl --help` stays quick. Commands
for trouble and upkeep are in `operations.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from slurm_rl.cli.app import ConfigArgument, RunArgument, SetOption, WaitOption, app
from slurm_rl.errors import SlurmRlError


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("config.yaml"),
) -> None:
    """Write a commented configuration to start from. Example: slurm-rl init my.yaml"""
    from slurm_rl.cli.starter import write_starter

    write_starter(path)


@app.command()
def validate(config: ConfigArgument, set_: SetOption = None) -> None:
    """Check a configuration, its model and its data. Example: slurm-rl validate my.yaml"""
    from slurm_rl.cli.submit import validate_config

    validate_config(config, set_ or [])


@app.command()
def plan(
    config: ConfigArgument,
    set_: SetOption = None,
    iterations: Annotated[int, typer.Option(help="How many iterations to show.")] = 2,
) -> None:
    """Show what would run: graph, jobs, their exact text, bytes and memory. Submits nothing.

    Example: slurm-rl plan my.yaml --set rollout.shards=4
    """
    from slurm_rl.cli.preview import show_plan

    show_plan(config, set_ or [], iterations)


@app.command()
def submit(config: ConfigArgument, set_: SetOption = None, wait: WaitOption = False) -> None:
    """Make a run and submit its chain; safe to repeat.

    Example: slurm-rl submit configs/quickstart.yaml --wait
    """
    from slurm_rl.cli.submit import submit_run

    submit_run(config, set_ or [], wait=wait)


@app.command()
def status(
    run: RunArgument,
    json_: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Where a run is, what its jobs do, and why it waits. Example: slurm-rl status runs/demo"""
    from slurm_rl.cli.status import show_status

    show_status(run, as_json=json_)


@app.command()
def watch(run: RunArgument) -> None:
    """Show progress until the run ends, and keep it moving (where jobs may not submit jobs).

    Example: slurm-rl watch runs/demo
    """
    from slurm_rl.cli.watch import watch_run

    watch_run(run)


@app.command()
def advance(run: RunArgument) -> None:
    """Move the run on once and leave: for cron or scrontab on a login node.

    Example: */10 * * * * slurm-rl advance /scratch/runs/demo
    """
    from slurm_rl.cli.control import advance_run

    advance_run(run)


@app.command()
def logs(
    run: RunArgument,
    iteration: Annotated[
        int | None, typer.Option("-i", "--iteration", help="Default: newest.")
    ] = None,
    stage: Annotated[str | None, typer.Option("--stage", help="rollout, train, …")] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", help="Lines of each log.")] = 40,
    list_: Annotated[bool, typer.Option("--list", help="Only name the files.")] = False,
) -> None:
    """The logs of the newest attempt. Example: slurm-rl logs runs/demo -i 12 --stage train"""
    from slurm_rl.cli.logs import show_logs

    show_logs(run, iteration=iteration, stage=stage, num_lines=lines, only_list=list_)


@app.command()
def metrics(
    run: RunArgument,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="One JSON object an iteration.")] = False,
    last: Annotated[int, typer.Option(help="Iterations to show.")] = 20,
) -> None:
    """The numbers of each iteration, read from its commits.

    Example: slurm-rl metrics runs/demo --jsonl > metrics.jsonl
    """
    from slurm_rl.cli.status import show_metrics

    show_metrics(run, as_jsonl=jsonl, last=last)


@app.command()
def resume(run: RunArgument, wait: WaitOption = False) -> None:
    """Continue a run that was paused, halted, cancelled or killed; safe to repeat.

    Example: slurm-rl resume runs/demo --wait
    """
    from slurm_rl.cli.control import resume_run

    resume_run(run, wait=wait)


@app.command()
def pause(run: RunArgument) -> None:
    """Start nothing new; what runs goes on and commits. Example: slurm-rl pause runs/demo"""
    from slurm_rl.cli.control import pause_run

    pause_run(run)


@app.command()
def cancel(run: RunArgument) -> None:
    """Pause the run and cancel its jobs. Committed work stays.

    Example: slurm-rl cancel runs/demo
    """
    from slurm_rl.cli.control import cancel_run

    cancel_run(run)


@app.command()
def verify(
    run: RunArgument,
    iteration: Annotated[
        int | None, typer.Option("-i", "--iteration", help="Only this one.")
    ] = None,
) -> None:
    """Re-read everything committed: digests, sizes, parents. Exit code 5 on damage.

    Example: slurm-rl verify runs/demo -i 12
    """
    from slurm_rl.cli.verify import verify_run

    verify_run(run, iteration=iteration)


@app.command()
def path(
    run: RunArgument,
    what: Annotated[
        str, typer.Argument(help="weights, checkpoint, samples, critic or run.")
    ] = "weights",
    iteration: Annotated[
        int | None, typer.Option("-i", "--iteration", help="Default: newest.")
    ] = None,
) -> None:
    """Print where committed weights, checkpoints or samples lie.

    Example: vllm serve $(slurm-rl path runs/demo weights)
    """
    from slurm_rl.cli.verify import print_path

    print_path(run, what, iteration=iteration)


# Last, so that `--help` lists the everyday commands first.
from slurm_rl.cli import operations  # noqa: E402, F401


def entry() -> None:
    """The console script: every error is one clear line; `--debug` shows the traceback."""
    debug = "--debug" in sys.argv
    try:
        app(standalone_mode=True)
    except SlurmRlError as error:
        if debug:
            raise
        print(f"slurm-rl: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("slurm-rl: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        if debug:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"slurm-rl: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(1)
