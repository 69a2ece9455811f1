"""pass@k and maj@k of an evaluation, folded group by group.

pass@k is the chance that one of k samples is right, estimated without bias from n samples of which
c are right: 1 - C(n-c, k) / C(n, k) (Chen et al., arXiv 2107.03374, eq. 1), averaged over the
prompts. maj@k is the chance that the most frequent answer of the first k samples is right; answers
are the contents of the last \\boxed{}, else the whole response, and ties go to the answer that
came first.

A sample is right if its reward is at least `RIGHT`. k is at most each group's own n: a data set
with several n reports a k only if all of its groups have it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from slurm_rl.rollout.samples import Sample

RIGHT = 0.5


class PassRate:
    """An account of groups. ks: which k; none: the powers of two up to n."""

    def __init__(self, ks: Sequence[int] = ()) -> None:
        self._ks = sorted(set(ks))
        self._num_groups = 0
        self._counts: Counter[tuple[int, int]] = Counter()  # (samples, right ones) of a group
        self._majorities: Counter[int] = Counter()

    def add(self, group: Sequence[Sample]) -> None:
        """Count one group; every sample has its reward."""
        right = [(sample.reward or 0.0) >= RIGHT for sample in group]
        self._num_groups += 1
        self._counts[len(right), sum(right)] += 1
        answers = [read_answer(sample.response) for sample in group]
        for k in self._wanted(len(group)):
            self._majorities[k] += is_majority_right(answers[:k], right[:k])

    def _wanted(self, num_samples: int) -> list[int]:
        ks = self._ks or [2**i for i in range(num_samples.bit_length())]
        return [k for k in ks if k <= num_samples]

    def fold(self) -> dict[str, float]:
        """`pass@k` and `maj@k` for each k that every group has samples for."""
        if not self._num_groups:
            return {}
        fewest = min(num for num, _ in self._counts)
        found: dict[str, float] = {}
        for k in self._wanted(fewest):
            total = sum(estimate_pass(n, c, k) * num for (n, c), num in self._counts.items())
            found[f"pass@{k}"] = total / self._num_groups
            found[f"maj@{k}"] = self._majorities[k] / self._num_groups
        return found


def estimate_pass(num_samples: int, num_right: int, k: int) -> float:
    """The unbiased estimate of pass@k from `num_samples` of which `num_right` are right."""
    wrong = num_samples - num_right
    return 1.0 - math.comb(wrong, k) / math.comb(num_samples, k)


def is_majority_right(answers: Sequence[str], right: Sequence[bool]) -> bool:
    """Whether the most frequent of `answers` is right; of equally frequent ones the first."""
    counts = Counter(answers)
    best = max(counts, key=lambda answer: (counts[answer], -answers.index(answer)))
    return right[answers.index(best)]


def read_answer(response: str) -> str:
    """What the response gives as its answer."""
    _, mark, rest = response.rpartition("\\boxed{")
    if not mark:
        return response.strip()
    depth = 1
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:place].strip()
    return rest.strip()
