"""Control: what people and the chain have decided about the run.

`PAUSE` and `HALT` stop submitting and claiming, never publishing. `timeline-N` rewrites history
from a stage on. `budget-N` gives stages that had used up their attempts new ones. All but `PAUSE`
and `HALT` are made once and stay.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from slurm_rl.errors import CorruptError
from slurm_rl.storage.durable import publish, read_published
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import StageRef, canonical_json

_TIMELINE = re.compile(r"timeline-\d+")
_BUDGET = re.compile(r"budget-\d+")
#: Order of the stages inside an iteration; timelines begin at a point of this order.
STAGE_ORDER = ("init", "rollout", "score", "reference", "teacher", "critic", "train", "eval")


@dataclass(frozen=True, slots=True)
class Halt:
    """Why the run stopped, and what to type."""

    reason: str
    hint: str = ""
    log: str = ""
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class TimelineStart:
    """Timeline `number` replaces history from `stage` of `iteration` on."""

    number: int
    iteration: int
    stage: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Control:
    """A reading of the control directory.

    forgiven: slot name -> epoch up to which attempts no longer count against the cap, and
              stage name -> number up to which its link's submissions do not.
    """

    paused: str | None = None
    halt: Halt | None = None
    timelines: tuple[TimelineStart, ...] = ()
    forgiven: tuple[tuple[str, int], ...] = ()

    @property
    def stopped(self) -> bool:
        return self.paused is not None or self.halt is not None

    def timeline_of(self, ref: StageRef) -> int:
        """The timeline on which a stage lies now: the latest that begins at or before it."""
        starts = [0]
        for start in self.timelines:
            if _position(StageRef(start.iteration, start.stage)) <= _position(ref):
                starts.append(start.number)
        return max(starts)


def read_control(run: RunDir) -> Control:
    """Everything in `control/`. Raises CorruptError rather than reading damage as nothing."""
    names = run.fs.list(run.control_dir)
    timelines = [_read_timeline(run, name) for name in names if _TIMELINE.fullmatch(name)]
    forgiven: dict[str, int] = {}
    for name in names:
        if _BUDGET.fullmatch(name):
            forgiven.update(_read(run, name).get("forgiven", {}))
    halt = _read(run, "HALT", missing_ok=True) if "HALT" in names else None
    pause = _read(run, "PAUSE", missing_ok=True) if "PAUSE" in names else None
    return Control(
        paused=None if pause is None else str(pause.get("reason", "")),
        halt=None if halt is None else _parse_halt(halt),
        timelines=tuple(sorted(timelines, key=lambda start: start.number)),
        forgiven=tuple(sorted(forgiven.items())),
    )


def write_pause(run: RunDir, reason: str) -> None:
    """Stop submitting and claiming; what runs goes on and commits."""
    publish(run.control_dir / "PAUSE", canonical_json({"reason": reason}), fs=run.fs)


def write_halt(run: RunDir, halt: Halt) -> bool:
    """Halt the run; False if it is halted already (the first reason stays)."""
    return publish(run.control_dir / "HALT", canonical_json(asdict(halt)), fs=run.fs)


def clear_stops(run: RunDir) -> None:
    """Take PAUSE and HALT away."""
    for name in ("PAUSE", "HALT"):
        try:
            run.fs.unlink(run.control_dir / name)
        except FileNotFoundError:
            continue
    run.fs.fsync_dir(run.control_dir)


def write_budget(run: RunDir, forgiven: dict[str, int]) -> None:
    """Attempts up to these epochs no longer count against the cap of their slots."""
    _publish_next(run, "budget", {"forgiven": forgiven})


def start_timeline(run: RunDir, ref: StageRef, *, after: int, reason: str) -> bool:
    """Begin timeline `after + 1` at `ref`; False if somebody else began it: observe again."""
    start = TimelineStart(after + 1, ref.iteration, ref.kind, reason)
    path = run.control_dir / f"timeline-{start.number}"
    return publish(path, canonical_json(asdict(start)), fs=run.fs)


def _publish_next(run: RunDir, stem: str, value: dict[str, Any]) -> None:
    taken = [re.fullmatch(rf"{stem}-(\d+)", name) for name in run.fs.list(run.control_dir)]
    number = 1 + max((int(match[1]) for match in taken if match), default=0)
    data = canonical_json(value)
    while not publish(run.control_dir / f"{stem}-{number:04d}", data, fs=run.fs):
        number += 1


def _read(run: RunDir, name: str, *, missing_ok: bool = False) -> Any:
    path = run.control_dir / name
    data = read_published(path, fs=run.fs)
    if data is None and missing_ok:
        return None  # taken away between listing and reading
    try:
        value = json.loads(data or b"")
        if not isinstance(value, dict):
            raise ValueError("not a mapping")
        return value
    except ValueError as error:
        # A person may have typed `touch PAUSE`: that is a pause, not damage.
        if name in ("PAUSE", "HALT"):
            return {"reason": (data or b"").decode(errors="replace").strip() or "by hand"}
        raise CorruptError(f"{path}: not readable ({error})") from error


def _parse_halt(raw: dict[str, Any]) -> Halt:
    """A halt, also one that a person wrote by hand: any file of that name halts."""
    try:
        return Halt(**raw)
    except TypeError:
        return Halt(str(raw.get("reason", raw)))


def _read_timeline(run: RunDir, name: str) -> TimelineStart:
    try:
        return TimelineStart(**_read(run, name))
    except TypeError as error:
        raise CorruptError(f"{run.control_dir / name}: not a timeline ({error})") from error


def _position(ref: StageRef) -> tuple[int, int]:
    order = STAGE_ORDER.index(ref.kind) if ref.kind in STAGE_ORDER else len(STAGE_ORDER)
    return ref.iteration, order
