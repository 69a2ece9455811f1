"""Commands for trouble and upkeep: thin, like those of `main.py`, one function each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slurm_rl.cli.app import RunArgument, SetOption, app


@app.command()
def explain(run: RunArgument) -> None:
    """Why a run is not moving, and what to type. Example: slurm-rl explain runs/demo"""
    from slurm_rl.cli.explain import explain_run

    explain_run(run)


@app.command("eval")
def eval_(
    run: RunArgument,
    version: Annotated[
        int | None, typer.Option("--version", help="Of the weights; without it all are listed.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME", help="Only this evaluation.")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Here, in this process: no job.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """What was evaluated, and an evaluation of any version of the weights that is still there.

    Example: slurm-rl eval runs/demo --version 12 --set aime
    """
    from slurm_rl.cli.eval import evaluate

    evaluate(run, version=version, names=set_ or [], now=now, as_json=json_)


@app.command()
def retry(
    run: RunArgument,
    iteration: Annotated[int, typer.Option("-i", "--iteration", help="Of which iteration.")],
    stage: Annotated[str, typer.Option("--stage", help="rollout, train, …")],
) -> None:
    """Give a failed stage its attempts back, or make a committed one again with what follows.

    Example: slurm-rl retry runs/demo -i 12 --stage train
    """
    from slurm_rl.cli.rewrite import retry_stage

    retry_stage(run, iteration=iteration, stage=stage)


@app.command()
def rewind(
    run: RunArgument,
    to: Annotated[int, typer.Option("--to", help="The first iteration to make again.")],
) -> None:
    """Make an iteration and all after it again; what is there is set aside, not erased.

    Example: slurm-rl rewind runs/demo --to 12
    """
    from slurm_rl.cli.rewrite import rewind_run

    rewind_run(run, to=to)


@app.command("set")
def set_(
    run: RunArgument,
    assignments: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE…", help="Settings, or code=FOLDER.")
    ],
) -> None:
    """Change settings of a run, or adopt changed code, from now on.

    Example: slurm-rl set runs/demo train.megatron.lr=5e-7 code=code/boxes
    """
    from slurm_rl.cli.change import change_run

    change_run(run, assignments)


@app.command()
def adopt(run: RunArgument) -> None:
    """Take over a colleague's run (see run.group). Example: slurm-rl adopt /shared/runs/demo"""
    from slurm_rl.cli.adopt import adopt_run

    adopt_run(run)


@app.command()
def doctor(
    target: Annotated[
        Path, typer.Argument(metavar="CONFIG|RUN", help="A configuration, or a run directory.")
    ],
    set_: SetOption = None,
    stage: Annotated[
        str | None,
        typer.Option("--stage", help="Try the job of that stage: train, rollout, critic, …"),
    ] = None,
    no_jobs: Annotated[bool, typer.Option("--no-jobs", help="Submit nothing.")] = False,
    patience: Annotated[
        float, typer.Option(help="Seconds that a job of it may wait in the queue.")
    ] = 300.0,
    json_: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Look whether file system, site and configuration are fit for the run, and say what to set.

    Example: slurm-rl doctor my.yaml --stage train
    """
    from slurm_rl.cli.doctor.examine import examine

    examine(target, set_ or [], stage=stage, jobs=not no_jobs, patience_s=patience, as_json=json_)


@app.command()
def shell(
    run: RunArgument,
    iteration: Annotated[
        int | None,
        typer.Option(
            "-i", "--iteration", help="Default: the one to be done. Of evaluations: the version."
        ),
    ] = None,
    stage: Annotated[str, typer.Option("--stage", help="rollout, train, eval-NAME, …")] = "rollout",
    shard: Annotated[int, typer.Option(help="Which shard's order.")] = 0,
    command: Annotated[
        str | None, typer.Option("--command", help="Run this instead of a shell.")
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", help="Wall time, if not the stage's own.")
    ] = None,
    scratch: Annotated[
        Path | None, typer.Option("--scratch", help="Folder to work in; default: in the run.")
    ] = None,
) -> None:
    """Open a stage's own environment, its inputs read-only; nothing in it can commit.

    Example: slurm-rl shell runs/demo -i 12 --stage rollout
    """
    from slurm_rl.cli.shell import open_shell

    open_shell(
        run,
        iteration=iteration,
        stage=stage,
        shard=shard,
        command=command,
        time=time,
        scratch_dir=scratch,
    )


@app.command()
def samples(
    run: RunArgument,
    iteration: Annotated[
        int | None,
        typer.Option("-i", "--iteration", help="Default: newest. Of evaluations: the version."),
    ] = None,
    stage: Annotated[str, typer.Option("--stage", help="rollout, or eval-NAME.")] = "rollout",
    sort: Annotated[str, typer.Option("--sort", help="group, reward or length.")] = "group",
    reverse: Annotated[bool, typer.Option("--reverse", help="Highest first.")] = False,
    group: Annotated[int | None, typer.Option("--group", help="Only this group.")] = None,
    data_set: Annotated[
        str | None, typer.Option("--data-set", help="Only of this data set.")
    ] = None,
    status: Annotated[
        str | None, typer.Option("--status", help="Only completed, truncated, …")
    ] = None,
    limit: Annotated[int, typer.Option(help="Samples to show.", min=1)] = 16,
    full: Annotated[bool, typer.Option("--full", help="Texts in full.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Token ids too.")] = False,
    export: Annotated[
        Path | None, typer.Option("--export", help="Write them all to FILE.jsonl or .parquet.")
    ] = None,
) -> None:
    """Show or export what was generated: prompts, responses, rewards, masks, versions.

    Example: slurm-rl samples runs/demo -i 12 --sort reward --limit 5
    """
    from slurm_rl.cli.samples import Wanted, show_samples

    show_samples(
        run,
        iteration=iteration,
        stage=stage,
        wanted=Wanted(sort, reverse, group, data_set, status, limit),
        is_full=full,
        with_tokens=tokens,
        export=export,
    )


@app.command()
def replay(
    run: RunArgument,
    iteration: Annotated[int, typer.Option("-i", "--iteration", help="Of which iteration.")],
    train_only: Annotated[bool, typer.Option("--train-only", help="Its train stage.")] = False,
    rollout_only: Annotated[
        bool, typer.Option("--rollout-only", help="Its rollout stage.")
    ] = False,
    stage: Annotated[
        str | None,
        typer.Option("--stage", help="Another that runs a model: critic, reference, teacher."),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(
            "--samples",
            help="Train on these: samples.safetensors, an export of `samples`, a slime dump.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Keep what it makes, in this folder.")
    ] = None,
) -> None:
    """Do a committed stage again here, and compare; nothing of it is committed.

    Example: slurm-rl replay runs/demo -i 12 --train-only
    """
    from slurm_rl.cli.replay import choose_stage, replay_stage

    kind = choose_stage({"train": train_only, "rollout": rollout_only}, stage=stage)
    replay_stage(run, kind=kind, iteration=iteration, samples=samples, output=output)


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(help="A run, a Hugging Face directory, or a Megatron checkpoint."),
    ],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder to make.")],
    version: Annotated[
        int | None, typer.Option("--version", help="Of a run's weights. Default: newest.")
    ] = None,
    critic: Annotated[bool, typer.Option("--critic", help="The run's critic instead.")] = False,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16.")
    ] = None,
    file_size: Annotated[
        str | None, typer.Option("--file-size", help="Cut files at this size, as 5GB.")
    ] = None,
    megatron: Annotated[
        bool, typer.Option("--megatron", help="Make a Megatron checkpoint (torch_dist).")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Directory of a checkpoint's config.json and tokenizer."),
    ] = None,
    through: Annotated[
        str | None, typer.Option("--through", help="mbridge: for families that are not ours.")
    ] = None,
) -> None:
    """A model out of a run, in files of another size or dtype, or in Megatron's format and back.

    Example: slurm-rl convert runs/demo --version 12 --to models/demo-12 --dtype bfloat16
    """
    from slurm_rl.cli.convert import Wanted
    from slurm_rl.cli.convert import convert as convert_model

    wanted = Wanted(version, critic, dtype, file_size, megatron, config, through)
    convert_model(source, to, wanted)


@app.command()
def gc(
    run: RunArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Stay until what is marked is gone.")
    ] = False,
) -> None:
    """Delete what retention does not keep: mark, wait for readers, archive, delete.

    Example: slurm-rl gc runs/demo --dry-run
    """
    from slurm_rl.cli.gc import collect_garbage

    collect_garbage(run, dry_run=dry_run, wait=wait)


@app.command()
def lease(
    run: RunArgument,
    iteration: Annotated[int, typer.Option("-i", "--iteration", help="Whose files stay.")],
    hours: Annotated[float, typer.Option(help="For how long.", min=0.01, max=8760)] = 24.0,
    why: Annotated[str, typer.Option(help="Shown by `gc` to others.")] = "",
) -> None:
    """Keep the files of an iteration for a while: for an eval by hand, a server, a colleague.

    Example: slurm-rl lease runs/demo -i 12 --hours 48 --why "eval on math"
    """
    from slurm_rl.cli.gc import lease_iteration

    lease_iteration(run, iteration=iteration, hours=hours, why=why)
