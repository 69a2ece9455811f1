"""The critic's loss by hand and against finite differences."""

import pytest
import torch

from slurm_rl.algorithms.aggregation import weighted_sum
from slurm_rl.algorithms.value import value_loss


@pytest.mark.parametrize(
    ("value", "proximal", "target", "loss", "gradient", "clipped"),
    [
        # within 0.5 of the old value: (2.2 - 3)² / 2, gradient V - R
        (2.2, 2.0, 3.0, 0.32, -0.8, 0),
        # ran ahead towards its target: counts as 2.5, no gradient
        (2.9, 2.0, 3.0, 0.125, 0.0, 1),
        # ran away from it: the larger error counts, with its gradient
        (1.0, 2.0, 3.0, 2.0, -2.0, 0),
        # overshot so far that the clip helps it: the larger error counts
        (4.0, 2.0, 3.0, 0.5, 1.0, 0),
    ],
)
def test_value_loss_by_hand(value, proximal, target, loss, gradient, clipped):
    values = torch.tensor([value], requires_grad=True)
    out = value_loss(
        values,
        proximal_values_N=torch.tensor([proximal]),
        returns_N=torch.tensor([target]),
        eps_clip=0.5,
    )
    out.loss_N.sum().backward()
    found = out.loss_N.item(), values.grad.item(), out.clipped_N.item()
    assert found == pytest.approx((loss, gradient, clipped), abs=1e-6)


def test_without_a_clip_it_is_half_the_squared_error():
    out = value_loss(
        torch.tensor([5.0]),
        proximal_values_N=torch.tensor([0.0]),
        returns_N=torch.tensor([2.0]),
        eps_clip=None,
    )
    assert out.loss_N.item() == 4.5 and out.clipped_N.item() == 0


@pytest.mark.parametrize("eps_clip", [None, 0.2])
def test_gradients_are_those_of_finite_differences(eps_clip):
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 16, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, proximal_values_N=old, returns_N=returns, eps_clip=eps_clip).loss_N,
        (values.requires_grad_(),),
    )


@pytest.mark.parametrize("eps_clip", [None, 0.2])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_token_without_weight_counts_nothing_whatever_it_holds(eps_clip, place, bad):
    inputs = [torch.tensor([1.0, 1.0]) for _ in range(3)]
    inputs[place][1] = bad
    inputs[0].requires_grad_()
    out = value_loss(
        inputs[0], proximal_values_N=inputs[1], returns_N=inputs[2] + 1, eps_clip=eps_clip
    )
    weighted_sum(out.loss_N, weights_N=torch.tensor([1.0, 0.0])).backward()
    assert inputs[0].grad.tolist() == [-1.0, 0.0]


def test_float64_stays():
    values = torch.zeros(1, dtype=torch.float64)
    out = value_loss(values, proximal_values_N=values, returns_N=values, eps_clip=0.1)
    assert out.loss_N.dtype == torch.float64


def test_a_value_within_the_bounds_is_never_called_clipped():
    # old + (value - old) need not be value again in float32.
    generator = torch.Generator().manual_seed(1)
    old, values, returns = torch.randn(3, 10_000, generator=generator)
    out = value_loss(values, proximal_values_N=old, returns_N=returns, eps_clip=0.5)
    within = (values - old).abs() < 0.49
    assert within.sum() > 1000 and out.clipped_N[within].sum() == 0
