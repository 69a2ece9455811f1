"""Which groups make the batch: the account of a rollout's visits, and the decision to close. Pure.

Visits are entered in the order of the data (carried ones first) and get a verdict each: kept, or
dropped (by the filter, or since the reward failed). Two rules say which kept ones are admitted:

    cursor    the first N of the data that are kept: nothing is decided before all visits ahead of
              the N-th have their verdict. A function of the verdicts alone.
    arrival   the first N to be finished; or fewer, at the quorum or the deadline. Whoever is not
              admitted, and not dropped, carries over: no prompt is lost.

Example: N = 2, verdicts kept, dropped, (open), kept. By arrival 0 and 3 are admitted and 2 carries
over; by cursor everything waits for 2.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, Literal

from slurm_rl.errors import DataError
from slurm_rl.storage.digest import digest_value

Admission = Literal["cursor", "arrival"]

#: Verdicts; a dropped group's is `_DROPPED` plus the number of its reason.
_OPEN, _KEPT, _DROPPED = range(3)
_MOST_REASONS = 10_000


@dataclass(frozen=True, slots=True)
class BatchRule:
    """What the settings say of a batch. `width` is how many groups are under way to fill it.

    num_groups: N. quorum: kept groups at which the batch may close by arrival, N at most.
    cap:        visits entered at most. may_fall_short: then close with fewer instead of halting.
    """

    num_groups: int
    quorum: int
    width: int
    cap: int
    admission: Admission = "cursor"
    may_fall_short: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """How a batch was closed, by the numbers of groups.

    num_taken: visits of this rollout's own, beyond the carried ones, that count as taken: the
               cursor stands after them.
    """

    admitted: list[int]
    carried: list[int]
    num_taken: int
    num_dropped: int
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Shards that sealed by the same decision commit the same digest of it."""
        return digest_value(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Ledger:
    """The visits of one rollout, their verdicts, and what is decided from them.

    num_carried: how many of the first visits were carried over from the rollout before; they are
    all entered before anything is decided.
    Memory: some twenty bytes a visit.
    """

    def __init__(self, rule: BatchRule, *, num_carried: int = 0) -> None:
        self.rule = rule
        self._num_carried = num_carried
        self._groups = array("q")
        self._verdicts = array("H")
        self._places: dict[int, int] = {}  # of groups that are still open
        self._arrived = array("q")  # places of kept groups, in the order of their verdicts
        self._reasons: dict[str, int] = {}  # each one's number
        self._num_dropped = 0
        self._front = self._kept_before_front = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_kept(self) -> int:
        return len(self._arrived)

    @property
    def num_open(self) -> int:
        return len(self._groups) - len(self._arrived) - self._num_dropped

    def is_open(self, group_index: int) -> bool:
        """Whether the group was entered and has no verdict."""
        return group_index in self._places

    def open_groups(self) -> list[int]:
        """Numbers of the groups without a verdict, in the order of the data."""
        return list(self._places)

    def wants_more(self) -> bool:
        """Whether one more visit should be entered, for the batch to fill."""
        alive = self.num_open + self.num_kept
        return len(self._groups) < self.rule.cap and alive < self.rule.width

    def enter(self, group_index: int) -> None:
        """A visit was taken; visits are entered in the order of the data."""
        self._places[group_index] = len(self._groups)
        self._groups.append(group_index)
        self._verdicts.append(_OPEN)

    def judge(self, group_index: int, *, keep: bool, reason: str = "") -> bool:
        """Give a group its verdict; False if it has one already, or was never entered."""
        place = self._places.pop(group_index, None)
        if place is None:
            return False
        if keep:
            self._verdicts[place] = _KEPT
            self._arrived.append(place)
            return True
        number = self._reasons.setdefault(reason, len(self._reasons))
        if number > _MOST_REASONS:
            raise DataError(
                f"groups were dropped for more than {_MOST_REASONS:,} reasons, {reason!r} the last",
                hint="a filter's reason names a kind of group, not the group: they are counted",
            )
        self._verdicts[place] = _DROPPED + number
        self._num_dropped += 1
        return True

    def decide(self, *, is_late: bool = False) -> Decision | None:
        """The decision, once there is enough for one; the same however often it is asked.

        is_late: the deadline has passed; one kept group is enough then (by arrival).
        Raises DataError when all visits that may be entered have their verdict, and too few or
        none were kept.
        """
        if self.rule.admission == "cursor":
            admitted = self._first_kept()
        else:
            quorum = min(self.rule.quorum, 1 if is_late else self.rule.quorum)
            enough = self.num_kept >= quorum
            admitted = list(self._arrived[: self.rule.num_groups]) if enough else None
        if admitted is None and self._is_exhausted():
            admitted = self._take_what_there_is()
        return None if admitted is None else self._close(sorted(admitted))

    def _first_kept(self) -> list[int] | None:
        wanted = self.rule.num_groups
        while self._front < len(self._groups) and self._kept_before_front < wanted:
            verdict = self._verdicts[self._front]
            if verdict == _OPEN:
                return None
            self._kept_before_front += verdict == _KEPT
            self._front += 1
        if self._kept_before_front < wanted:
            return None
        return [place for place in range(self._front) if self._verdicts[place] == _KEPT]

    def _is_exhausted(self) -> bool:
        return len(self._groups) >= self.rule.cap and not self.num_open

    def _take_what_there_is(self) -> list[int]:
        kept = list(self._arrived)
        if kept and self.rule.may_fall_short:
            return kept
        why = ", ".join(f"{name}: {num}" for name, num in self._count_reasons(len(self)).items())
        raise DataError(
            f"{len(self._groups)} groups gave {len(kept)} of the {self.rule.num_groups} that"
            f" rollout.rollout_batch_size asks for; dropped were {self._num_dropped} ({why})",
            hint="raise rollout.max_groups, choose harder or easier prompts, or set"
            " rollout.on_exhausted: train"
            if kept
            else "there is nothing to learn from these prompts; choose others, or another filter",
        )

    def _close(self, admitted: list[int]) -> Decision:
        groups, verdicts = self._groups, self._verdicts
        if self.rule.admission == "cursor":
            end = admitted[-1] + 1
            # Carried ones behind the last admitted one stay carried, whatever became of them.
            carried = list(range(end, self._num_carried))
        else:
            end = len(groups)
            taken = set(admitted)
            carried = [p for p in range(end) if p not in taken and verdicts[p] < _DROPPED]
        reasons = self._count_reasons(end)
        return Decision(
            admitted=[groups[place] for place in admitted],
            carried=[groups[place] for place in carried],
            num_taken=max(0, end - self._num_carried),
            num_dropped=sum(reasons.values()),
            reasons=reasons,
        )

    def _count_reasons(self, end: int) -> dict[str, int]:
        """How often each reason was given for one of the first `end` visits."""
        counts = Counter(v - _DROPPED for v in self._verdicts[:end] if v >= _DROPPED)
        return {
            reason: counts[number] for reason, number in self._reasons.items() if counts[number]
        }


def plan_rule(
    *,
    batch_size: int,
    admission: Admission,
    over_sampling: int | None = None,
    close_at: float = 1.0,
    max_groups: int | None = None,
    may_fall_short: bool = False,
) -> BatchRule:
    """The rule that these settings mean."""
    quorum = (
        batch_size if admission == "cursor" else math.ceil(Fraction(str(close_at)) * batch_size)
    )
    return BatchRule(
        num_groups=batch_size,
        quorum=quorum,
        width=max(batch_size, over_sampling or 0),
        cap=max_groups or 16 * batch_size,
        admission=admission,
        may_fall_short=may_fall_short,
    )
