"""A committed batch for reading: its arrays and its lines, joined sample by sample.

Owns the way back from files to `Sample`s, and the form in which a sample leaves the run (an entry,
which `dumps.py` reads again). A sample is made when it is asked for: a batch may be too large to be
held as objects. It knows nothing of engines or torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_rl.errors import CorruptError
from slurm_rl.rollout.samples import (
    Sample,
    SampleBatch,
    join_samples,
    read_samples,
    take_samples,
    training_order,
)

#: Fields of an entry that are of any shape, and JSON text in a parquet file.
PARQUET_TEXTS = ("prompt", "label", "rewards", "metadata")


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A group's rewards: how many, how many of them graded, mean and (population) deviation."""

    num: int
    num_graded: int
    mean: float
    std: float


class Listing:
    """The samples of a batch by number, sorted by group, then by their place in it."""

    def __init__(self, batch: SampleBatch, lines: list[tuple[Path, bytes]]) -> None:
        """Made by `open_listing`; `lines` are the samples' own, with their files."""
        self.batch = batch
        self._lines = lines
        lengths = batch.prompt_lengths.astype(np.int64) + batch.response_lengths
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        self._response_ends = np.cumsum(batch.response_lengths, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.batch)

    def line(self, i: int) -> dict[str, Any]:
        """What is written of sample `i` for people. Raises CorruptError."""
        path, data = self._lines[i]
        place = (int(self.batch.group_index[i]), int(self.batch.sample_index[i]))
        try:
            raw = json.loads(data)
            found = (raw["group_index"], raw["index"])
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptError(f"{path}: a line is no sample's ({error})") from error
        if found != place:
            raise CorruptError(f"{path}: the line of sample {found} stands where {place} is")
        return dict(raw)

    def sample(self, i: int) -> Sample:
        """Sample `i`; its reward is the arrays' (a score stage may have given it)."""
        batch, raw = self.batch, self.line(i)
        split = self._starts[i] + int(batch.prompt_lengths[i])
        end = self._response_ends[i]
        own = slice(end - int(batch.response_lengths[i]), end)
        reward = float(batch.rewards[i])
        written = raw.get("reward")
        if written is not None and np.float32(written) == batch.rewards[i]:
            reward = float(written)  # as it was before it became a float32
        return Sample(
            group_index=int(batch.group_index[i]),
            sample_index=int(batch.sample_index[i]),
            prompt_tokens=tuple(batch.tokens[self._starts[i] : split].tolist()),
            response_tokens=tuple(batch.tokens[split : self._ends[i]].tolist()),
            rollout_logprobs=tuple(batch.rollout_logprobs[own].tolist()),
            loss_mask=tuple(batch.loss_mask[own].tolist()),
            token_versions=tuple(batch.token_versions[own].tolist()),
            rollout_index=int(batch.rollout_index[i]),
            weights_version=int(batch.weights_version[i]),
            reward=None if math.isnan(reward) else reward,
            **{name: raw[name] for name in _TEXTS if name in raw},
        )

    def summarize(self, group: int) -> GroupSummary:
        """The rewards of a group, whichever of its samples are looked at."""
        rewards = self.batch.rewards[self.batch.group_index == group].astype(np.float64)
        graded = rewards[~np.isnan(rewards)]
        mean, std = (graded.mean(), graded.std()) if len(graded) else (math.nan, math.nan)
        return GroupSummary(len(rewards), len(graded), float(mean), float(std))

    def order(self, key: str, *, reverse: bool = False) -> NDArray[np.intp]:
        """Numbers of the samples by `group` (their order here), `reward` or `length`, lowest first
        unless reversed; of equal ones by group. Those without a reward come last."""
        columns: dict[str, NDArray[Any]] = {
            "group": self.batch.group_index,
            "reward": self.batch.rewards,
            "length": self.batch.response_lengths,
        }
        values = columns[key]
        return np.argsort(-values if reverse else values, kind="stable")

    def with_batch(self, batch: SampleBatch) -> Listing:
        """The same samples with other arrays: rewards that came later."""
        return Listing(batch, self._lines)


_TEXTS = ("data_set", "prompt", "response", "label", "rewards", "status", "seed", "metadata")


def open_listing(pairs: Iterable[tuple[Path, Path]]) -> Listing:
    """The batch that lies in these pairs of `samples.safetensors` and `samples.jsonl`.

    Raises CorruptError where the two do not have the same samples.
    """
    batches, lines = [], []
    for tensors, texts in pairs:
        batch = read_samples([tensors])
        own = texts.read_bytes().splitlines()
        if len(own) != len(batch):
            raise CorruptError(f"{texts}: {len(own)} lines, but {tensors.name} has {len(batch)}")
        batches.append(batch)
        lines += [(texts, line) for line in own]
    joined = join_samples(batches)
    order = training_order(joined)
    return Listing(take_samples(joined, order), [lines[i] for i in order])


def as_entry(sample: Sample) -> dict[str, Any]:
    """The sample under slime's field names, as `dumps.read_dump` takes it; plain JSON."""
    versions = sample.token_versions or (sample.weights_version,) * sample.response_length
    return {
        "group_index": sample.group_index,
        "index": sample.sample_index,
        "rollout_index": sample.rollout_index,
        "data_set": sample.data_set,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        "rewards": sample.rewards,
        "status": sample.status,
        "tokens": sample.tokens,
        "response_length": sample.response_length,
        "loss_mask": list(sample.loss_mask),
        "rollout_log_probs": list(sample.rollout_logprobs),
        "token_versions": list(versions),
        "weight_versions": [str(v) for v in sorted({*versions, sample.weights_version})],
        "seed": sample.seed,
        "metadata": sample.metadata,
        "remove_sample": False,
    }


def spans(values: Iterable[int]) -> list[tuple[int, int, int]]:
    """Runs of equal values as (value, first, one past the last): 3, 3, 4: (3, 0, 2), (4, 2, 3)."""
    found: list[tuple[int, int, int]] = []
    for place, value in enumerate(values):
        if found and found[-1][0] == value:
            found[-1] = (value, found[-1][1], place + 1)
        else:
            found.append((value, place, place + 1))
    return found
