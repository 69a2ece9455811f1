"""Advantages of tokens: by hand, and against loops that go token by token."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_rl.algorithms.advantages import centred_rewards
from slurm_rl.algorithms.token_advantages import (
    gae,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    token_rewards,
    whiten,
)

#: A busy machine is no failure.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NAN = float("nan")


def T(*values):
    return torch.tensor(values, dtype=torch.float64)


def N(*values):
    return torch.tensor(values, dtype=torch.long)


def test_a_reward_is_at_the_last_trained_token_less_its_kl():
    # Samples of 3 (the last masked), 1, 2 (all masked) and 0 tokens, then 2.
    found = token_rewards(
        T(10, 20, 30, 40, 50),
        lengths_B=N(3, 1, 2, 0, 2),
        mask_R=N(1, 1, 0, 1, 0, 0, 1, 1),
        kl_R=T(1, 2, NAN, 3, NAN, NAN, 4, 5),
        kl_coef=0.1,
    )
    assert found.tolist() == pytest.approx([-0.1, 10 - 0.2, 0, 20 - 0.3, 0, 0, -0.4, 50 - 0.5])


def test_without_a_kl_only_the_reward_stands():
    found = token_rewards(torch.tensor([2.0]), lengths_B=N(3), mask_R=N(1, 1, 1))
    assert found.tolist() == [0.0, 0.0, 2.0] and found.dtype == torch.float32


def test_gae_by_hand():
    # gamma 0.5, lambda 0.5, so a next advantage counts 0.25.
    # t=2: delta = 1 + 0 - 0.4 = 0.6                 A = 0.6
    # t=1: delta = 0 + 0.5 × 0.4 - 0.2 = 0           A = 0 + 0.25 × 0.6 = 0.15
    # t=0: delta = 0 + 0.5 × 0.2 - 0.6 = -0.5        A = -0.5 + 0.25 × 0.15 = -0.4625
    advantages, returns = gae(
        T(0, 0, 1),
        values_R=T(0.6, 0.2, 0.4),
        lengths_B=N(3),
        mask_R=N(1, 1, 1),
        gamma=0.5,
        lambd=0.5,
    )
    assert advantages.tolist() == pytest.approx([-0.4625, 0.15, 0.6])
    assert returns.tolist() == pytest.approx([0.1375, 0.35, 1.0])


def test_masked_tokens_are_as_if_they_were_not_there():
    short = gae(
        T(0, 0, 1),
        values_R=T(0.6, 0.2, 0.4),
        lengths_B=N(3),
        mask_R=N(1, 1, 1),
        gamma=0.9,
        lambd=0.8,
    )
    long = gae(
        T(NAN, 0, NAN, NAN, 0, 1, math.inf),
        values_R=T(NAN, 0.6, 9, -math.inf, 0.2, 0.4, NAN),
        lengths_B=N(7),
        mask_R=N(0, 1, 0, 0, 1, 1, 0),
        gamma=0.9,
        lambd=0.8,
    )
    for plain, padded in zip(short, long, strict=True):
        assert padded[[1, 4, 5]].tolist() == pytest.approx(plain.tolist())
        assert padded[[0, 2, 3, 6]].tolist() == [0.0] * 4


def test_gae_with_lambda_one_returns_the_rewards_to_come():
    # Then A + V is the discounted sum of rewards whatever the values are.
    _, returns = gae(
        T(1, 2, 3), values_R=T(7, -5, 3), lengths_B=N(3), mask_R=N(1, 1, 1), gamma=0.5, lambd=1.0
    )
    assert returns.tolist() == pytest.approx([1 + 1 + 0.75, 2 + 1.5, 3])


def test_whiten_by_hand():
    # Trained 1, 2, 3: mean 2, unbiased variance 1.
    found = whiten(T(1, NAN, 2, 3), mask_R=N(1, 0, 1, 1))
    assert found.tolist() == pytest.approx([-1, 0, 0, 1])
    found = whiten(T(1, NAN, 2, 3), mask_R=N(1, 0, 1, 1), shift_mean=False)
    assert found.tolist() == pytest.approx([1, 0, 2, 3])
    # 0, 4: mean 2, variance (4 + 4) / 1 = 8.
    assert whiten(T(0, 4), mask_R=N(1, 1)).tolist() == pytest.approx([-2 / 8**0.5, 2 / 8**0.5])


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_less_than_two_tokens_divides_by_nothing(shift_mean):
    kept = 0.0 if shift_mean else 5.0
    found = whiten(T(5, NAN), mask_R=N(1, 0), shift_mean=shift_mean)
    assert found.tolist() == [kept, 0.0]
    assert whiten(T(NAN, 3), mask_R=N(0, 0), shift_mean=shift_mean).tolist() == [0.0, 0.0]
    assert whiten(T(), mask_R=N(), shift_mean=shift_mean).tolist() == []


def test_whitening_equal_values_gives_zero_not_noise():
    found = whiten(torch.full((1000,), 0.1), mask_R=torch.ones(1000))
    assert found.abs().max() < 1e-6


def test_reinforce_plus_plus_by_hand():
    # gamma 0.5. Sample 1: returns 0.5, 1 (a masked token between). Sample 2: return 3.
    # Values 0.5, 1, 3: mean 1.5, deviations -1, -0.5, 1.5, variance 3.5 / 2 = 1.75.
    found = reinforce_plus_plus(T(0, NAN, 1, 3), lengths_B=N(3, 1), mask_R=N(1, 0, 1, 1), gamma=0.5)
    root = 1.75**0.5
    assert found.tolist() == pytest.approx([-1 / root, 0, -0.5 / root, 1.5 / root])


def test_reinforce_plus_plus_baseline_by_hand():
    # Group means: 1 (samples 0 and 1), 5 (sample 2, alone). Centred: -1 of two tokens, 1 of one
    # token, 0 of one token. Mean -0.25; variance (2 × 0.5625 + 1.5625 + 0.0625) / 3 = 0.916667.
    found = reinforce_plus_plus_baseline(
        T(0, 2, 5), group_index_B=N(4, 4, 9), lengths_B=N(2, 2, 1), mask_R=N(1, 1, 0, 1, 1)
    )
    root = 0.9166667**0.5
    expected = [-0.75 / root, -0.75 / root, 0, 1.25 / root, 0.25 / root]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_equal_rewards_give_zero_in_the_baseline_form():
    found = reinforce_plus_plus_baseline(
        torch.full((4,), 0.1),
        group_index_B=N(0, 0, 0, 1),
        lengths_B=N(1, 2, 3, 1),
        mask_R=torch.ones(7),
    )
    assert found.tolist() == [0.0] * 7


@st.composite
def rollouts(draw):
    """Lengths, and for each token a reward, a value and whether it is trained."""
    lengths = draw(st.lists(st.integers(0, 9), max_size=6))
    numbers = st.floats(-5, 5)
    tokens = [
        [(draw(numbers), draw(numbers), draw(st.booleans())) for _ in range(length)]
        for length in lengths
    ]
    return tokens, draw(st.sampled_from([1.0, 0.9, 0.0])), draw(st.sampled_from([1.0, 0.95, 0.0]))


def flat(tokens, poison=False):
    every = [t for sample in tokens for t in sample]
    rewards = [r if m or not poison else NAN for r, _, m in every]
    values = [v if m or not poison else math.inf for _, v, m in every]
    lengths = torch.tensor([len(s) for s in tokens], dtype=torch.long)
    return (
        T(*rewards),
        T(*values),
        lengths,
        torch.tensor([int(m) for *_, m in every], dtype=torch.uint8),
    )


def gae_by_loop(tokens, gamma, lambd):
    advantages = []
    for sample in tokens:
        out, next_value, next_advantage = [], 0.0, 0.0
        for reward, value, trained in reversed(sample):
            if trained:
                delta = reward + gamma * next_value - value
                next_advantage = delta + gamma * lambd * next_advantage
                next_value = value
            out.append(next_advantage if trained else 0.0)
        advantages += reversed(out)
    return advantages


@unhurried
@given(rollouts())
def test_gae_is_the_loop_whatever_masked_tokens_hold(case):
    tokens, gamma, lambd = case
    rewards, values, lengths, mask = flat(tokens, poison=True)
    advantages, returns = gae(
        rewards, values_R=values, lengths_B=lengths, mask_R=mask, gamma=gamma, lambd=lambd
    )
    expected = T(*gae_by_loop(tokens, gamma, lambd))
    assert torch.allclose(advantages, expected, rtol=1e-9, atol=1e-9)
    kept = torch.where(mask != 0, values, 0.0)
    assert torch.allclose(returns, expected + kept, rtol=1e-9, atol=1e-9)


@unhurried
@given(rollouts())
def test_reinforce_plus_plus_is_the_whitened_loop(case):
    tokens, gamma, _ = case
    rewards, _, lengths, mask = flat(tokens, poison=True)
    found = reinforce_plus_plus(rewards, lengths_B=lengths, mask_R=mask, gamma=gamma)
    # A return is GAE with values of 0 and lambda 1.
    zeroed = [[(r, 0.0, m) for r, _, m in sample] for sample in tokens]
    returns = T(*gae_by_loop(zeroed, gamma, 1.0))[mask != 0]
    if len(returns) > 1:
        expected = (returns - returns.mean()) / (returns.var() + 1e-8).sqrt()
        assert torch.allclose(found[mask != 0], expected, rtol=1e-6, atol=1e-6)
    assert (found[mask == 0] == 0).all()


@unhurried
@given(rollouts(), st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(case, random):
    tokens, gamma, lambd = case
    order = list(range(len(tokens)))
    random.shuffle(order)
    results = []
    for samples in (tokens, [tokens[i] for i in order]):
        rewards, values, lengths, mask = flat(samples)
        both = gae(
            rewards, values_R=values, lengths_B=lengths, mask_R=mask, gamma=gamma, lambd=lambd
        )
        plus = reinforce_plus_plus(rewards, lengths_B=lengths, mask_R=mask, gamma=gamma)
        base = reinforce_plus_plus_baseline(
            torch.tensor([float(len(s)) for s in samples]),
            group_index_B=torch.tensor([len(s) % 2 for s in samples], dtype=torch.long),
            lengths_B=lengths,
            mask_R=mask,
        )
        results.append([x.split(lengths.tolist()) for x in (*both, plus, base)])
    for plain, mixed in zip(*results, strict=True):
        for place, number in enumerate(order):
            assert torch.allclose(mixed[place], plain[number], rtol=1e-5, atol=1e-5)


@unhurried
@given(rollouts())
def test_rewards_of_tokens_add_up_to_those_of_samples_less_the_kl(case):
    tokens, *_ = case
    kl, _, lengths, mask = flat(tokens, poison=True)
    rewards = torch.arange(1.0, len(tokens) + 1, dtype=torch.float64)
    found = token_rewards(rewards, lengths_B=lengths, mask_R=mask, kl_R=kl, kl_coef=0.5)
    for reward, own, sample in zip(rewards, found.split(lengths.tolist()), tokens, strict=True):
        trained = [r for r, _, m in sample if m]
        expected = reward.item() - 0.5 * sum(trained) if trained else 0.0
        assert own.sum().item() == pytest.approx(expected, abs=1e-9)


def test_centring_by_group_is_the_baselines_first_half():
    rewards, groups = T(1, 3, 5), N(0, 0, 1)
    found = reinforce_plus_plus_baseline(
        rewards, group_index_B=groups, lengths_B=N(1, 1, 1), mask_R=N(1, 1, 1)
    )
    assert torch.allclose(
        found, whiten(centred_rewards(rewards, group_index_B=groups), mask_R=N(1, 1, 1))
    )


def test_a_long_response_of_float32_is_summed_without_drift():
    # A thousand samples' length of steps: each return is a plain sum of what follows.
    length = 30_000
    rewards = torch.full((length,), 0.1)
    _, returns = gae(
        rewards, values_R=torch.zeros(length), lengths_B=N(length), mask_R=torch.ones(length)
    )
    assert returns[0].item() == pytest.approx(0.1 * length, rel=1e-5)


def test_nothing_carries_a_gradient():
    rewards = torch.ones(2, requires_grad=True)
    advantages, returns = gae(rewards, values_R=rewards, lengths_B=N(2), mask_R=N(1, 1))
    assert not advantages.requires_grad and not returns.requires_grad
    assert not whiten(rewards, mask_R=N(1, 1)).requires_grad
