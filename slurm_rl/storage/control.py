"""Control: what people and the chain have decided about the run.

`PAUSE` and `HALT` stop submitting and claiming, never publishing. `timeline-N` rewrites history
from a stage on. `budget-N` gives stages that had used up their attempts new ones, `change-N`
changes settings or code, `owner-N` hands the run over. All but `PAUSE` and `HALT` are made once and
stay.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from slurm_rl.errors import CorruptError
from slurm_rl.storage.durable import (
    make_directory,
    publish,
    read_published,
    remove_published,
)
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import StageRef, canonical_json

_TIMELINE = re.compile(r"timeline-\d+")
_BUDGET = re.compile(r"budget-\d+")
_CHANGE = re.compile(r"change-\d+")
_OWNER = re.compile(r"owner-\d+")


@dataclass(frozen=True, slots=True)
class Halt:
    """Why the run stopped, and what to type."""

    reason: str
    hint: str = ""
    log: str = ""
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class TimelineStart:
    """Timeline `number` replaces history from `stage` of `iteration` on.

    gpu_s: GPU seconds of what it set aside.
    """

    number: int
    iteration: int
    stage: str
    reason: str = ""
    gpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """Settings, or user code, that are others from `stage` of `iteration` on.

    values: dotted path -> value. code_digest: None where the code stays. by: who did it.
    """

    iteration: int
    stage: str
    values: dict[str, Any]
    code_digest: str | None = None
    by: str = ""


@dataclass(frozen=True, slots=True)
class Control:
    """A reading of the control directory.

    forgiven: slot name -> epoch up to which attempts no longer count against the cap, and
              stage name -> number up to which its link's submissions do not.
    owner:    who adopted the run last; None: nobody did.
    """

    paused: str | None = None
    halt: Halt | None = None
    timelines: tuple[TimelineStart, ...] = ()
    forgiven: tuple[tuple[str, int], ...] = ()
    changes: tuple[Change, ...] = ()
    owner: str | None = None

    @property
    def stopped(self) -> bool:
        return self.paused is not None or self.halt is not None

    def changes_until(self, ref: StageRef | None) -> list[Change]:
        """The changes that hold for a stage, in the order of their making; None: all."""
        return [
            change
            for change in self.changes
            if ref is None or StageRef(change.iteration, change.stage).position <= ref.position
        ]

    def timeline_of(self, ref: StageRef) -> int:
        """The timeline on which a stage lies now: the latest that begins at or before it."""
        starts = [0]
        for start in self.timelines:
            if StageRef(start.iteration, start.stage).position <= ref.position:
                starts.append(start.number)
        return max(starts)


def read_control(run: RunDir) -> Control:
    """Everything in `control/`. Raises CorruptError rather than reading damage as nothing."""
    names = run.fs.list(run.control_dir)
    if not names:
        _check_there(run)
    timelines = [_read_timeline(run, name) for name in names if _TIMELINE.fullmatch(name)]
    forgiven: dict[str, int] = {}
    for name in names:
        if _BUDGET.fullmatch(name):
            forgiven.update(_read(run, name).get("forgiven", {}))
    halt = _read_stop(run, "HALT") if "HALT" in names else None
    pause = _read_stop(run, "PAUSE") if "PAUSE" in names else None
    return Control(
        paused=None if pause is None else str(pause.get("reason", "")),
        halt=None if halt is None else _parse_halt(halt),
        timelines=tuple(sorted(timelines, key=lambda start: start.number)),
        forgiven=tuple(sorted(forgiven.items())),
        changes=tuple(_read_change(run, name) for name in names if _CHANGE.fullmatch(name)),
        owner=_read_owner(run, names),
    )


def write_pause(run: RunDir, reason: str) -> None:
    """Stop submitting and claiming; what runs goes on and commits."""
    publish(run.control_dir / "PAUSE", canonical_json({"reason": reason}), fs=run.fs)


def write_halt(run: RunDir, halt: Halt) -> bool:
    """Halt the run; False if it is halted already (the first reason stays).

    `control/` is made if it is gone: that may be the very reason.
    """
    make_directory(run.control_dir, below=run.root, fs=run.fs)
    return publish(run.control_dir / "HALT", canonical_json(asdict(halt)), fs=run.fs)


def clear_stops(run: RunDir) -> None:
    """Take PAUSE and HALT away."""
    for name in ("PAUSE", "HALT"):
        remove_published(run.control_dir / name, fs=run.fs)
    run.fs.fsync_dir(run.control_dir)


def clear_halt(run: RunDir) -> None:
    """Take HALT away; a pause stays."""
    remove_published(run.control_dir / "HALT", fs=run.fs)
    run.fs.fsync_dir(run.control_dir)


def write_change(run: RunDir, change: Change) -> None:
    """Settings or code that hold from a stage on."""
    _publish_next(run, "change", asdict(change))


def write_owner(run: RunDir, owner: str) -> None:
    """Make the run `owner`'s."""
    _publish_next(run, "owner", {"owner": owner})


def write_budget(run: RunDir, forgiven: dict[str, int]) -> None:
    """Attempts up to these epochs no longer count against the cap of their slots."""
    _publish_next(run, "budget", {"forgiven": forgiven})


def start_timeline(
    run: RunDir, ref: StageRef, *, after: int, reason: str, gpu_s: float = 0.0
) -> bool:
    """Begin timeline `after + 1` at `ref`; False if somebody else began it: observe again."""
    start = TimelineStart(after + 1, ref.iteration, ref.kind, reason, gpu_s)
    path = run.control_dir / f"timeline-{start.number}"
    return publish(path, canonical_json(asdict(start)), fs=run.fs)


def _publish_next(run: RunDir, stem: str, value: dict[str, Any]) -> None:
    taken = [re.fullmatch(rf"{stem}-(\d+)", name) for name in run.fs.list(run.control_dir)]
    number = 1 + max((int(match[1]) for match in taken if match), default=0)
    data = canonical_json(value)
    while not publish(run.control_dir / f"{stem}-{number:04d}", data, fs=run.fs):
        number += 1


def _read(run: RunDir, name: str) -> Any:
    path = run.control_dir / name
    data = read_published(path, fs=run.fs)
    try:
        return _parse_mapping(data or b"")
    except ValueError as error:
        raise CorruptError(f"{path}: not readable ({error})") from error


def _read_stop(run: RunDir, name: str) -> Any:
    """PAUSE or HALT; None if it was taken away between listing and reading.

    A person may have typed `touch PAUSE` or `mkdir PAUSE`: that is a pause, not damage.
    """
    by_hand = {"reason": "by hand"}
    try:
        data = read_published(run.control_dir / name, fs=run.fs, waits=())
    except CorruptError:
        return by_hand
    if data is None:
        return None
    try:
        return _parse_mapping(data)
    except ValueError:
        text = data.decode(errors="replace").strip()
        return {"reason": text} if text else by_hand


def _parse_mapping(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("not a mapping")
    return value


def _check_there(run: RunDir) -> None:
    """Raises CorruptError if `control/` is gone: the run was perhaps paused, halted or rewound.

    It is made before `run.json`, so a run that has the one has the other.
    """
    names = run.fs.list(run.root)
    if "run.json" in names and run.control_dir.name not in names:
        raise CorruptError(
            f"{run.control_dir}: gone, and with it every pause, rewind and change of settings",
            hint="put it back from a copy; `slurm-rl resume` goes on as if there had been none",
        )


def _parse_halt(raw: dict[str, Any]) -> Halt:
    """A halt, also one that a person wrote by hand: any file of that name halts."""
    try:
        return Halt(**raw)
    except TypeError:
        return Halt(str(raw.get("reason", raw)))


def _read_change(run: RunDir, name: str) -> Change:
    try:
        return Change(**_read(run, name))
    except TypeError as error:
        raise CorruptError(f"{run.control_dir / name}: not a change ({error})") from error


def _read_owner(run: RunDir, names: list[str]) -> str | None:
    found = [name for name in names if _OWNER.fullmatch(name)]
    return str(_read(run, found[-1]).get("owner", "")) if found else None


def _read_timeline(run: RunDir, name: str) -> TimelineStart:
    try:
        return TimelineStart(**_read(run, name))
    except TypeError as error:
        raise CorruptError(f"{run.control_dir / name}: not a timeline ({error})") from error
