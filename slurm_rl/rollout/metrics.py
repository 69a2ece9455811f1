"""Numbers for people about a rollout's samples, under the field's names, folded group by group.

    rollout/raw_reward         mean reward; rollout/reward/<part> for each part of it, and
                               rollout/raw_reward/<data set> where there are several
    rollout/response_len       mean tokens of a response; response_len_p50, _p90, _p99, _max
    rollout/truncated_ratio    share of samples that met their limit
    rollout/zero_std           share of groups whose rewards are all the same: they teach nothing
    rollout/repetition_frac    share of samples that repeat themselves: fewer than half of their
                               16-token windows are different (of samples of 64 tokens and more)
    rollout/log_probs          mean log-prob of a token, as the engine reported it
    rollout/off_policy_frac    share of tokens that earlier weights made
    rollout/ungraded           share of samples that wait for a service

Memory: four bytes a sample.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from slurm_rl.rollout.samples import Sample

_WINDOW = 16
_SHORTEST = 64
_PERCENTILES = (50, 90, 99)


class RolloutMetrics:
    """An account of groups; `fold` gives the numbers."""

    def __init__(self) -> None:
        self._lengths = array("i")
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._parts: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._num_groups = self._num_graded_groups = 0

    @property
    def num_groups(self) -> int:
        return self._num_groups

    @property
    def num_samples(self) -> int:
        return len(self._lengths)

    def add(self, group: Sequence[Sample]) -> None:
        """Count one group."""
        self._num_groups += 1
        rewards = [sample.reward for sample in group]
        if None not in rewards:
            self._num_graded_groups += 1
            self._sums["zero_std"] += len(set(rewards)) == 1
        for sample in group:
            self._add_sample(sample)

    def _add_sample(self, sample: Sample) -> None:
        sums = self._sums
        self._lengths.append(sample.response_length)
        sums["truncated"] += sample.status == "truncated"
        sums["log_probs"] += sum(sample.rollout_logprobs)
        if sample.response_length >= _SHORTEST:
            sums["repeats"] += repeats_itself(sample.response_tokens)
        if sample.token_versions:
            sums["off_policy"] += sum(v != sample.weights_version for v in sample.token_versions)
        if sample.reward is None:
            sums["ungraded"] += 1
            return
        self._add_part(f"raw_reward/{sample.data_set}", sample.reward)
        for name, value in sample.rewards.items():
            self._add_part(f"reward/{name}", value)

    def _add_part(self, name: str, value: float) -> None:
        part = self._parts[name]
        part[0] += value
        part[1] += 1

    def fold(self) -> dict[str, float]:
        """The numbers of all that was counted; {} if there was nothing."""
        num, sums = len(self._lengths), self._sums
        if not num:
            return {}
        lengths = np.array(self._lengths)
        num_tokens = max(int(lengths.sum()), 1)
        by_set = {n: total for n, (total, _) in self._parts.items() if n.startswith("raw_reward/")}
        graded = num - sums["ungraded"]
        found = {
            "response_len": lengths.mean(),
            "response_len_max": lengths.max(),
            "truncated_ratio": sums["truncated"] / num,
            "repetition_frac": sums["repeats"] / num,
            "log_probs": sums["log_probs"] / num_tokens,
            "off_policy_frac": sums["off_policy"] / num_tokens,
            "ungraded": sums["ungraded"] / num,
        }
        for percent, value in zip(_PERCENTILES, np.percentile(lengths, _PERCENTILES), strict=True):
            found[f"response_len_p{percent}"] = value
        if graded:
            found["raw_reward"] = sum(by_set.values()) / graded
        if self._num_graded_groups:
            found["zero_std"] = sums["zero_std"] / self._num_graded_groups
        for name, (total, count) in self._parts.items():
            if name not in by_set or len(by_set) > 1:
                found[name] = total / count
        return {f"rollout/{name}": float(value) for name, value in sorted(found.items())}


def repeats_itself(tokens: Sequence[int]) -> bool:
    """Whether fewer than half of the windows of 16 tokens are different."""
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, np.uint64), _WINDOW)
    weights = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, _WINDOW + 1, dtype=np.uint64)
    hashes = ((windows + np.uint64(1)) * weights).sum(axis=1, dtype=np.uint64)
    return len(np.unique(hashes)) * 2 < len(hashes)
