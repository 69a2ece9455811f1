"""Intents: that a job was about to be submitted for a link, written before it is.

`submit.0003` is published exclusively; only its creator runs the submission. It holds the token
that the job's name carries, so that after a crash the job is found by name instead of being
submitted twice. `submit.0003.id` is a convenience for people: nothing is decided by a job id.
`submit.0003.seen` says that the job started and looked for work.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_rl.errors import CorruptError
from slurm_rl.storage.durable import make_directory, publish, read_published, write_hint
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import canonical_json

_NAME = re.compile(r"submit\.\d{4,}")
#: Begins the name of the folder, in a stage's directory, that holds the intents of a pool.
POOL_FOLDER = "pool-"


@dataclass(frozen=True, slots=True)
class Intent:
    """One intended submission. `created` is by the clock of the run's file system.

    fallback: it goes to the stage's other partition, after waiting too long.
    """

    number: int
    token: str
    created: float
    creator: str = ""
    shards: tuple[int, ...] = ()
    fallback: bool = False


def read_intents(run: RunDir, folder: Path) -> list[Intent]:
    """Every intent of the link whose stage directory is `folder`, by number."""
    intents = []
    for name in run.fs.list(folder):
        if _NAME.fullmatch(name):
            data = read_published(folder / name, fs=run.fs)
            try:
                raw = json.loads(data or b"")
                intents.append(Intent(**{**raw, "shards": tuple(raw["shards"])}))
            except (ValueError, TypeError, KeyError) as error:
                raise CorruptError(f"{folder / name}: not an intent ({error})") from error
    return intents


def intent_path(folder: Path, number: int) -> Path:
    return folder / f"submit.{number:04d}"


def publish_intent(run: RunDir, folder: Path, intent: Intent) -> bool:
    """Claim the right to submit number `intent.number`; False if somebody else has it."""
    make_directory(folder, below=run.root, fs=run.fs)
    return publish(intent_path(folder, intent.number), canonical_json(asdict(intent)), fs=run.fs)


def write_job_id(run: RunDir, folder: Path, number: int, job_id: str) -> None:
    """Note the id that the scheduler gave."""
    write_hint(folder / f"submit.{number:04d}.id", job_id.encode(), fs=run.fs)


def write_seen(run: RunDir, path: Path) -> None:
    """Leave word that the job of the intent at `path` got as far as looking for work."""
    write_hint(path.with_name(f"{path.name}.seen"), b"", fs=run.fs)


def read_silent(run: RunDir, folder: Path) -> set[int]:
    """Numbers of the intents that got a job id, but whose job never began to look for work."""
    names = set(run.fs.list(folder))
    return {
        int(name.split(".")[1])
        for name in names
        if (stem := name.removesuffix(".id")) != name
        and _NAME.fullmatch(stem)
        and f"{stem}.seen" not in names
    }


def write_cancelled(run: RunDir, token: str) -> None:
    """Leave word for a job that it is cancelled by a command of ours: no need to pause the run."""
    run.fs.mkdir(run.scheduler_dir)
    write_hint(run.scheduler_dir / f"cancelled-{token}", b"", fs=run.fs)


def is_cancelled(run: RunDir, token: str) -> bool:
    """Whether a job was cancelled by a command of ours."""
    return f"cancelled-{token}" in run.fs.list(run.scheduler_dir)


def new_job_token(short_id: str) -> str:
    """A token for a job's name; it begins with the run's short id, so names tell runs apart."""
    return f"{short_id}{secrets.token_hex(3)}"
