"""Log-probabilities and entropy against torch's own, and their gradients."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slurm_rl.train import vocab_parallel
from slurm_rl.train.vocab_parallel import logprobs_and_entropy


def expected(logits, targets, temperature):
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("padding", [0, 5])
def test_values_and_gradients(temperature, padding):
    torch.manual_seed(0)
    real = torch.randn(6, 11) * 3
    targets = torch.tensor([0, 10, 3, 3, 7, 5])
    mine = torch.cat([real, torch.full((6, padding), 50.0)], dim=1).requires_grad_()
    theirs = real.clone().requires_grad_()
    found = logprobs_and_entropy(mine, targets_N=targets, temperature=temperature, vocab_size=11)
    wanted = expected(theirs, targets, temperature)
    weights = torch.randn(2, 6)
    for out in (found, wanted):
        (out[0] * weights[0] + out[1] * weights[1]).sum().backward()
    assert torch.allclose(found[0], wanted[0], atol=1e-6)
    assert torch.allclose(found[1], wanted[1], atol=1e-6)
    assert torch.allclose(mine.grad[:, :11], theirs.grad, atol=1e-6)
    assert (mine.grad[:, 11:] == 0).all()


def test_one_of_the_two_is_enough_for_a_gradient():
    logits = torch.randn(2, 4, requires_grad=True)
    logprobs, _ = logprobs_and_entropy(
        logits, targets_N=torch.tensor([1, 2]), temperature=1.0, vocab_size=4
    )
    logprobs.sum().backward()
    assert logits.grad.abs().sum() > 0


def test_half_precision_is_computed_in_float32():
    logits = torch.randn(3, 50, dtype=torch.bfloat16)
    targets = torch.tensor([1, 2, 3])
    found, _ = logprobs_and_entropy(logits, targets_N=targets, temperature=1.0, vocab_size=50)
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected(logits.float(), targets, 1.0)[0], atol=1e-6)


def test_no_tokens_are_no_error():
    logits = torch.randn(0, 4, requires_grad=True)
    logprobs, entropy = logprobs_and_entropy(
        logits, targets_N=torch.zeros(0, dtype=torch.long), temperature=1.0, vocab_size=4
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad.shape == (0, 4)


class PlainKernels:
    """`fused_vocab.py`, by PyTorch."""

    @staticmethod
    def row_sums(logits_NV, targets_N, *, temperature, width):
        z_NV = logits_NV[:, :width].float() / temperature
        if width == 0:
            zeros = torch.zeros(len(z_NV))
            return torch.full_like(zeros, -float("inf")), zeros, zeros.clone(), zeros.clone()
        most_N = z_NV.max(1).values
        away_NV = z_NV - most_N[:, None]
        here_N = (targets_N >= 0) & (targets_N < width)
        chosen_N = z_NV.gather(1, targets_N.clamp(0, width - 1)[:, None])[:, 0] * here_N
        return most_N, away_NV.exp().sum(1), (away_NV.exp() * away_NV).sum(1), chosen_N

    @staticmethod
    def logits_gradient(logits_NV, targets_N, *, log_total_N, temperature, width, **grads):
        logprobs_NV = logits_NV[:, :width].float() / temperature - log_total_N[:, None]
        p_NV = logprobs_NV.exp()
        own_NV = torch.arange(width) == targets_N[:, None]
        bent_NV = p_NV * (logprobs_NV + grads["entropy_N"][:, None])
        found = (own_NV.float() - p_NV) * grads["grad_logprobs_N"][:, None]
        found = (found - bent_NV * grads["grad_entropy_N"][:, None]) / temperature
        return torch.cat([found, torch.zeros(len(found), logits_NV.shape[1] - width)], dim=1)


@pytest.mark.parametrize("vocab_size", [16, 13, 8, 5])
def test_kernels_over_two_ranks_are_one_softmax(monkeypatch, vocab_size):
    """The ranks are threads; of few tokens the second has nothing but padding."""
    torch.manual_seed(0)
    both = torch.randn(6, 16) * 20
    targets = torch.randint(0, vocab_size, (6,))
    weights = torch.randn(2, 6)
    meeting, said = threading.Barrier(2), {}

    def reduce_here(values, group, op=torch.distributed.ReduceOp.SUM):
        said[group] = values.clone()
        meeting.wait()
        parts = torch.stack([said[0], said[1]])
        is_sum = op == torch.distributed.ReduceOp.SUM
        found = parts.sum(0) if is_sum else parts.max(0).values
        meeting.wait()
        return found

    monkeypatch.setattr(vocab_parallel, "_reduce", reduce_here)

    def run(rank):
        own = both[:, rank * 8 : rank * 8 + 8].clone().requires_grad_()
        found = vocab_parallel.fused(
            own,
            targets - rank * 8,
            temperature=0.7,
            width=min(max(vocab_size - rank * 8, 0), 8),
            kernels=PlainKernels,
            group=rank,
        )
        (found[0] * weights[0] + found[1] * weights[1]).sum().backward()
        return found, own.grad

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    whole = both[:, :vocab_size].clone().requires_grad_()
    wanted = expected(whole, targets, 0.7)
    (wanted[0] * weights[0] + wanted[1] * weights[1]).sum().backward()
    for found, _ in (first, second):
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    grads = torch.cat([first[1], second[1]], dim=1)
    torch.testing.assert_close(grads[:, :vocab_size], whole.grad, atol=1e-5, rtol=1e-5)
    assert (grads[:, vocab_size:] == 0).all()
