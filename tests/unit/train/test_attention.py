"""Causal attention, packed and cut over context ranks, against attention to one whole sequence."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rl.train import cpu

with cpu.megatron_imports():
    from slurm_rl.train.attention import (
        attend_spans,
        attend_varlen,
        causal_spans,
        chunk_order,
    )
    from slurm_rl.train.varlen import adapt_varlen, takes_groups

HEADS, GROUPS, WIDTH = 4, 2, 8
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are tiny: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def heads(total, seed=0):
    """Queries, keys and values of `total` tokens, [t, heads, d]."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(total, n, WIDTH, generator=g) for n in (HEADS, GROUPS, GROUPS)]


def written_out(query, key, value, *, scale):
    """Softmax of the whole matrix, in float64: [t, heads, d] of one sequence."""
    q, k, v = (t.double() for t in (query, key, value))
    k, v = (t.repeat_interleave(HEADS // k.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    num_q, num_k = len(q), len(k)
    hidden = torch.ones(num_q, num_k).triu(num_k - num_q + 1).bool()
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(num_q, -1)


@settings(max_examples=8)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_packed_sequences_are_as_if_each_were_alone(lengths):
    query, key, value = heads(sum(lengths))
    spans = causal_spans(tuple(lengths), cp_rank=0, cp_size=1)
    packed = attend_spans(*(t[:, None] for t in (query, key, value)), spans, scale=0.3)[:, 0]
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        (span,) = causal_spans((length,), cp_rank=0, cp_size=1)
        one = [t[own][:, None] for t in (query, key, value)]
        assert torch.equal(packed[own], attend_spans(*one, [span], scale=0.3)[:, 0])
        exact = written_out(query[own], key[own], value[own], scale=0.3)
        assert (packed[own] - exact).abs().max() < 1e-5
        start += length


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(2, 4), st.integers(0, 9))
def test_context_ranks_together_are_one(chunks, cp_size, seed):
    """Values and gradients of every rank's chunks, with all ranks' keys in order."""
    lengths = tuple(2 * cp_size * n for n in chunks)
    whole = [t.requires_grad_() for t in heads(sum(lengths), seed)]
    start, expected = 0, []
    for length in lengths:
        own = slice(start, start + length)
        expected.append(written_out(*(t[own] for t in whole), scale=0.3))
        start += length
    weight = torch.randn(sum(lengths), HEADS * WIDTH, generator=torch.Generator().manual_seed(seed))
    wanted = torch.autograd.grad((torch.cat(expected) * weight).sum(), whole)
    total, found = torch.zeros(()), torch.zeros(sum(lengths), HEADS * WIDTH)
    for rank in range(cp_size):
        places = chunk_order(lengths, cp_rank=rank, cp_size=cp_size, device=CPU)
        spans = causal_spans(lengths, cp_rank=rank, cp_size=cp_size)
        parts = (whole[0][places], whole[1], whole[2])
        out = attend_spans(*(t[:, None] for t in parts), spans, scale=0.3)[:, 0]
        total = total + (out * weight[places]).sum()
        found[places] = out.detach()
    assert (found - torch.cat(expected)).abs().max() < 1e-5
    for mine, theirs in zip(torch.autograd.grad(total, whole), wanted, strict=True):
        assert (mine - theirs).abs().max() < 1e-4


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(2, 4))
def test_context_ranks_share_out_every_token_and_equal_work(chunks, cp_size):
    lengths = tuple(2 * cp_size * n for n in chunks)
    orders = [chunk_order(lengths, cp_rank=r, cp_size=cp_size, device=CPU) for r in range(cp_size)]
    assert sorted(torch.cat(orders).tolist()) == list(range(sum(lengths)))
    assert {len(order) for order in orders} == {sum(lengths) // cp_size}
    work = [
        sum((s.q_stop - s.q_start) * (s.k_stop - s.k_start) for s in spans)
        for spans in (causal_spans(lengths, cp_rank=r, cp_size=cp_size) for r in range(cp_size))
    ]
    assert len(set(work)) == 1


def new_kernel(
    query,
    key,
    value,
    bounds_q,
    bounds_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    """What torch's `varlen_attn` promises: runs of queries and keys, the mask aligned at the end."""
    assert window_size == (-1, 0)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    runs = [bounds_q.diff().tolist(), bounds_k.diff().tolist()]
    assert (max(runs[0]), max(runs[1])) == (max_q, max_k)
    parts = zip(query.split(runs[0]), key.split(runs[1]), value.split(runs[1]), strict=True)
    out = [written_out(*part, scale=scale).reshape(len(part[0]), HEADS, WIDTH) for part in parts]
    return torch.cat(out)


def old_kernel(query, key, value, bounds_q, bounds_k, max_q, max_k, is_causal=False):
    """The same as the first versions of it had it: one scale, and as many keys as queries."""
    assert is_causal and query.shape[1] == key.shape[1]
    bounds = (bounds_q, bounds_k, max_q, max_k)
    return new_kernel(query, key, value, *bounds, scale=WIDTH**-0.5, window_size=(-1, 0))


@pytest.mark.parametrize("kernel", [new_kernel, old_kernel])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_one_kernel_for_all_spans_gets_the_right_runs(cp_size, kernel):
    lengths = (12, 24, 12)
    query, key, value = heads(sum(lengths))
    for rank in range(cp_size):
        spans = causal_spans(lengths, cp_rank=rank, cp_size=cp_size)
        own = query
        if cp_size > 1:
            own = query[chunk_order(lengths, cp_rank=rank, cp_size=cp_size, device=CPU)]
        found = attend_varlen(own, key, value, spans, scale=0.3, kernel=adapt_varlen(kernel))
        wanted = attend_spans(*(t[:, None] for t in (own, key, value)), spans, scale=0.3)[:, 0]
        assert (found - wanted).abs().max() < 1e-5


def plain_attention(query, key, value, ends_q, ends_k, max_q, max_k, *, scale, window_size):
    """Runs of equally many heads, in the tensors' own precision."""
    runs = [ends_q.diff().tolist(), ends_k.diff().tolist()]
    parts = zip(query.split(runs[0]), key.split(runs[1]), value.split(runs[1]), strict=True)
    out = []
    for q, k, v in parts:
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
        hidden = torch.ones(len(q), len(k)).triu(len(k) - len(q) + 1).bool()
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype))
    return torch.cat(out)


def grouped(query, key, value, *bounds, scale=None, window_size=(-1, -1)):
    key, value = (t.repeat_interleave(len(query[0]) // len(t[0]), 1) for t in (key, value))
    return plain_attention(query, key, value, *bounds, scale=scale, window_size=window_size)


def refusing(query, key, value, *bounds, scale=None, window_size=(-1, -1)):
    if query.shape[1] != key.shape[1]:
        raise RuntimeError("as many heads of keys as of queries")
    return plain_attention(query, key, value, *bounds, scale=scale, window_size=window_size)


def in_another_order(query, key, value, *bounds, scale=None, window_size=(-1, -1)):
    key, value = (t.repeat(1, len(query[0]) // len(t[0]), 1) for t in (key, value))
    return plain_attention(query, key, value, *bounds, scale=scale, window_size=window_size)


def without_gradient(query, key, value, *bounds, scale=None, window_size=(-1, -1)):
    if query.shape[1] != key.shape[1]:
        key, value = key.detach(), value.detach()
    return grouped(query, key, value, *bounds, scale=scale, window_size=window_size)


@pytest.mark.parametrize(
    ("kernel", "takes"),
    [(grouped, True), (refusing, False), (in_another_order, False), (without_gradient, False)],
)
def test_a_kernel_is_asked_whether_it_takes_fewer_heads_of_keys(kernel, takes):
    assert takes_groups(kernel, device="cpu") == takes
    query, key, value = heads(7)
    spans = causal_spans((3, 4), cp_rank=0, cp_size=1)
    attend = adapt_varlen(kernel, takes_groups=takes)
    found = attend_varlen(query, key, value, spans, scale=0.3, kernel=attend)
    wanted = attend_spans(*(t[:, None] for t in (query, key, value)), spans, scale=0.3)[:, 0]
    assert (found - wanted).abs().max() < 1e-5
