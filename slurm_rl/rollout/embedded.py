"""An engine in this process: transformers' forward with a key-value cache, on the CPU.

For machines without a GPU, and where bytes must not change: a group's tokens and log-probs
are a function of the weights, the prompt and the seeds alone. Matrix products on a CPU differ
in the last bits between batch sizes and thread counts, so a group is always one batch of its
own size that runs until its last sample ends, on a pinned number of threads. Draws are
counter-based (seed, position): no generator has a state, and torch's is never touched.

Legend: N samples of the group, P prompt tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from slurm_rl.errors import EngineError, ModelError
from slurm_rl.rollout.engine import Completion, Group, Request, Sampling, Weights

log = logging.getLogger(__name__)


class EmbeddedEngine:
    """See the module. One instance may serve any number of weights in turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, num_threads: int = 1) -> None:
        self._tokenizer = tokenizer
        self._num_threads = num_threads
        self._model: Any = None
        self._cache_key = "cache"
        self._label = ""
        self._end_ids: frozenset[int] = frozenset()

    def start(self, weights: Weights) -> None:
        """Load `weights`; ModelError naming the directory if transformers cannot."""
        with self._pinned():
            model = load_model(weights.path)
        self._end_ids = read_end_ids(weights.path, self._tokenizer)
        # transformers 5.2x renamed `past_key_values`; the old name warns there.
        named = inspect.signature(model.forward).parameters
        self._cache_key = "cache" if "cache" in named else "past_key_values"
        self._model, self._label = model, weights.label

    def load_weights(self, weights: Weights) -> None:
        """As `start`; the old weights stay if the new ones cannot be loaded."""
        self.start(weights)

    def generate(self, requests: Iterable[Request], sampling: Sampling) -> Iterator[Group]:
        """Groups in the order of `requests`, each finished before the next begins."""
        for request in requests:
            if self._model is None:
                raise EngineError("the embedded engine has no weights")
            with self._pinned(), torch.inference_mode():
                completions = self._generate_group(request, sampling)
            yield request, completions

    def stop(self) -> None:
        self._model = None

    def _generate_group(self, request: Request, sampling: Sampling) -> list[Completion]:
        rows = [_Row(seed, self._tokenizer, sampling, self._end_ids) for seed in request.seeds]
        cache = DynamicCache(config=self._model.config)
        options = {self._cache_key: cache, "use_cache": True, "logits_to_keep": 1}
        output = self._model(torch.tensor([request.prompt_tokens]), **options)
        cache.batch_repeat_interleave(len(rows))
        logits_NV = output.logits[:, -1].expand(len(rows), -1)
        while True:
            tokens_N = draw_tokens(logits_NV, rows=rows, sampling=sampling)
            if all(row.finish for row in rows):
                break
            # A finished sample stays in the batch: its size must not change.
            output = self._model(tokens_N[:, None], **options)
            logits_NV = output.logits[:, -1]
        return [row.completion(self._label) for row in rows]

    @contextmanager
    def _pinned(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class _Row:
    """One sample while it grows."""

    def __init__(
        self,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        end_ids: frozenset[int],
    ) -> None:
        self.seed = seed
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish: Literal["stop", "length"] | None = None
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._end_ids = end_ids

    def uniform(self) -> float:
        """The draw in [0, 1) for the next token: a function of (seed, position)."""
        key = f"{self.seed}/{len(self.tokens)}".encode()
        return (xxhash.xxh3_64_intdigest(key) >> 11) / float(1 << 53)

    def append(self, token: int, logprob: float) -> None:
        if self.finish:
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self._end_ids or token in self._sampling.stop_token_ids or self._has_stop():
            self.finish = "stop"
        elif len(self.tokens) >= self._sampling.max_new_tokens:
            self.finish = "length"

    def _has_stop(self) -> bool:
        if not self._sampling.stop:
            return False
        # A token has at least one character, or is part of one: the tail is long enough.
        length = 4 * max(len(text) for text in self._sampling.stop) + 4
        tail = self._tokenizer.decode(self.tokens[-length:])
        return any(text in tail for text in self._sampling.stop)

    def completion(self, label: str) -> Completion:
        assert self.finish is not None
        return Completion(tuple(self.tokens), tuple(self.logprobs), self.finish, label)


def draw_tokens(logits_NV: Tensor, *, rows: Sequence[_Row], sampling: Sampling) -> Tensor:
    """Append a token to each unfinished row; returns int64[N] to feed next.

    Inverse-CDF sampling in float64, one uniform a token. The log-prob is the untruncated
    distribution's, after temperature, as SGLang reports it; float32.
    """
    logprobs_NV = torch.log_softmax(logits_NV.float() / sampling.temperature, dim=-1)
    probs_NV = truncate(logprobs_NV.double().exp().numpy(), sampling)
    cumulative_NV = np.cumsum(probs_NV, axis=-1)
    uniforms_N = np.array([row.uniform() for row in rows])
    targets_N = uniforms_N * cumulative_NV[:, -1]
    # First token whose cumulative mass exceeds the target: never one of probability zero.
    tokens_N = (cumulative_NV <= targets_N[:, None]).sum(axis=-1)
    for i, row in enumerate(rows):
        row.append(int(tokens_N[i]), float(logprobs_NV[i, int(tokens_N[i])]))
    return torch.from_numpy(tokens_N)


def truncate(probs_NV: np.ndarray[Any, Any], sampling: Sampling) -> np.ndarray[Any, Any]:
    """`probs_NV` with zero where top-k or top-p drops a token; not renormalised.

    Ties break by token id (a stable sort), so that the choice is reproducible. top-p keeps
    the smallest set whose mass, within what top-k kept, reaches `top_p`.
    """
    if sampling.top_k <= 0 and sampling.top_p >= 1:
        return probs_NV
    order_NV = np.argsort(-probs_NV, axis=-1, kind="stable")
    sorted_NV = np.take_along_axis(probs_NV, order_NV, axis=-1)
    if sampling.top_k > 0:
        sorted_NV[:, sampling.top_k :] = 0
    before_NV = np.cumsum(sorted_NV, axis=-1) - sorted_NV
    sorted_NV[before_NV >= sampling.top_p * sorted_NV.sum(axis=-1, keepdims=True)] = 0
    kept_NV = np.zeros_like(probs_NV)
    np.put_along_axis(kept_NV, order_NV, sorted_NV, axis=-1)
    return kept_NV


def load_model(path: Path) -> Any:
    """The model in a Hugging Face directory, in its own dtype; torch's RNG is left as it was."""
    disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype="auto", local_files_only=True, attn_implementation="sdpa"
            )
        except Exception as error:  # transformers raises many kinds for a directory it dislikes
            raise ModelError(f"{path}: transformers cannot load it: {error}") from error
    return model.eval()


def read_end_ids(path: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a response: the config's, the generation config's, the tokenizer's."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (path / name).is_file():
            value = json.loads((path / name).read_text()).get("eos_token_id")
            found.update(value if isinstance(value, list) else [value])
    found.add(tokenizer.eos_token_id)
    return frozenset(token for token in found if token is not None)
