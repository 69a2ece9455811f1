"""A teacher's likeliest tokens, and a student's log-probs of them: on one rank, and on two."""

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.train import cpu

with cpu.megatron_imports():
    from slurm_rl.train.top_logprobs import find_likeliest, logprobs_at

VOCAB, WIDTH = 11, 16  # five columns of padding


def made(seed, rows=4):
    return torch.randn(
        rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float32
    )


@given(st.integers(0, 50), st.integers(1, 5))
def test_the_likeliest_are_the_largest_of_the_real_vocabulary(seed, num):
    logits = made(seed)
    ids = find_likeliest(logits, num=num, below=VOCAB)
    values, expected = logits[:, :VOCAB].topk(num, dim=1)
    assert torch.equal(logits.gather(1, ids), values)
    assert torch.equal(ids, expected)


def test_of_equal_ones_the_smaller_id_comes_first():
    logits = torch.zeros(1, WIDTH)
    logits[0, [2, 7]] = 3.0
    assert find_likeliest(logits, num=2, below=VOCAB).tolist() == [[2, 7]]


@given(st.integers(0, 50))
def test_values_and_gradient_are_those_of_log_softmax(seed):
    logits = made(seed).requires_grad_()
    ids = torch.tensor([[0, 3], [10, 3], [5, 5], [1, 2]])
    found = logprobs_at(logits, ids_NK=ids, temperature=0.7, vocab_size=VOCAB)
    other = logits.detach().clone().requires_grad_()
    expected = (other[:, :VOCAB] / 0.7).log_softmax(-1).gather(1, ids)
    assert torch.allclose(found, expected, atol=1e-6)
    weights = torch.tensor([[1.0, -2.0], [0.5, 0.0], [1.0, 1.0], [3.0, -1.0]])
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.allclose(logits.grad, other.grad, atol=1e-6)
    assert (logits.grad[:, VOCAB:] == 0).all()


def _on_a_rank(rank, store, out):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    logits = made(3)
    own = logits[:, rank * 8 : (rank + 1) * 8].clone().requires_grad_()
    ids = find_likeliest(own.detach(), num=3, below=VOCAB, group=dist.group.WORLD)
    found = logprobs_at(own, ids_NK=ids, temperature=0.7, vocab_size=VOCAB, group=dist.group.WORLD)
    (found * torch.arange(1.0, 4.0)).sum().backward()
    torch.save((ids, found.detach(), own.grad), f"{out}-{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_tensor_ranks_find_the_same(tmp_path):
    mp.spawn(_on_a_rank, (str(tmp_path / "store"), str(tmp_path / "out")), nprocs=2)
    logits = made(3).requires_grad_()
    ids = find_likeliest(logits.detach(), num=3, below=VOCAB)
    expected = (logits[:, :VOCAB] / 0.7).log_softmax(-1).gather(1, ids)
    (expected * torch.arange(1.0, 4.0)).sum().backward()
    for rank in range(2):
        their_ids, found, grad = torch.load(tmp_path / f"out-{rank}")
        assert torch.equal(their_ids, ids)
        assert torch.allclose(found, expected, atol=1e-6)
        assert torch.allclose(grad, logits.grad[:, rank * 8 : (rank + 1) * 8], atol=1e-6)
