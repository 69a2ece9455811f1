"""How late one node sees what another publishes: files thrown to and fro through one folder.

Each throw is a `publish`, the very call that names a COMMIT. A round trip is timed by one clock,
the thrower's, so that nodes need not agree on the time; and each side tells how much later the
listing and the size were right than the name itself. Owns the folder's file names.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_rl.storage.durable import publish

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Sighting:
    """How late a file was seen in full. Seconds after its name was first found, however found.

    name_s: until it could be opened by name; listing_s: until a listing showed it; content_s:
    until it had its whole content.
    """

    name_s: float
    listing_s: float
    content_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One throw and its return: the whole way, and what either side saw. None: never seen.

    Example: `Round(0.04, there=Sighting(0.0, 0.0, 0.0), back=Sighting(0.0, 0.0, 0.0))`.
    """

    total_s: float | None
    there: Sighting | None = None
    back: Sighting | None = None

    @property
    def latest_s(self) -> float:
        """The most that any part of it was late."""
        seen = [part for part in (self.there, self.back) if part is not None]
        return max(t for part in seen for t in (part.name_s, part.listing_s, part.content_s))


def throw_rounds(folder: Path, *, channel: str, num_rounds: int, patience_s: float) -> list[Round]:
    """Throw `num_rounds` files to whoever echoes on `channel`; stops at one that never returns.

    One more comes before them and is not timed: the other side may be busy with something else.
    """
    rounds: list[Round] = []
    for number in range(num_rounds + 1):
        entry = _throw(folder, channel, number, patience_s)
        if entry.total_s is None:
            return [*rounds, entry]
        if number:
            rounds.append(entry)
    return rounds


def _throw(folder: Path, channel: str, number: int, patience_s: float) -> Round:
    began = time.monotonic()
    publish(folder / f"ping-{channel}-{number}", _fill({}, number))
    path = folder / f"pong-{channel}-{number}"
    seen = await_file(path, number=number, until=began + patience_s)
    if seen is None:
        return Round(None)
    said = json.loads(path.read_bytes())
    return Round(time.monotonic() - began, Sighting(**said["seen"]), seen)


def echo(folder: Path, *, channel: str, is_over: Callable[[], bool]) -> int:
    """Throw back whatever comes on `channel` until `is_over()`; how many there were."""
    number = 0
    while not is_over():
        path = folder / f"ping-{channel}-{number}"
        seen = await_file(path, number=number, until=time.monotonic() + 1.0)
        if seen is not None:
            publish(folder / f"pong-{channel}-{number}", _fill({"seen": asdict(seen)}, number))
            number += 1
    return number


def await_file(path: Path, *, number: int, until: float) -> Sighting | None:
    """Look for `path` by name and by listing, over and over; None if it is not whole by `until`
    (of the monotonic clock)."""
    times: dict[str, float] = {}
    while len(times) < 3:
        now = time.monotonic()
        # By name first: a listing makes the client ask the server again.
        size = _size(path)
        if size is not None:
            times.setdefault("name", now)
            if size == _size_of(number):
                times.setdefault("content", now)
        if path.name in _names(path.parent):
            times.setdefault("listing", time.monotonic())
        if len(times) < 3:
            if now > until:
                return None
            time.sleep(_POLL_S)
    first = min(times.values())
    return Sighting(*(round(times[key] - first, 3) for key in ("name", "listing", "content")))


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []  # swept away: whoever asks will find out that it is over


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _size_of(number: int) -> int:
    """What a file of this number must measure: each another, so that a stale size shows."""
    return 1000 * (number + 1)


def _fill(value: dict[str, object], number: int) -> bytes:
    """`value` as JSON of the size that belongs to `number`."""
    return json.dumps(value).encode().ljust(_size_of(number))
