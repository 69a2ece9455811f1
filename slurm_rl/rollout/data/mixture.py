"""From which data set of a mixture the next visit comes.

The rule needs the number of visits so far, in all and of each data set, and nothing else. It keeps
every data set's share within one visit of its weight at all times: the k-th visit of a data set of
share s may come from visit (k - 1) / s on and must have come by k / s, and among those that may
come, the one that must come first does (Baruah et al., "Proportionate progress", Algorithmica 15,
1996: earliest deadline first keeps all such windows when one visit is made at a time).

The numbers are exact: a share is the fraction that the user wrote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def to_shares(weights: Sequence[float]) -> list[Fraction]:
    """Weights as exact shares that sum to 1: 0.1 is a tenth.

    >>> to_shares([0.1, 0.3])
    [Fraction(1, 4), Fraction(3, 4)]
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


class Schedule:
    """Picks data sets by their shares."""

    def __init__(self, shares: Sequence[Fraction]) -> None:
        #: Shares over one denominator: whole numbers are exact and quick.
        self._total = math.lcm(*(share.denominator for share in shares))
        self._parts = [int(share * self._total) for share in shares]

    def pick(self, counts: Sequence[int]) -> int:
        """The index of the data set that the next visit comes from.

        counts: visits of each data set so far, as this rule picked them.
        """
        number = sum(counts) + 1
        best, best_deadline = -1, 0
        for index, (part, count) in enumerate(zip(self._parts, counts, strict=True)):
            if count * self._total < part * number:
                deadline = -(-(count + 1) * self._total // part)
                if best < 0 or deadline < best_deadline:
                    best, best_deadline = index, deadline
        assert best >= 0, counts  # the shares sum to 1
        return best
