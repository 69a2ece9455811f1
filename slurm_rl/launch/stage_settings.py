"""What a stage runs with: the settings and the user's code that hold for it.

A run's settings are fixed in `run.json`; changes, each from a stage on, lie in the control
directory. A stage program reads a file: `resolved.json`, or `settings/<digest>.json` after changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from slurm_rl.config.changes import apply_changes
from slurm_rl.config.schema import Settings
from slurm_rl.config.shaping import settings_digest
from slurm_rl.errors import FormatError
from slurm_rl.storage.control import Control
from slurm_rl.storage.digest import digest_value
from slurm_rl.storage.durable import make_directory, write_file
from slurm_rl.storage.rundir import RunDir, RunIdentity
from slurm_rl.storage.snapshot import check_snapshot
from slurm_rl.types import StageRef


@dataclass(frozen=True, slots=True)
class StageSettings:
    """Where a stage program finds its settings and code, and the digest of what shapes numbers.

    same_versions: whether it must run with the libraries of the stages before it.
    """

    path: str
    digest: str
    code_dir: str = ""
    same_versions: bool = False


def parse_settings(
    identity: RunIdentity, control: Control, *, at: StageRef | None = None
) -> Settings:
    """The settings that hold at a stage; None: the newest.

    What did not exist when the run was made has its default. Raises FormatError if there is one
    that this slurm-rl does not know.
    """
    changes = [change.values for change in control.changes_until(at)]
    try:
        return Settings.model_validate_json(json.dumps(apply_changes(identity.settings, changes)))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise FormatError(
            f"run.json: settings.{where} means nothing to this slurm-rl",
            hint=f"use slurm-rl {identity.code_version or 'of the run'}, which made the run",
        ) from error


def code_digest_of(identity: RunIdentity, control: Control, at: StageRef | None) -> str:
    """The user code that holds at a stage; empty if there is none."""
    digests = [c.code_digest for c in control.changes_until(at) if c.code_digest is not None]
    return digests[-1] if digests else identity.code_digest


def find_stage_settings(
    run: RunDir, identity: RunIdentity, control: Control, at: StageRef
) -> StageSettings:
    """What the stage `at` runs with; its file is made if it is missing.

    An evaluation of whatever version runs with what holds now: it may be asked for long after, with
    data and rewards that were not there when the weights were made. Raises CorruptError if the
    snapshot of the code is not what was taken. A crash leaves a settings file that is whole, or
    none.
    """
    since = None if at.is_eval else at
    settings = parse_settings(identity, control, at=since)
    digest = code_digest_of(identity, control, since)
    if digest:
        check_snapshot(run, digest)
    return StageSettings(
        path=str(_write_settings(run, control, since, settings)),
        digest=settings_digest(settings, at.kind),
        code_dir=str(run.code_dir(digest)) if digest else "",
        same_versions=settings.versions == "same",
    )


def _write_settings(run: RunDir, control: Control, at: StageRef | None, settings: Settings) -> Path:
    if not control.changes_until(at):
        return run.settings_path
    value = settings.model_dump(mode="json")
    path = run.root / "settings" / f"{digest_value(value).partition(':')[2][:16]}.json"
    if not path.exists():
        make_directory(path.parent, below=run.root, fs=run.fs)
        text = json.dumps(value, indent=2, sort_keys=True) + "\n"
        write_file(path, text.encode(), fs=run.fs)
    return path
