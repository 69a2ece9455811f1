"""The file format between rollout and train: `samples.safetensors` beside `samples.jsonl`.

Owns the record of one sample, the arrays of many, and how both lie on disk. Tensors hold what
training needs; the lines hold what a person wants to read. It knows nothing of engines,
rewards or torch.

    samples.safetensors                        samples.jsonl, one line a sample
      tokens            int32[T]                 group_index, index, rollout_index, data_set,
      prompt_lengths    int32[B]                 prompt, response, label, reward, rewards, status,
      response_lengths  int32[B]                 weights_version, seed, metadata
      rollout_logprobs  float32[R]
      loss_mask         uint8[R]
      token_versions    int32[R]
      rewards           float32[B]             NaN: not graded yet
      group_index       int64[B]
      sample_index      int64[B]
      rollout_index     int64[B]
      weights_version   int32[B]
      truncated         uint8[B]
      routed_experts    uint8[T, L, K]         only where the engine's routing is replayed

Legend: B samples, T prompt and response tokens of all samples, R response tokens of all;
L and K as in routing.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from slurm_rl.errors import CorruptError, EngineError
from slurm_rl.rollout.fast_json import dumps
from slurm_rl.rollout.routing import join_routed, read_routed
from slurm_rl.storage.fs import POSIX, Fs

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
    "token_versions": np.int32,
    "rewards": np.float32,
    "group_index": np.int64,
    "sample_index": np.int64,
    "rollout_index": np.int64,
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
    reward:           what is trained on; None until it is graded. `rewards` holds its parts.
    weights_version:  that finished it. token_versions: of each response token; () where all are
                      of `weights_version`.
    rollout_index:    samples of one group that share it are parts of one conversation, and count
                      as one rollout; -1: the sample is a rollout of its own.
    status:           see STATUSES.

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
    rewards: dict[str, float] = field(default_factory=dict)
    token_versions: tuple[int, ...] = ()
    rollout_index: int = -1
    data_set: str = "data"

    def graded(self, reward: float | None, rewards: dict[str, float]) -> Sample:
        """The same sample with its reward; a hundred thousand of these are made in a second."""
        return Sample(
            self.group_index,
            self.sample_index,
            self.prompt_tokens,
            self.response_tokens,
            self.rollout_logprobs,
            self.loss_mask,
            self.prompt,
            self.response,
            self.label,
            reward,
            self.status,
            self.weights_version,
            self.seed,
            self.metadata,
            rewards,
            self.token_versions,
            self.rollout_index,
            self.data_set,
        )

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
class RoutedSample(Sample):
    """A sample whose routing is replayed; a class of its own, so that others' bytes stay as they
    are. routed_experts: the text of routing.py; "" where no token is trained on."""

    routed_experts: str = ""

    def graded(self, reward: float | None, rewards: dict[str, float]) -> RoutedSample:
        return replace(self, reward=reward, rewards=rewards)


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Many samples as arrays; the legend is the module's. Sorted by group, then sample.

    routed_experts: of all samples or of none.
    """

    tokens: NDArray[np.int32]
    prompt_lengths: NDArray[np.int32]
    response_lengths: NDArray[np.int32]
    rollout_logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.uint8]
    token_versions: NDArray[np.int32]
    rewards: NDArray[np.float32]
    group_index: NDArray[np.int64]
    sample_index: NDArray[np.int64]
    rollout_index: NDArray[np.int64]
    weights_version: NDArray[np.int32]
    truncated: NDArray[np.uint8]
    routed_experts: NDArray[np.uint8] | None = None

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
    ordered = sorted(samples, key=place_of)
    return write_rendered(root, ordered, [render_sample(sample) for sample in ordered], fs=fs)


def write_rendered(
    root: Path, samples: Sequence[Sample], lines: Iterable[bytes], *, fs: Fs = POSIX
) -> list[str]:
    """As `write_samples`, of samples in their order (`place_of`) whose lines are there already."""
    fs.create(root / TENSORS_NAME, save(_arrays(pack_samples(samples))))
    fs.create(root / LINES_NAME, b"".join([line + b"\n" for line in lines]))
    return [LINES_NAME, TENSORS_NAME]


def place_of(sample: Sample) -> tuple[int, int]:
    """What samples are sorted by."""
    return sample.group_index, sample.sample_index


def render_sample(sample: Sample) -> bytes:
    """The line of a sample in `samples.jsonl`, without its end: all but the tokens."""
    return dumps(
        {
            "index": sample.sample_index,
            "group_index": sample.group_index,
            "rollout_index": sample.rollout_index,
            "data_set": sample.data_set,
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "reward": sample.reward,
            "rewards": sample.rewards,
            "status": sample.status,
            "weights_version": sample.weights_version,
            "seed": sample.seed,
            "metadata": sample.metadata,
        }
    )


def pack_samples(samples: Sequence[Sample]) -> SampleBatch:
    """Samples as arrays, in the order given; a reward of None is NaN."""
    lengths = np.fromiter((len(s.response_tokens) for s in samples), np.int32, len(samples))
    tokens = chain.from_iterable(chain(s.prompt_tokens, s.response_tokens) for s in samples)
    versions = (
        s.token_versions or repeat(s.weights_version, len(s.response_tokens)) for s in samples
    )
    values: dict[str, Iterable[Any]] = {
        "tokens": tokens,
        "prompt_lengths": [len(s.prompt_tokens) for s in samples],
        "response_lengths": lengths,
        "rollout_logprobs": chain.from_iterable(s.rollout_logprobs for s in samples),
        "loss_mask": chain.from_iterable(s.loss_mask for s in samples),
        "token_versions": chain.from_iterable(versions),
        "rewards": [math.nan if s.reward is None else s.reward for s in samples],
        "group_index": [s.group_index for s in samples],
        "sample_index": [s.sample_index for s in samples],
        "rollout_index": [
            s.sample_index if s.rollout_index < 0 else s.rollout_index for s in samples
        ],
        "weights_version": [s.weights_version for s in samples],
        "truncated": [s.status == "truncated" for s in samples],
    }
    arrays = {name: np.fromiter(value, _DTYPES[name]) for name, value in values.items()}
    num_tokens = int(lengths.sum())
    for name in ("rollout_logprobs", "loss_mask", "token_versions"):
        assert len(arrays[name]) == num_tokens, name
    return SampleBatch(**arrays, routed_experts=_pack_routed(samples))


def _pack_routed(samples: Sequence[Sample]) -> NDArray[np.uint8] | None:
    texts = [s.routed_experts if isinstance(s, RoutedSample) else "" for s in samples]
    if not any(texts):
        return None
    parts = [
        (read_routed(text) if text else None, len(s.tokens), any(s.loss_mask))
        for s, text in zip(samples, texts, strict=True)
    ]
    try:
        return join_routed(parts)
    except ValueError as error:
        raise EngineError(f"the samples' routed experts do not fit: {error}") from error


def write_tensors(root: Path, batch: SampleBatch, *, fs: Fs = POSIX) -> list[str]:
    """Write the arrays alone below `root`, in the order that they have; the names of the files."""
    fs.create(root / TENSORS_NAME, save(_arrays(batch)))
    return [TENSORS_NAME]


def as_version(batch: SampleBatch, version: int) -> SampleBatch:
    """The samples as if `version` had finished them all; earlier tokens stay as much earlier."""
    shift = np.repeat(version - batch.weights_version, batch.response_lengths)
    return replace(
        batch,
        weights_version=np.full_like(batch.weights_version, version),
        token_versions=np.maximum(batch.token_versions + shift, 0).astype(np.int32),
    )


def read_samples(paths: Iterable[str | Path], *, with_routing: bool = True) -> SampleBatch:
    """One batch from the `samples.safetensors` of every shard, sorted by group and sample.

    with_routing: whether `routed_experts` is wanted, which may be larger than all else.

    Raises CorruptError naming the file if a tensor is missing, of another type, or does not
    fit the lengths.
    """
    joined = join_samples([_read_tensors(Path(path), with_routing) for path in paths])
    return take_samples(joined, training_order(joined))


def join_samples(batches: Sequence[SampleBatch]) -> SampleBatch:
    """All samples of `batches`, in the order given. CorruptError if routing is of some only."""
    return SampleBatch(
        **{
            name: np.concatenate([np.zeros(0, dtype), *(getattr(b, name) for b in batches)])
            for name, dtype in _DTYPES.items()
        },
        routed_experts=_join_routed(batches),
    )


def _join_routed(batches: Sequence[SampleBatch]) -> NDArray[np.uint8] | None:
    parts = [(b.routed_experts, len(b.tokens), bool(b.loss_mask.any())) for b in batches]
    try:
        return join_routed(parts)
    except ValueError as error:
        raise CorruptError(f"the shards' {_ROUTED} do not fit: {error}") from error


def training_order(batch: SampleBatch) -> NDArray[np.intp]:
    """Numbers of the samples by group, then by their place in it."""
    return np.lexsort((batch.sample_index, batch.group_index))


def take_samples(batch: SampleBatch, order: NDArray[np.intp]) -> SampleBatch:
    """Samples number `order[0]`, `order[1]`, … of `batch`: some of them, or in another order."""
    taken = {name: getattr(batch, name)[order] for name in _PER_SAMPLE}
    whole = batch.prompt_lengths + batch.response_lengths
    places = _gather(whole, order)
    taken["tokens"] = batch.tokens[places]
    if batch.routed_experts is not None:
        taken["routed_experts"] = batch.routed_experts[places]
    responses = _gather(batch.response_lengths, order)
    for name in _PER_RESPONSE_TOKEN:
        taken[name] = getattr(batch, name)[responses]
    return SampleBatch(**taken)


def _read_tensors(path: Path, with_routing: bool) -> SampleBatch:
    try:
        arrays = load(path.read_bytes())
    except SafetensorError as error:
        raise CorruptError(f"{path}: not a whole safetensors file ({error})") from error
    for name, dtype in _DTYPES.items():
        if name not in arrays or arrays[name].dtype != dtype:
            raise CorruptError(f"{path}: tensor {name} is missing or not {np.dtype(dtype)}")
    routed = arrays.pop(_ROUTED, None) if with_routing else None
    if routed is not None and (
        routed.dtype != np.uint8 or routed.ndim != 3 or 0 in routed.shape[1:]
    ):
        raise CorruptError(f"{path}: tensor {_ROUTED} is not uint8[T, L, K]")
    batch = SampleBatch(**{name: arrays[name] for name in _DTYPES}, routed_experts=routed)
    num_response_tokens = int(batch.response_lengths.sum())
    per_token = {len(arrays[name]) for name in _PER_RESPONSE_TOKEN}
    consistent = (
        len({len(arrays[name]) for name in _PER_SAMPLE}) == 1
        and len(batch.tokens) == int(batch.prompt_lengths.sum()) + num_response_tokens
        and per_token == {num_response_tokens}
        and (routed is None or len(routed) == len(batch.tokens))
    )
    if not consistent:
        raise CorruptError(f"{path}: the tensors' lengths do not fit each other")
    return batch


_ROUTED = "routed_experts"
_PER_RESPONSE_TOKEN = ("rollout_logprobs", "loss_mask", "token_versions")
_PER_SAMPLE = [name for name in _DTYPES if name not in ("tokens", *_PER_RESPONSE_TOKEN)]


def _gather(lengths: NDArray[np.int32], order: NDArray[np.intp]) -> NDArray[np.int64]:
    """Where the elements of items of these lengths, laid end to end, lie in another order."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    chosen = lengths[order]
    ends = np.cumsum(chosen, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(
        starts[order] - ends + chosen, chosen
    )


def _arrays(batch: SampleBatch) -> dict[str, NDArray[Any]]:
    arrays = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return {name: array for name, array in arrays.items() if array is not None}
