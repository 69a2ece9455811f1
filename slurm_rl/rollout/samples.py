"""The file format between rollout and train: `samples.safetensors` beside `samples.jsonl`.

Owns the record of one sample, the arrays of many, and how both lie on disk. Tensors hold what
training needs; the lines hold what a person wants to read. It knows nothing of engines,
rewards or torch.

    samples.safetensors                        samples.jsonl, one line a sample
      tokens            int32[T]                 group_index, index, prompt, response,
      prompt_lengths    int32[B]                 label, reward, status, weights_version,
      response_lengths  int32[B]                 seed, metadata
      rollout_logprobs  float32[R]
      loss_mask         uint8[R]
      rewards           float32[B]
      group_index       int64[B]
      sample_index      int64[B]
      weights_version   int32[B]
      truncated         uint8[B]

Legend: B samples, T prompt and response tokens of all samples, R response tokens of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from slurm_rl.errors import CorruptError
from slurm_rl.storage.fs import POSIX, Fs
from slurm_rl.types import canonical_json

TENSORS_NAME = "samples.safetensors"
LINES_NAME = "samples.jsonl"
#: What may have happened to a sample. Only `truncated` and `completed` carry a reward.
STATUSES = ("completed", "truncated", "aborted", "failed")

_DTYPES = {
    "tokens": np.int32,
    "prompt_lengths": np.int32,
    "response_lengths": np.int32,
    "rollout_logprobs": np.float32,
    "loss_mask": np.uint8,
    "rewards": np.float32,
    "group_index": np.int64,
    "sample_index": np.int64,
    "weights_version": np.int32,
    "truncated": np.uint8,
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer to one prompt. A reward function gets it with `reward` still None.

    group_index:      the prompt's visit, unique in a run: epoch × prompts + position.
    sample_index:     place in the group, from 0.
    rollout_logprobs: of the response's tokens, after temperature, before top-k and top-p.
    loss_mask:        1 where a response token is trained on.

    Example: `Sample(7, 0, (5, 6), (9, 2), (-0.1, -0.7), (1, 1), prompt="ab", response="c")`.
    """

    group_index: int
    sample_index: int
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    prompt: Any = ""
    response: str = ""
    label: Any = None
    reward: float | None = None
    status: str = "completed"
    weights_version: int = 0
    seed: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def index(self) -> int:
        return self.sample_index

    @property
    def tokens(self) -> list[int]:
        """Prompt and response tokens."""
        return [*self.prompt_tokens, *self.response_tokens]

    @property
    def response_length(self) -> int:
        return len(self.response_tokens)


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Many samples as arrays; the legend is the module's. Sorted by group, then sample."""

    tokens: NDArray[np.int32]
    prompt_lengths: NDArray[np.int32]
    response_lengths: NDArray[np.int32]
    rollout_logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.uint8]
    rewards: NDArray[np.float32]
    group_index: NDArray[np.int64]
    sample_index: NDArray[np.int64]
    weights_version: NDArray[np.int32]
    truncated: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.rewards)

    def sample_tokens(self, i: int) -> NDArray[np.int32]:
        """Prompt and response tokens of sample `i`."""
        ends = np.cumsum(self.prompt_lengths + self.response_lengths)
        return self.tokens[ends[i] - self.prompt_lengths[i] - self.response_lengths[i] : ends[i]]

    def response_slice(self, i: int) -> slice:
        """Where sample `i` lies in `rollout_logprobs` and `loss_mask`."""
        end = int(self.response_lengths[: i + 1].sum())
        return slice(end - int(self.response_lengths[i]), end)


def write_samples(root: Path, samples: Iterable[Sample], *, fs: Fs = POSIX) -> list[str]:
    """Write both files below `root`; returns their names. The caller fsyncs and digests.

    Bytes depend on the samples alone, not on their order here. A crash midway leaves files
    that nothing names yet.
    """
    ordered = sorted(samples, key=lambda s: (s.group_index, s.sample_index))
    fs.create(root / TENSORS_NAME, save(_arrays(pack_samples(ordered))))
    lines = [canonical_json(_line(sample)) + b"\n" for sample in ordered]
    fs.create(root / LINES_NAME, b"".join(lines))
    return [LINES_NAME, TENSORS_NAME]


def pack_samples(samples: Sequence[Sample]) -> SampleBatch:
    """Samples as arrays, in the order given. Every sample has its reward."""
    responses = [len(s.response_tokens) for s in samples]
    values: dict[str, list[Any]] = {
        "tokens": [token for s in samples for token in s.tokens],
        "prompt_lengths": [len(s.prompt_tokens) for s in samples],
        "response_lengths": responses,
        "rollout_logprobs": [value for s in samples for value in s.rollout_logprobs],
        "loss_mask": [value for s in samples for value in s.loss_mask],
        "rewards": [s.reward for s in samples],
        "group_index": [s.group_index for s in samples],
        "sample_index": [s.sample_index for s in samples],
        "weights_version": [s.weights_version for s in samples],
        "truncated": [s.status == "truncated" for s in samples],
    }
    assert len(values["rollout_logprobs"]) == len(values["loss_mask"]) == sum(responses)
    assert None not in values["rewards"]
    return SampleBatch(**{k: np.asarray(v, dtype=_DTYPES[k]) for k, v in values.items()})


def read_samples(paths: Iterable[str | Path]) -> SampleBatch:
    """One batch from the `samples.safetensors` of every shard, sorted by group and sample.

    Raises CorruptError naming the file if a tensor is missing, of another type, or does not
    fit the lengths.
    """
    batches = [_read_tensors(Path(path)) for path in paths]
    joined = SampleBatch(
        **{name: np.concatenate([getattr(b, name) for b in batches]) for name in _DTYPES}
    )
    return _take(joined, np.lexsort((joined.sample_index, joined.group_index)))


def _read_tensors(path: Path) -> SampleBatch:
    try:
        arrays = load(path.read_bytes())
    except SafetensorError as error:
        raise CorruptError(f"{path}: not a whole safetensors file ({error})") from error
    for name, dtype in _DTYPES.items():
        if name not in arrays or arrays[name].dtype != dtype:
            raise CorruptError(f"{path}: tensor {name} is missing or not {np.dtype(dtype)}")
    batch = SampleBatch(**{name: arrays[name] for name in _DTYPES})
    num_response_tokens = int(batch.response_lengths.sum())
    consistent = (
        len({len(arrays[name]) for name in _PER_SAMPLE}) == 1
        and len(batch.tokens) == int(batch.prompt_lengths.sum()) + num_response_tokens
        and len(batch.rollout_logprobs) == len(batch.loss_mask) == num_response_tokens
    )
    if not consistent:
        raise CorruptError(f"{path}: the tensors' lengths do not fit each other")
    return batch


_PER_TOKEN = {"tokens", "rollout_logprobs", "loss_mask"}
_PER_SAMPLE = [name for name in _DTYPES if name not in _PER_TOKEN]


def _take(batch: SampleBatch, order: NDArray[np.intp]) -> SampleBatch:
    lengths = batch.prompt_lengths + batch.response_lengths
    tokens = np.split(batch.tokens, np.cumsum(lengths)[:-1])
    bounds = np.cumsum(batch.response_lengths)[:-1]
    logprobs = np.split(batch.rollout_logprobs, bounds)
    masks = np.split(batch.loss_mask, bounds)
    per_sample = {name: getattr(batch, name)[order] for name in _PER_SAMPLE}
    return SampleBatch(
        tokens=np.concatenate([tokens[i] for i in order]),
        rollout_logprobs=np.concatenate([logprobs[i] for i in order]),
        loss_mask=np.concatenate([masks[i] for i in order]),
        **per_sample,
    )


def _arrays(batch: SampleBatch) -> dict[str, NDArray[Any]]:
    return {f.name: getattr(batch, f.name) for f in fields(batch)}


def _line(sample: Sample) -> dict[str, Any]:
    names = "group_index prompt response label reward status weights_version seed metadata".split()
    return {"index": sample.sample_index} | {name: getattr(sample, name) for name in names}
