"""Estimates of the KL: by hand, and against the KL itself by enumeration."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_rl.algorithms.aggregation import weighted_sum
from slurm_rl.algorithms.kl import kl_estimate
from slurm_rl.algorithms.numerics import importance_ratio

#: A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

KINDS = ["k1", "k2", "k3", "low_var_kl"]


def estimate(policy, reference, kind, **options):
    return kl_estimate(policy, reference_logprobs_N=reference, kind=kind, **options)


@pytest.mark.parametrize(
    ("kind", "expected"),
    # d = log 0.5 - log 0.25 = log 2 = 0.693147
    [
        ("k1", 0.693147),
        ("k2", 0.240227),
        ("k3", 0.5 - 1 + 0.693147),
        ("low_var_kl", 0.5 - 1 + 0.693147),
    ],
)
def test_kl_by_hand(kind, expected):
    policy, reference = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    assert estimate(policy, reference, kind).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    # The expectation over all three tokens, not over samples of them.
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    found = estimate(p.log(), q.log(), kind)
    assert (p * found).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)


@unhurried
@given(st.lists(st.floats(-20, 0, width=32), min_size=1, max_size=9), st.floats(-20, 0, width=32))
def test_only_k1_is_ever_negative(policy, reference):
    logprobs = torch.tensor(policy)
    for kind in ("k2", "k3", "low_var_kl"):
        assert (estimate(logprobs, torch.full_like(logprobs, reference), kind) >= -1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_policies_are_at_distance_zero(kind):
    logprobs = -torch.rand(100) * 20
    assert (estimate(logprobs, logprobs, kind) == 0).all()


def test_k3_keeps_its_digits_near_zero():
    # d = 2⁻¹² = 0.000244140625: d² / 2 = 2.98e-8, which exp(-d) - 1 + d has lost in float32.
    difference = torch.tensor([2.0**-12])
    found = estimate(difference, torch.zeros(1), "k3").item()
    assert found == pytest.approx(2.0**-25, rel=1e-2)


@pytest.mark.parametrize(
    ("difference", "k3", "low_var", "gradients"),
    [
        # exp(-d) is held at exp(20), and constant beyond
        (-1e4, math.exp(20) - 1 - 20, 10.0, (0.0, 0.0)),
        (1e4, 1e4 - 1, 10.0, (1.0, 0.0)),
        # k3 = e³ - 1 - 3 = 16.0855 is more than 10
        (-3.0, math.exp(3) - 4, 10.0, (1 - math.exp(3), 0.0)),
        (2.0, math.exp(-2) + 1, math.exp(-2) + 1, (1 - math.exp(-2),) * 2),
    ],
)
def test_outliers_are_held(difference, k3, low_var, gradients):
    for kind, value, gradient in zip(("k3", "low_var_kl"), (k3, low_var), gradients, strict=True):
        logprobs = torch.tensor([difference], requires_grad=True)
        found = estimate(logprobs, torch.zeros(1), kind)
        found.sum().backward()
        assert found.item() == pytest.approx(value, rel=1e-5)
        assert logprobs.grad.item() == pytest.approx(gradient, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind):
    generator = torch.Generator().manual_seed(3)
    policy, reference = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    policy.requires_grad_()
    assert torch.autograd.gradcheck(lambda p: estimate(p, reference, kind), (policy,))
    # and with the ratio's own gradient
    proximal = torch.randn(8, generator=generator, dtype=torch.float64)

    def unbiased(p):
        ratio = importance_ratio(p, proximal_logprobs_N=proximal)
        return estimate(p, reference, kind, importance_ratio_N=ratio)

    assert torch.autograd.gradcheck(unbiased, (policy,))


def expected_gradient(kind, *, sampled_by, with_ratio):
    """Over all tokens of a softmax: gradient of the KL, and expectation of the estimate's."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    sampler = logprobs.detach() if sampled_by is None else sampled_by
    ratio = importance_ratio(logprobs, proximal_logprobs_N=sampler) if with_ratio else None
    values = estimate(logprobs, reference, kind, importance_ratio_N=ratio)
    (found,) = torch.autograd.grad((sampler.exp() * values).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    return found, exact


OTHER = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()


@pytest.mark.parametrize("sampled_by", [None, OTHER], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_with_the_ratio_the_gradient_is_the_kls(kind, sampled_by):
    found, exact = expected_gradient(kind, sampled_by=sampled_by, with_ratio=True)
    assert torch.allclose(found, exact, rtol=1e-9, atol=1e-12)


def test_without_it_only_k2_has_the_kls_gradient_and_only_on_policy():
    for kind, right in (("k1", False), ("k2", True), ("k3", False)):
        found, exact = expected_gradient(kind, sampled_by=None, with_ratio=False)
        assert torch.allclose(found, exact) is right
    found, exact = expected_gradient("k2", sampled_by=OTHER, with_ratio=False)
    assert not torch.allclose(found, exact, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_token_without_weight_counts_nothing_whatever_it_holds(kind, bad):
    for place in ("policy", "reference"):
        logprobs, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
        (logprobs if place == "policy" else reference)[1] = bad
        logprobs.requires_grad_()
        ratio = importance_ratio(logprobs, proximal_logprobs_N=torch.tensor([-1.0, -1.0]))
        values = estimate(logprobs, reference, kind, importance_ratio_N=ratio)
        weighted_sum(values, weights_N=torch.tensor([1.0, 0.0])).backward()
        assert math.isfinite(logprobs.grad[0].item()) and logprobs.grad[1].item() == 0.0


def test_bfloat16_is_computed_in_float32_and_float64_stays():
    for given_type, found in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert estimate(torch.ones(1).to(given_type), torch.zeros(1), "k3").dtype == found
