"""Log-probabilities and entropy against torch's own, and their gradients."""

import pytest
import torch

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
