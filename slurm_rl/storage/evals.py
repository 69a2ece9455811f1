"""What people and the chain have decided about evaluations: wishes, and those that were given up.

    evals/000012.eval-aime           somebody wants version 12 evaluated, rule or no rule
    iterations/000012/eval-aime.t0/
      given-up.0001                  it failed for good; a budget that forgives it opens it again

Both are published once and stay. A wish says all by its name, so that looking for wishes is one
listing. A giving-up names the attempts and submissions that it rests on: it holds until a budget
forgives those (`storage/control.py`). Who is due is `chain/evals.py`'s to say.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path

from slurm_rl.errors import CorruptError
from slurm_rl.storage.control import Control
from slurm_rl.storage.durable import make_directory, publish, read_published
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Slot, StageRef, canonical_json

_WISH = re.compile(r"(\d{6,})\.(eval-[A-Za-z0-9][A-Za-z0-9_-]*)")
_GIVEN_UP = re.compile(r"given-up\.(\d{4,})")


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Why an evaluation is not tried again. It rests on attempts up to `epoch`, and on jobs up to
    submission `submission`."""

    epoch: int
    submission: int
    reason: str
    log: str = ""
    since: float = 0.0


def evals_dir(run: RunDir) -> Path:
    return run.root / "evals"


def read_wishes(run: RunDir) -> tuple[StageRef, ...]:
    """Evaluations that somebody asked for, by version."""
    found = [match for name in run.fs.list(evals_dir(run)) if (match := _WISH.fullmatch(name))]
    return tuple(sorted(StageRef(int(match[1]), match[2]) for match in found))


def publish_wish(run: RunDir, ref: StageRef, *, by: str) -> None:
    """Ask for an evaluation; nothing happens if somebody has. A crash leaves it made or not."""
    make_directory(evals_dir(run), below=run.root, fs=run.fs)
    path = evals_dir(run) / f"{ref.iteration:06d}.{ref.kind}"
    publish(path, canonical_json({"by": by}), fs=run.fs)


def read_given_up(run: RunDir, control: Control, slot: Slot) -> GivenUp | None:
    """The giving-up that holds for a slot; None if there is none, or it was forgiven.

    Raises CorruptError for one that cannot be read.
    """
    folder = run.slot_dir(slot)
    names = [name for name in run.fs.list(folder) if _GIVEN_UP.fullmatch(name)]
    if not names:
        return None
    last = _read(run, folder / names[-1])
    forgiven = dict(control.forgiven)
    attempts, jobs = forgiven.get(str(slot), -1), forgiven.get(str(slot.stage), -1)
    return None if last.epoch <= attempts and last.submission <= jobs else last


def publish_given_up(run: RunDir, slot: Slot, given_up: GivenUp) -> None:
    """Leave a giving-up behind those that were forgiven. Two at once say the same: one stays."""
    folder = run.slot_dir(slot)
    make_directory(folder, below=run.root, fs=run.fs)
    taken = [match for name in run.fs.list(folder) if (match := _GIVEN_UP.fullmatch(name))]
    number = 1 + max((int(match[1]) for match in taken), default=0)
    data = canonical_json(dataclasses.asdict(given_up))
    publish(folder / f"given-up.{number:04d}", data, fs=run.fs)


def forgive_given_up(given_up: GivenUp, slot: Slot) -> dict[str, int]:
    """What a budget must forgive so that `given_up` holds no more."""
    return {str(slot): given_up.epoch, str(slot.stage): given_up.submission}


def _read(run: RunDir, path: Path) -> GivenUp:
    data = read_published(path, fs=run.fs)
    try:
        return GivenUp(**json.loads(data or b""))
    except (ValueError, TypeError) as error:
        raise CorruptError(f"{path}: not a giving-up ({error})") from error
