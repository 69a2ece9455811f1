"""An engine in this process: transformers' forward with a key-value cache, on the CPU.

For machines without a GPU, and where bytes must not change: a group's tokens and log-probs
are a function of the weights, the request and the seeds alone. Matrix products on a CPU differ
in the last bits between batch sizes and thread counts, so a group is always one batch of its
own size that runs until its last sample ends, on a pinned number of threads. Draws are
counter-based (seed, position in the response): no generator has a state, torch's is never
touched, and a sample that goes on from a prefix draws what it would have drawn.

Samples that go on from prefixes are of different lengths, so each is a batch of one: no padding
can change what it computes. One thread computes, a request at a time, in the order of asking.

Legend: N samples of the group, V vocabulary.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from slurm_rl.errors import EngineError, ModelError
from slurm_rl.rollout.engine import Completion, Request, Sampling, Weights
from slurm_rl.rollout.routing import Experts, check_routed, read_experts

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Weights in memory. cache_key: the name under which the model takes its cache. experts: of
    the model, where it is to say which of them it sent its tokens to."""

    model: Any
    label: str
    end_ids: frozenset[int]
    cache_key: str
    experts: Experts | None = None


class EmbeddedEngine:
    """See the module. One instance may serve any number of weights in turn."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_threads: int = 1,
        concurrency: int = 32,
        routed: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_threads = num_threads
        self._concurrency = concurrency
        self._routed = routed
        self._loaded: _Loaded | None = None
        self._thread: ThreadPoolExecutor | None = None
        #: Set by `abort`; new weights bring a new one, so that what was aborted stays so.
        self._cut = threading.Event()
        self._counts = {"requests": 0.0, "queue_s": 0.0, "latency_s": 0.0}

    @property
    def concurrency(self) -> int:
        """Samples worth queueing: one group computes, some wait so that the thread never does."""
        return self._concurrency

    def start(self, weights: Weights) -> None:
        """Load `weights`; ModelError naming the directory if transformers cannot."""
        experts = read_experts(weights.path) if self._routed else None
        with self._pinned():
            model = load_model(weights.path)
        # transformers 5.2x renamed `past_key_values`; the old name warns there.
        named = inspect.signature(model.forward).parameters
        key = "cache" if "cache" in named else "past_key_values"
        end_ids = read_end_ids(weights.path, self._tokenizer)
        self._loaded = _Loaded(model, weights.label, end_ids, key, experts)
        self._cut = threading.Event()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "embedded")

    def load_weights(self, weights: Weights) -> None:
        """As `start`; the old weights stay if the new ones cannot be loaded."""
        self.start(weights)

    async def generate(self, request: Request, sampling: Sampling) -> list[Completion]:
        """The group's completions; it begins once those asked for earlier are finished.

        A caller that is cancelled ends the computation too.
        """
        left = threading.Event()
        cut = self._cut
        asked = time.monotonic()

        def work() -> list[Completion]:
            self._counts["queue_s"] += time.monotonic() - asked
            loaded = self._ready()
            return self._generate(
                request, sampling, loaded=loaded, is_cut=lambda: cut.is_set() or left.is_set()
            )

        try:
            completions = await self._in_thread(work)
        except asyncio.CancelledError:
            left.set()
            raise
        self._counts["requests"] += 1
        self._counts["latency_s"] += time.monotonic() - asked
        return completions

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of `tokens[1:]` at temperature 1, by one plain forward."""

        def work() -> list[float]:
            logits_TV = self._ready().model(torch.tensor([list(tokens)])).logits[0, :-1].float()
            wanted = torch.tensor(list(tokens[1:]))[:, None]
            found: list[float] = torch.log_softmax(logits_TV, -1).gather(1, wanted)[:, 0].tolist()
            return found

        return await self._in_thread(work)

    async def abort(self) -> None:
        """End what is in flight at its next token, and what is asked until other weights come."""
        self._cut.set()

    def metrics(self) -> dict[str, float]:
        """Means over the requests so far."""
        num = max(self._counts["requests"], 1.0)
        return {
            "engine/requests": self._counts["requests"],
            "engine/queue_time_mean": self._counts["queue_s"] / num,
            "engine/latency_mean": self._counts["latency_s"] / num,
        }

    def stop(self) -> None:
        """Wait for the token that is being computed; requests that wait get an EngineError."""
        self._loaded = None
        self._cut.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        def pinned() -> T:
            with self._pinned(), torch.inference_mode():
                return work()

        if self._thread is None:
            raise EngineError("the embedded engine has no weights")
        return await asyncio.wrap_future(self._thread.submit(pinned))

    def _ready(self) -> _Loaded:
        if self._loaded is None:
            raise EngineError("the embedded engine was stopped")
        return self._loaded

    def _generate(
        self, request: Request, sampling: Sampling, *, loaded: _Loaded, is_cut: Callable[[], bool]
    ) -> list[Completion]:
        rows = [
            _Row(
                seed,
                self._tokenizer,
                sampling,
                end_ids=loaded.end_ids,
                prefix=request.prefixes[i] if request.prefixes else (),
                max_new_tokens=request.max_new_tokens(i, sampling),
            )
            for i, seed in enumerate(request.seeds)
        ]
        if any(request.prefixes):
            for i, row in enumerate(rows):
                entry = request.entry_tokens(i)
                run_batch([row], entry, sampling=sampling, loaded=loaded, is_cut=is_cut)
        else:
            entry = request.prompt_tokens
            run_batch(rows, entry, sampling=sampling, loaded=loaded, is_cut=is_cut)
        return [row.completion(loaded) for row in rows]

    @contextmanager
    def _pinned(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class _Row:
    """One sample while it grows. `tokens` is the response: its prefix, then what was drawn."""

    def __init__(
        self,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        *,
        end_ids: frozenset[int],
        prefix: tuple[int, ...],
        max_new_tokens: int,
    ) -> None:
        self.seed = seed
        self.tokens: list[int] = list(prefix)
        self.logprobs: list[float] = []
        self.finish: Literal["stop", "length"] | None = None
        self._tokenizer = tokenizer
        self._sampling = sampling
        #: Each int64[tokens, L, K], of the tokens that the model was fed so far.
        self.routed: list[NDArray[np.int64]] = []
        self._end_ids = end_ids
        self._max_new_tokens = max_new_tokens

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
        elif len(self.logprobs) >= self._max_new_tokens:
            self.finish = "length"

    def _has_stop(self) -> bool:
        if not self._sampling.stop:
            return False
        # A token has at least one character, or is part of one: the tail is long enough.
        length = 4 * max(len(text) for text in self._sampling.stop) + 4
        tail = self._tokenizer.decode(self.tokens[-length:])
        return any(text in tail for text in self._sampling.stop)

    def completion(self, loaded: _Loaded) -> Completion:
        drawn = self.tokens[len(self.tokens) - len(self.logprobs) :]
        routed = ""
        if loaded.experts is not None and self.finish:
            ids = np.concatenate(self.routed)
            routed = check_routed(ids, loaded.experts, what="the embedded engine's answer")
        finish = self.finish or "abort"
        return Completion(tuple(drawn), tuple(self.logprobs), finish, loaded.label, routed)


def run_batch(
    rows: Sequence[_Row],
    entry: Sequence[int],
    *,
    sampling: Sampling,
    loaded: _Loaded,
    is_cut: Callable[[], bool],
) -> None:
    """Let `rows`, which all go on from the tokens `entry`, grow until the last ends or is cut."""
    if is_cut():
        return
    cache = DynamicCache(config=loaded.model.config)
    options: dict[str, Any] = {loaded.cache_key: cache, "use_cache": True, "logits_to_keep": 1}
    if loaded.experts is not None:
        options["output_router_logits"] = True
    output = loaded.model(torch.tensor([list(entry)]), **options)
    keep_routing(output, rows, experts=loaded.experts)
    cache.batch_repeat_interleave(len(rows))
    logits_NV = output.logits[:, -1].expand(len(rows), -1)
    while True:
        tokens_N = draw_tokens(logits_NV, rows=rows, sampling=sampling)
        if all(row.finish for row in rows) or is_cut():
            return
        # A finished sample stays in the batch: its size must not change.
        output = loaded.model(tokens_N[:, None], **options)
        keep_routing(output, rows, experts=loaded.experts)
        logits_NV = output.logits[:, -1]


def keep_routing(output: Any, rows: Sequence[_Row], *, experts: Experts | None) -> None:
    """Add to each unfinished row which experts the tokens of this forward were sent to.

    A first forward is of one entry that all rows share, a later one of one token of each.
    """
    if experts is None:
        return
    num = output.logits.shape[0]
    length = output.router_logits[0].shape[0] // num
    routed = np.zeros((num, length, experts.layers, experts.per_token), np.int64)
    sparse = [layer for layer in range(experts.layers) if layer not in experts.dense]
    for layer, logits in zip(sparse, output.router_logits, strict=True):
        chosen = logits.topk(experts.per_token, dim=-1).indices
        routed[:, :, layer] = chosen.view(num, length, -1).numpy()
    for i, row in enumerate(rows):
        if not row.finish:
            row.routed.append(routed[i if num > 1 else 0])


def draw_tokens(logits_NV: Tensor, *, rows: Sequence[_Row], sampling: Sampling) -> Tensor:
    """Append a token to each unfinished row; returns int64[N] to feed next.

    Inverse-CDF sampling in float64, one uniform a token. The log-prob is the untruncated
    distribution's, after temperature, as SGLang reports it; float32. Temperature 0 takes the
    likeliest token (of equals the one of lowest id), with its log-prob at temperature 1.
    """
    logprobs_NV = torch.log_softmax(logits_NV.float() / (sampling.temperature or 1.0), dim=-1)
    if sampling.temperature == 0:
        tokens_N = logprobs_NV.numpy().argmax(axis=-1)
    else:
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
    """`probs_NV` with zero where top-k, top-p or min-p drops a token; not renormalised.

    Ties break by token id (a stable sort), so that the choice is reproducible. top-p keeps
    the smallest set whose mass, within what top-k kept, reaches `top_p`; min-p drops what has
    less than that share of the likeliest token's probability.
    """
    if sampling.top_k <= 0 and sampling.top_p >= 1 and sampling.min_p <= 0:
        return probs_NV
    order_NV = np.argsort(-probs_NV, axis=-1, kind="stable")
    sorted_NV = np.take_along_axis(probs_NV, order_NV, axis=-1)
    if sampling.top_k > 0:
        sorted_NV[:, sampling.top_k :] = 0
    before_NV = np.cumsum(sorted_NV, axis=-1) - sorted_NV
    sorted_NV[before_NV >= sampling.top_p * sorted_NV.sum(axis=-1, keepdims=True)] = 0
    sorted_NV[sorted_NV < sampling.min_p * sorted_NV[:, :1]] = 0
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
