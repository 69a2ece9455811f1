"""submit and validate: from a configuration to a run."""

from __future__ import annotations

import time
from pathlib import Path

from slurm_rl import __version__
from slurm_rl.chain.advance import Outcome, advance
from slurm_rl.chain.view import HaltRun
from slurm_rl.cli.same_run import check_same, has_begun, is_same
from slurm_rl.cli.terminal import say
from slurm_rl.config.load import LoadedConfig, load_config
from slurm_rl.config.preflight import check_files
from slurm_rl.config.problems import raise_problems
from slurm_rl.errors import Halted, NothingDone
from slurm_rl.launch.build import OpenRun, open_run
from slurm_rl.launch.partitions import check_partitions
from slurm_rl.launch.wall_times import check_wall_times
from slurm_rl.storage.control import read_control
from slurm_rl.storage.owner import (
    check_owner,
    current_user,
    hand_to_group,
    share_with_group,
)
from slurm_rl.storage.rundir import (
    RunDir,
    RunIdentity,
    create_run,
    new_run_id,
    unmake_run,
    write_copies,
)
from slurm_rl.storage.snapshot import snapshot_code


def validate_config(config: Path, overrides: list[str]) -> None:
    """Check everything that can be known before a job runs."""
    loaded = load_config(config, overrides)
    raise_problems(check_files(loaded.settings), loaded.origins)
    say(f"{config}: valid; the run would be {loaded.settings.run_dir}")


def submit_run(config: Path, overrides: list[str], *, wait: bool) -> None:
    """Make the run unless it is there, and move its chain on."""
    loaded = load_config(config, overrides)
    raise_problems(check_files(loaded.settings), loaded.origins)
    raise_problems(check_partitions(loaded.settings), loaded.origins)
    raise_problems(check_wall_times(loaded.settings), loaded.origins)
    opened, is_new = make_run(loaded)
    root = opened.run.root
    control = read_control(opened.run)
    if control.halt is not None:
        raise Halted(
            f"{root}: halted: {control.halt.reason}", hint=f"`slurm-rl resume {root}` continues"
        )
    if control.paused is not None:
        raise NothingDone(f"{root}: paused", hint=f"`slurm-rl resume {root}` continues it")
    check_owner(opened.run, opened.identity, control)
    if not wait:
        _move_on(opened, is_new=is_new)
        say(f"watch it with: slurm-rl status {root}")
        return
    from slurm_rl.cli.watch import attended, watch

    with attended(opened):
        _move_on(opened, is_new=is_new)
        watch(opened)


def _move_on(opened: OpenRun, *, is_new: bool) -> None:
    outcome = advance(opened.chain)
    say(f"{'made' if is_new else 'continuing'} run {opened.run.root}")
    report(opened, outcome)


def report(opened: OpenRun, outcome: Outcome) -> None:
    """What an advance did, and the scheduler's refusals as an error."""
    if outcome.job_ids:
        say(f"submitted {len(outcome.job_ids)} job(s): {', '.join(outcome.job_ids)}")
    for action in outcome.plan.actions:
        if isinstance(action, HaltRun):
            raise Halted(f"{opened.run.root}: {action.halt.reason}", hint=action.halt.hint)
    if outcome.errors:
        raise outcome.errors[0]
    if outcome.is_stale:
        say(f"{opened.run.root}: somebody changes it just now; repeat the command")


def make_run(loaded: LoadedConfig) -> tuple[OpenRun, bool]:
    """The run of a configuration, made if it is not there, or is there and has never begun.

    Raises ConfigError if it has begun with other settings.
    """
    run = RunDir(loaded.settings.run_dir.absolute())
    if (run.root / "run.json").exists():
        opened = open_run(run.root)
        if is_same(loaded, opened) or has_begun(opened):
            check_same(loaded, opened)
            if not run.settings_path.exists():
                write_copies(run, opened.identity)
            return opened, False
        say(f"{run.root}: no job of it was ever accepted; it is made anew")
        unmake_run(run)
    is_new = _create(loaded, run)
    opened = open_run(run.root)
    if not is_new:
        check_same(loaded, opened)
    return opened, is_new


def _create(loaded: LoadedConfig, run: RunDir) -> bool:
    settings = loaded.settings
    run.fs.mkdir(run.root)  # and what is missing above it, for whoever may
    share_with_group(settings.run.group)
    hand_to_group(run, settings.run.group)
    identity = RunIdentity(
        run_id=new_run_id(),
        name=settings.run.name,
        created=time.time(),
        owner=current_user(),
        code_version=__version__,
        settings=settings.model_dump(mode="json"),
        config_text=loaded.text,
        site_text=loaded.site_text,
        code_digest=snapshot_code(run, [Path(path) for path in settings.code]),
    )
    return create_run(run, identity)
