"""Causal attention over padded, packed and context-parallel input, by PyTorch's fused kernels.

One description serves all: a list of spans, each a run of this rank's queries and the run of keys
that the last of them may see (`causal_spans`). Queries of a span are the last of its keys, so the
mask is causal, aligned at the end. Without context parallelism a span is a sequence; with it each
sequence is cut in 2 × cp chunks, of which rank r has chunk r and chunk 2 × cp - 1 - r, and keys and
values are gathered from the other ranks (their gradients are summed back).

On CUDA in half precision, spans go through torch's variable-length flash attention, if this torch
has it; otherwise one after the other, each as if its sequence were alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from slurm_rl.train.varlen import find_kernel


@dataclass(frozen=True, slots=True)
class Span:
    """Queries `q_start:q_stop` of this rank; keys `k_start:k_stop` of all ranks, in order."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


@functools.lru_cache(maxsize=256)
def causal_spans(lengths: tuple[int, ...], *, cp_rank: int, cp_size: int) -> tuple[Span, ...]:
    """The spans of sequences that lie end to end; `lengths` are theirs over all context ranks,
    multiples of 2 × cp_size if that is more than one.

    Example: causal_spans((4, 2), cp_rank=0, cp_size=1): (Span(0, 4, 0, 4), Span(4, 6, 4, 6)).
    """
    spans = []
    start = 0
    for length in lengths:
        if cp_size == 1:
            spans.append(Span(start, start + length, start, start + length))
        else:
            chunk, own = length // (2 * cp_size), start // cp_size
            for place, number in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
                first = own + place * chunk
                spans.append(Span(first, first + chunk, start, start + (number + 1) * chunk))
        start += length
    return tuple(spans)


@functools.lru_cache(maxsize=256)
def chunk_order(
    lengths: tuple[int, ...], *, cp_rank: int, cp_size: int, device: torch.device
) -> torch.Tensor:
    """Which tokens a context rank has, in its order: int64 places among the whole sequences."""
    parts, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).chunk(2 * cp_size)
        parts += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]]
        start += length
    return torch.cat(parts).to(device)


class CausalAttention(MegatronModule):
    """Scaled dot-product attention with the causal mask alone: padding must come last."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads × d]; packed
        input has no axis b."""
        assert attention_mask is None
        cp_size = self.config.context_parallel_size
        if packed_seq_params is None and cp_size == 1:
            return _attend(query, key, value, scale=self.scale)
        if packed_seq_params is not None:
            bounds = packed_seq_params.cu_seqlens_q.tolist()
            lengths = tuple(b - a for a, b in itertools.pairwise(bounds))
        else:
            lengths = (query.shape[0] * cp_size,)
        if cp_size > 1:
            key, value = (_gather_in_order(t, lengths, cp_size=cp_size) for t in (key, value))
        rank = parallel_state.get_context_parallel_rank()
        spans = causal_spans(lengths, cp_rank=rank, cp_size=cp_size)
        if packed_seq_params is None:
            return attend_spans(query, key, value, spans, scale=self.scale)
        kernel = find_kernel() if query.dtype in (torch.bfloat16, torch.float16) else None
        if kernel is not None:
            return attend_varlen(query, key, value, spans, scale=self.scale, kernel=kernel)
        q, k, v = (t.unsqueeze(1) for t in (query, key, value))
        return attend_spans(q, k, v, spans, scale=self.scale).squeeze(1)


def _gather_in_order(
    tensor: torch.Tensor, lengths: tuple[int, ...], *, cp_size: int
) -> torch.Tensor:
    """Keys or values of all context ranks, in the order of the sequences."""
    group = parallel_state.get_context_parallel_group()
    gathered = gather_from_sequence_parallel_region(tensor.contiguous(), group=group)
    return gathered.index_select(0, _places(lengths, cp_size=cp_size, device=tensor.device))


@functools.lru_cache(maxsize=256)
def _places(lengths: tuple[int, ...], *, cp_size: int, device: torch.device) -> torch.Tensor:
    """Where among the tokens of all ranks, rank after rank, each token of the sequences is."""
    sizes = {"cp_size": cp_size, "device": device}
    orders = [chunk_order(lengths, cp_rank=rank, **sizes) for rank in range(cp_size)]
    return torch.cat(orders).argsort()


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """[s, b, heads, d] over keys that end where the queries do."""
    num_queries, num_keys = query.shape[0], key.shape[0]
    mask = None
    if num_queries != num_keys:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        mask = mask.tril(num_keys - num_queries)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    out = functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.permute(2, 0, 1, 3).reshape(num_queries, query.shape[1], -1)


def attend_spans(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
) -> torch.Tensor:
    """One span after the other; [t, b, heads, d] -> [t, b, heads × d]."""
    return torch.cat(
        [
            _attend(
                query[span.q_start : span.q_stop],
                key[span.k_start : span.k_stop],
                value[span.k_start : span.k_stop],
                scale=scale,
            )
            for span in spans
        ]
    )


def attend_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: tuple[Span, ...],
    *,
    scale: float,
    kernel: Any,
) -> torch.Tensor:
    """All spans in one call of `kernel` (`varlen.py`); [t, heads, d] -> [t, heads × d]."""
    bounds_q, bounds_k = _bounds(spans, device=query.device)
    if key.shape[0] != query.shape[0]:  # the chunks of a sequence see the same keys
        parts = [slice(span.k_start, span.k_stop) for span in spans]
        key, value = (torch.cat([t[part] for part in parts]) for t in (key, value))
    out = kernel(
        query,
        key,
        value,
        bounds_q,
        bounds_k,
        max(span.q_stop - span.q_start for span in spans),
        max(span.k_stop - span.k_start for span in spans),
        scale=scale,
    )
    return out.reshape(len(query), -1)


@functools.lru_cache(maxsize=64)
def _bounds(spans: tuple[Span, ...], *, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cumulated lengths of queries and keys, int32, on the device."""
    lengths = torch.tensor(
        [[0, *(s.q_stop - s.q_start for s in spans)], [0, *(s.k_stop - s.k_start for s in spans)]]
    )
    queries, keys = lengths.cumsum(1).to(torch.int32).to(device)
    return queries.contiguous(), keys.contiguous()
