"""The file format between score and train: `scores.safetensors` beside `scores.jsonl`.

Owns the rewards that a score stage gave to the samples of a rollout, how they lie on disk, and how
they come to their samples. Each sample of the rollout has exactly one score; one whose reward is
NaN was given up by the grader, and its group is not trained on.

    scores.safetensors         scores.jsonl, one line a sample
      group_index   int64[B]     group_index, index, reward (null: given up), rewards (its parts)
      sample_index  int64[B]
      rewards       float32[B]

It knows nothing of graders or torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from slurm_rl.errors import CorruptError
from slurm_rl.rollout.samples import SampleBatch, take_samples
from slurm_rl.storage.fs import POSIX, Fs
from slurm_rl.types import canonical_json

SCORES_NAME = "scores.safetensors"
SCORE_LINES_NAME = "scores.jsonl"
_DTYPES = {"group_index": np.int64, "sample_index": np.int64, "rewards": np.float32}


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one sample; None: it was given up. `rewards` holds its parts.

    Example: `Score(7, 0, 1.0, {"math": 1.0})`.
    """

    group_index: int
    sample_index: int
    reward: float | None
    rewards: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """Many scores as arrays, sorted by group, then sample; the legend is the module's."""

    group_index: NDArray[np.int64]
    sample_index: NDArray[np.int64]
    rewards: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.rewards)


def write_scores(root: Path, scores: Iterable[Score], *, fs: Fs = POSIX) -> list[str]:
    """Write both files below `root`; returns their names. The caller fsyncs and digests.

    Bytes depend on the scores alone, not on their order here. A crash midway leaves files that
    nothing names yet.
    """
    ordered = sorted(scores, key=lambda score: (score.group_index, score.sample_index))
    arrays = {
        "group_index": np.fromiter((s.group_index for s in ordered), np.int64),
        "sample_index": np.fromiter((s.sample_index for s in ordered), np.int64),
        "rewards": np.fromiter(
            (math.nan if s.reward is None else s.reward for s in ordered), np.float32
        ),
    }
    fs.create(root / SCORES_NAME, save(arrays))
    fs.create(root / SCORE_LINES_NAME, b"".join(_line(score) for score in ordered))
    return [SCORE_LINES_NAME, SCORES_NAME]


def read_scores(paths: Iterable[str | Path]) -> ScoreBatch:
    """One batch from the `scores.safetensors` of every shard, sorted by group and sample.

    Raises CorruptError naming the file if a tensor is missing, of another type or length.
    """
    batches = [_read_tensors(Path(path)) for path in paths]
    joined = {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(b, name) for b in batches)])
        for name, dtype in _DTYPES.items()
    }
    order = np.lexsort((joined["sample_index"], joined["group_index"]))
    return ScoreBatch(**{name: values[order] for name, values in joined.items()})


def apply_scores(batch: SampleBatch, scores: ScoreBatch) -> SampleBatch:
    """The samples with the rewards that they were given, NaN where they were given up.

    Raises CorruptError, naming the first sample, unless each has exactly one score and each score
    a sample.
    """
    own = list(zip(batch.group_index.tolist(), batch.sample_index.tolist(), strict=True))
    theirs = list(zip(scores.group_index.tolist(), scores.sample_index.tolist(), strict=True))
    rewards = dict(zip(theirs, scores.rewards.tolist(), strict=True))
    if len(rewards) != len(theirs):
        twice = next(a for a, b in itertools.pairwise(theirs) if a == b)
        raise CorruptError(f"sample {twice[1]} of group {twice[0]} has two scores")
    for what, some, others in (("sample", own, rewards), ("score", theirs, set(own))):
        alone = next((pair for pair in some if pair not in others), None)
        if alone is not None:
            missing = "no score" if what == "sample" else "a score, but is not in the rollout"
            raise CorruptError(f"sample {alone[1]} of group {alone[0]} has {missing}")
    values = np.fromiter((rewards[pair] for pair in own), np.float32, len(own))
    return dataclasses.replace(batch, rewards=values)


def drop_ungraded(batch: SampleBatch) -> tuple[SampleBatch, int]:
    """The samples of those groups in which every sample has a reward; how many groups went."""
    ungraded = np.unique(batch.group_index[np.isnan(batch.rewards)])
    kept = np.flatnonzero(~np.isin(batch.group_index, ungraded))
    return take_samples(batch, kept), len(ungraded)


def _line(score: Score) -> bytes:
    reward = None if score.reward is None or math.isnan(score.reward) else score.reward
    value: dict[str, Any] = {
        "group_index": score.group_index,
        "index": score.sample_index,
        "reward": reward,
        "rewards": score.rewards,
    }
    return canonical_json(value) + b"\n"


def _read_tensors(path: Path) -> ScoreBatch:
    try:
        arrays = load(path.read_bytes())
    except SafetensorError as error:
        raise CorruptError(f"{path}: not a whole safetensors file ({error})") from error
    for name, dtype in _DTYPES.items():
        if name not in arrays or arrays[name].dtype != dtype or arrays[name].ndim != 1:
            raise CorruptError(f"{path}: tensor {name} is missing or not {np.dtype(dtype)}[B]")
    if len({len(arrays[name]) for name in _DTYPES}) != 1:
        raise CorruptError(f"{path}: the tensors' lengths do not fit each other")
    return ScoreBatch(**{name: arrays[name] for name in _DTYPES})
