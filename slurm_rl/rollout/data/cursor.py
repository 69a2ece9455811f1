"""The data cursor: where in the data a run is. A few numbers, whatever the size of the data.

It is part of each rollout's commit. It is refused with other data than those that it was made
with: its positions would mean other prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slurm_rl.errors import CorruptError, DataError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run is in one data set: the next row is at `position` in the order of `epoch`.

    visits: how many prompts were taken from it; positions count those that were skipped too.
    """

    epoch: int = 0
    position: int = 0
    visits: int = 0


@dataclass(frozen=True, slots=True)
class Cursor:
    """The next visit, by its number in the run, and the place in each data set.

    Example: `Cursor(16, {"data": Place(0, 17, 16)}, "xxh3:…")`: one prompt was skipped.
    """

    visits: int
    sets: Mapping[str, Place]
    data_fingerprint: str

    def as_dict(self) -> dict[str, Any]:
        """As it stands in a commit."""
        return {
            "visits": self.visits,
            "sets": {name: asdict(place) for name, place in self.sets.items()},
            "data_fingerprint": self.data_fingerprint,
        }


def parse_cursor(value: Any) -> Cursor:
    """The cursor of a commit. Raises CorruptError."""
    try:
        sets = {str(name): Place(**place) for name, place in value["sets"].items()}
        cursor = Cursor(value["visits"], sets, value["data_fingerprint"])
        numbers = [n for p in sets.values() for n in (p.epoch, p.position, p.visits)]
        is_good = all(type(n) is int and n >= 0 for n in (cursor.visits, *numbers))
    except (TypeError, KeyError, AttributeError) as error:
        raise _not_a_cursor(value) from error
    if not is_good or cursor.visits != sum(place.visits for place in sets.values()):
        raise _not_a_cursor(value)
    return cursor


def start_cursor(
    previous: Any | None, *, sizes: Mapping[str, int], fingerprint: str, path: str
) -> Cursor:
    """Where this iteration goes on: at the beginning, or where the rollout before it stopped.

    previous: the cursor of that one's commit. sizes: rows of each data set, by name.

    Raises DataError if the data changed in between, CorruptError for what is no cursor.
    """
    if previous is None:
        return Cursor(0, {name: Place() for name in sizes}, fingerprint)
    cursor = parse_cursor(previous)
    if sorted(cursor.sets) != sorted(sizes):
        raise DataError(
            f"rollout.prompt_data: the data sets are {', '.join(sizes)};"
            f" those of the previous iteration were {', '.join(cursor.sets)}",
            hint="give them their old names, or start a new run",
        )
    if cursor.data_fingerprint != fingerprint:
        raise DataError(
            f"{path}: the prompts are not those of the previous iteration"
            f" ({fingerprint}, they were {cursor.data_fingerprint})",
            hint="put the old data and weights back, or start a new run with the new ones",
        )
    if any(place.position >= sizes[name] for name, place in cursor.sets.items()):
        raise _not_a_cursor(previous)
    # In the order of the settings: a commit sorts the names.
    return Cursor(cursor.visits, {name: cursor.sets[name] for name in sizes}, fingerprint)


def _not_a_cursor(value: Any) -> CorruptError:
    return CorruptError(f"the previous rollout's cursor is not one: {value}")
