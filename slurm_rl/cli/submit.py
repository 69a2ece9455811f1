"""submit and validate: from a configuration to a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from slurm_rl import __version__
from slurm_rl.chain.advance import Outcome, advance
from slurm_rl.chain.view import HaltRun
from slurm_rl.cli.terminal import say
from slurm_rl.config.load import LoadedConfig, load_config
from slurm_rl.config.preflight import check_files
from slurm_rl.config.problems import raise_problems
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, Halted, NothingDone
from slurm_rl.launch.build import OpenRun, open_run
from slurm_rl.launch.stage_settings import parse_settings
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
    read_identity,
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
    outcome = advance(opened.chain)
    say(f"{'made' if is_new else 'continuing'} run {root}")
    report(opened, outcome)
    if wait:
        from slurm_rl.cli.watch import watch

        watch(opened)
    else:
        say(f"watch it with: slurm-rl status {root}")


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
    """The run of a configuration, made if it is not there. Raises ConfigError if it differs."""
    settings = loaded.settings
    run = RunDir(settings.run_dir.absolute())
    if not (run.root / "run.json").exists():
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
        if create_run(run, identity):
            return open_run(run.root), True
    found = read_identity(run)
    _check_same(loaded, parse_settings(found, read_control(run)))
    if not run.settings_path.exists():
        write_copies(run, found)
    return open_run(run.root), False


def _check_same(loaded: LoadedConfig, found: Settings) -> None:
    """A second submit into a run must mean the same run."""
    wanted = loaded.settings.model_dump(mode="json")
    changes = _differences(found.model_dump(mode="json"), wanted)
    if changes:
        shown = "; ".join(changes[:4]) + ("; …" if len(changes) > 4 else "")
        raise ConfigError(
            f"{loaded.path}: the run {loaded.settings.run_dir} exists with other settings: {shown}",
            hint="choose another run.name, change the run with `slurm-rl set`, or continue it as it"
            " is with `slurm-rl resume`",
        )


def _differences(old: Any, new: Any, where: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted({*old, *new})
        return [
            line
            for name in names
            for line in _differences(
                old.get(name), new.get(name), f"{where}.{name}" if where else name
            )
        ]
    return [] if old == new else [f"{where} was {old!r}, now {new!r}"]
