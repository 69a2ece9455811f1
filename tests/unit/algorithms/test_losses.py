"""Policy losses: by hand, against finite differences, and under inputs meant to break them."""

import math
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_rl.algorithms.aggregation import token_weights, weighted_sum
from slurm_rl.algorithms.losses import (
    cispo_loss,
    gspo_loss,
    policy_gradient_loss,
    ppo_clip_loss,
)

#: A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NAN, INF = float("nan"), float("inf")


def one(function, ratio, advantage, **options):
    """Loss, gradient with respect to the log-probability, ratio and clip of a single token."""
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    out = function(
        logprobs,
        proximal_logprobs_N=torch.zeros(1),
        advantages_N=torch.tensor([advantage]),
        **options,
    )
    out.loss_N.sum().backward()
    assert out.ratio_N.item() == pytest.approx(ratio) and not out.ratio_N.requires_grad
    return out.loss_N.item(), logprobs.grad.item(), out.clipped_N.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "high", "loss", "gradient", "clipped"),
    [
        # inside the clip: -A r, whose derivative by log p is -A r
        (1.0, 2.0, None, -2.0, -2.0, 0),
        (1.1, 1.0, None, -1.1, -1.1, 0),
        # above it with a gain: -A (1 + 0.2), no gradient
        (1.5, 1.0, None, -1.2, 0.0, 1),
        # clip-higher lets it go further
        (1.25, 1.0, 0.28, -1.25, -1.25, 0),
        (1.5, 1.0, 0.28, -1.28, 0.0, 1),
        # below it with a loss: -A (1 - 0.2), no gradient
        (0.5, -1.0, None, 0.8, 0.0, 1),
        # a clip never hides a mistake: the larger loss counts, with its gradient
        (1.5, -1.0, None, 1.5, 1.5, 0),
        (0.5, 1.0, None, -0.5, -0.5, 0),
        # nothing to gain or to lose
        (1.5, 0.0, None, 0.0, 0.0, 0),
    ],
)
def test_clipped_loss_by_hand(ratio, advantage, high, loss, gradient, clipped):
    found = one(ppo_clip_loss, ratio, advantage, eps_clip=0.2, eps_clip_high=high)
    assert found == pytest.approx((loss, gradient, clipped), abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # a negative advantage costs at most -A × 3, and is then constant
        (2.9, -2.0, 5.8, 5.8, 0),
        (3.1, -2.0, 6.0, 0.0, 1),
        (1e4, -2.0, 6.0, 0.0, 1),
        # a positive one knows nothing of it
        (4.0, 2.0, -2.4, 0.0, 1),
        (0.5, -2.0, 1.6, 0.0, 1),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, loss, gradient, clipped):
    found = one(ppo_clip_loss, ratio, advantage, eps_clip=0.2, eps_clip_c=3.0)
    assert found == pytest.approx((loss, gradient, clipped), abs=1e-6)


def test_a_dual_clip_inside_the_clip_range_is_refused():
    with pytest.raises(AssertionError, match="dual clip"):
        one(ppo_clip_loss, 1.0, 1.0, eps_clip=0.2, eps_clip_c=1.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    # -A × clipped ratio × log r, whose gradient is -A × clipped ratio: never 0
    [(1.0, 2.0, 1.0, 0), (1.5, 2.0, 1.28, 1), (0.5, 2.0, 0.8, 1), (1.5, -1.0, 1.28, 1)],
)
def test_cispo_by_hand(ratio, advantage, weight, clipped):
    found = one(cispo_loss, ratio, advantage, eps_clip=0.2, eps_clip_high=0.28)
    expected = (-advantage * weight * math.log(ratio), -advantage * weight, clipped)
    assert found == pytest.approx(expected, abs=1e-6)


def test_cispo_without_a_lower_bound():
    _, gradient, clipped = one(cispo_loss, 0.01, 1.0, eps_clip=1.0, eps_clip_high=0.2)
    assert (gradient, clipped) == pytest.approx((-0.01, 0))


def test_policy_gradient_by_hand():
    assert one(policy_gradient_loss, 0.5, 3.0) == pytest.approx((3 * math.log(2), -3.0, 0))


def test_gspo_by_hand():
    # Log-ratios 0.1 and 0.3 in sequence 1: mean 0.2, s = 1.221403. One token in sequence 0: 1.
    logprobs = torch.tensor([0.1, 0.0, 0.3], dtype=torch.float64, requires_grad=True)
    out = gspo_loss(
        logprobs,
        proximal_logprobs_N=torch.zeros(3),
        advantages_N=torch.tensor([2.0, 1.0, 2.0]),
        sequence_N=torch.tensor([1, 0, 1]),
        num_sequences=3,
        eps_clip=0.5,
    )
    assert out.ratio_N.tolist() == pytest.approx([1.221403, 1.0, 1.221403], rel=1e-6)
    assert out.loss_N.tolist() == pytest.approx([-2.442806, -1.0, -2.442806], rel=1e-6)
    out.loss_N.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-2.442806, -1.0, -2.442806], rel=1e-6)


def test_gspo_clips_a_sequence_as_a_whole():
    # Ratios 3 and 1/2 of two tokens: their geometric mean sqrt(1.5) = 1.2247 is above 1.2.
    logprobs = torch.tensor([3.0, 0.5]).log().requires_grad_()
    out = gspo_loss(
        logprobs,
        proximal_logprobs_N=torch.zeros(2),
        advantages_N=torch.ones(2),
        sequence_N=torch.zeros(2, dtype=torch.long),
        num_sequences=1,
        eps_clip=0.2,
    )
    out.loss_N.sum().backward()
    assert out.clipped_N.tolist() == [1, 1] and logprobs.grad.tolist() == [0, 0]
    assert out.loss_N.tolist() == pytest.approx([-1.2, -1.2])


@pytest.mark.parametrize(
    ("logs", "ratio", "gradient"),
    [
        # far tokens that make up for each other: their mean is 0.1
        ([30.0, -29.8], math.exp(0.1), math.exp(0.1)),
        # a mean beyond the bound: constant
        ([30.0, 30.0], math.exp(20), 0.0),
    ],
)
def test_gspo_bounds_the_mean_and_not_its_tokens(logs, ratio, gradient):
    logprobs = torch.tensor(logs, dtype=torch.float64, requires_grad=True)
    out = gspo_loss(
        logprobs,
        proximal_logprobs_N=torch.zeros(2),
        advantages_N=-torch.ones(2),
        sequence_N=torch.zeros(2, dtype=torch.long),
        num_sequences=1,
        eps_clip=0.2,
    )
    out.loss_N.sum().backward()
    assert out.ratio_N.tolist() == pytest.approx([ratio] * 2)
    assert logprobs.grad.tolist() == pytest.approx([gradient] * 2)


LENGTHS = torch.tensor([3, 1, 4])
SEQUENCE = torch.repeat_interleave(torch.arange(3), LENGTHS)
GSPO = partial(gspo_loss, sequence_N=SEQUENCE, num_sequences=3, eps_clip=0.05, eps_clip_high=0.1)
LOSSES = {
    "ppo": partial(ppo_clip_loss, eps_clip=0.2, eps_clip_high=0.3),
    "dual": partial(ppo_clip_loss, eps_clip=0.2, eps_clip_c=1.5),
    "gspo": GSPO,
    "cispo": partial(cispo_loss, eps_clip=0.2),
    "policy_gradient": policy_gradient_loss,
}


def random_tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, 8, generator=generator, dtype=torch.float64)
    proximal = -draw().abs() - 0.5
    return proximal + 0.4 * draw(), proximal, draw()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["ppo", "dual", "policy_gradient"])
def test_gradients_are_those_of_finite_differences(name, seed):
    logprobs, proximal, advantages = random_tokens(seed)
    # Random ratios are never within 1e-4 of a kink.
    ratio = (logprobs - proximal).exp()
    assert all(((ratio - kink).abs() > 1e-4).all() for kink in (0.8, 1.2, 1.3, 1.5))

    def loss(values):
        return LOSSES[name](values, proximal_logprobs_N=proximal, advantages_N=advantages).loss_N

    assert torch.autograd.gradcheck(loss, (logprobs.requires_grad_(),), eps=1e-6, atol=1e-6)


def finite_differences(function, point, eps=1e-6):
    steps = torch.eye(len(point), dtype=point.dtype) * eps
    return torch.stack([(function(point + s) - function(point - s)) / (2 * eps) for s in steps])


@pytest.mark.parametrize("seed", range(5))
def test_gspo_under_sequence_weights_is_the_papers_objective(seed):
    # Straight through: its value and gradient only add up over the sequence, to those of the
    # objective on sequences, written here as the paper has it.
    logprobs, proximal, _ = random_tokens(seed)
    advantage_S = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    weights = token_weights(torch.ones(8), lengths_B=LENGTHS)

    def objective(values):
        parts = [x.mean() for x in (values - proximal).split(LENGTHS.tolist())]
        s = torch.stack(parts).exp()
        return -torch.minimum(s * advantage_S, s.clamp(0.95, 1.1) * advantage_S).sum()

    logprobs.requires_grad_()
    out = GSPO(logprobs, proximal_logprobs_N=proximal, advantages_N=advantage_S[SEQUENCE])
    total = weighted_sum(out.loss_N, weights_N=weights)
    total.backward()
    assert total.item() == pytest.approx(objective(logprobs).item(), rel=1e-6)
    expected = finite_differences(objective, logprobs.detach())
    assert torch.allclose(logprobs.grad, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_cispos_gradient_is_that_of_a_constant_times_the_logprob(seed):
    # Its ratio is constant: differences must hold it where it is.
    logprobs, proximal, advantages = random_tokens(seed)
    held = (logprobs - proximal).exp().clamp(0.8, 1.2)
    expected = finite_differences(lambda v: -(held * advantages * v).sum(), logprobs)
    logprobs.requires_grad_()
    out = LOSSES["cispo"](logprobs, proximal_logprobs_N=proximal, advantages_N=advantages)
    out.loss_N.sum().backward()
    assert torch.allclose(logprobs.grad, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_plain_policy_gradient(name):
    _, proximal, advantages = random_tokens(0)
    logprobs = proximal.clone().requires_grad_()
    out = LOSSES[name](logprobs, proximal_logprobs_N=proximal, advantages_N=advantages)
    out.loss_N.sum().backward()
    assert torch.allclose(logprobs.grad, -advantages)
    assert (out.ratio_N == 1).all() and (out.clipped_N == 0).all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shift", [1e4, -1e4, 88.0, -104.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_huge_log_ratios_stay_finite(name, shift, advantage):
    logprobs = torch.full((8,), -0.5, requires_grad=True)
    out = LOSSES[name](
        logprobs,
        proximal_logprobs_N=torch.full((8,), -0.5 - shift),
        advantages_N=torch.full((8,), advantage),
    )
    out.loss_N.sum().backward()
    for values in (*out, logprobs.grad):
        assert values.dtype == torch.float32 and torch.isfinite(values).all()


POISON = [
    (NAN, -1.0, 1.0),
    (-INF, -1.0, 1.0),
    (-1.0, NAN, 1.0),
    (-1.0, -INF, 1.0),
    (-1.0, -1.0, NAN),
]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("poison", POISON)
def test_a_token_without_weight_counts_nothing_whatever_it_holds(name, poison):
    # Its whole sequence has no weight: in GSPO a token is part of its sequence's ratio.
    logprobs, proximal, advantages = (x.float() for x in random_tokens(1))
    weights = token_weights((SEQUENCE != 2).int(), lengths_B=LENGTHS)
    results = []
    for place in (None, 5):
        inputs = [logprobs.clone(), proximal.clone(), advantages.clone()]
        if place is not None:
            for values, bad in zip(inputs, poison, strict=True):
                values[place] = bad
        inputs[0].requires_grad_()
        out = LOSSES[name](inputs[0], proximal_logprobs_N=inputs[1], advantages_N=inputs[2])
        total = weighted_sum(out.loss_N, weights_N=weights)
        total.backward()
        results.append((total.item(), inputs[0].grad.tolist()))
    assert results[0] == results[1] and math.isfinite(results[0][0])


@pytest.mark.parametrize("name", LOSSES)
def test_a_token_with_weight_that_is_not_finite_shows_in_the_loss(name):
    logprobs, proximal, advantages = random_tokens(1)
    logprobs[5] = NAN
    out = LOSSES[name](logprobs, proximal_logprobs_N=proximal, advantages_N=advantages)
    assert math.isnan(out.loss_N.sum().item())


@pytest.mark.parametrize("name", ["ppo", "dual", "cispo", "policy_gradient", "gspo"])
def test_no_tokens_give_an_empty_loss(name):
    options = {"sequence_N": torch.zeros(0, dtype=torch.long), "num_sequences": 0}
    none = torch.zeros(0, requires_grad=True)
    out = LOSSES[name](
        none,
        proximal_logprobs_N=torch.zeros(0),
        advantages_N=torch.zeros(0),
        **(options if name == "gspo" else {}),
    )
    out.loss_N.sum().backward()
    assert out.loss_N.shape == (0,) and none.grad.shape == (0,)


@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_is_computed_in_float32_and_float64_stays(name):
    for given_type, found in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        logprobs, proximal, advantages = (x.to(given_type) for x in random_tokens(2))
        out = LOSSES[name](logprobs, proximal_logprobs_N=proximal, advantages_N=advantages)
        assert all(x.dtype == found for x in out)


@unhurried
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.integers(0, 99),
    st.randoms(use_true_random=False),
)
def test_the_order_of_tokens_does_not_matter(lengths, seed, random):
    total = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    logprobs, proximal, advantages = torch.randn(3, total, generator=generator).double()
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    order = list(range(total))
    random.shuffle(order)

    def loss(index):
        return gspo_loss(
            logprobs[index],
            proximal_logprobs_N=proximal[index],
            advantages_N=advantages[index],
            sequence_N=owner[index],
            num_sequences=len(lengths),
            eps_clip=0.3,
        ).loss_N

    assert torch.allclose(loss(order), loss(list(range(total)))[order])
