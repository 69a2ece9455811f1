"""From rewards and signals to advantages: which estimator, of whom, with what in the reward."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy.batches import batch_of

from slurm_rl.algorithms.numerics import sequence_of_tokens
from slurm_rl.config.train_schema import Teacher, Train
from slurm_rl.errors import ConfigError, CorruptError
from slurm_rl.train import cpu

with cpu.megatron_imports():
    from slurm_rl.train.returns import Signals, estimate


def train(**values):
    return Train.model_validate({"global_batch_size": 8, **values})


def advantages(samples, signals=None, custom=None, **values):
    return estimate(
        samples, train=train(**values), signals=signals or Signals(), custom=custom
    ).advantages_R


def test_a_conversation_counts_once_in_its_groups_statistics():
    """Rewards 4 (of a conversation of two), 1, 1 in a group: mean 2, not 2.5."""
    four = batch_of(
        [1, 2, 1, 1], rewards=[4, 4, 1, 1], group_index=[0] * 4, rollout_index=[0, 0, 1, 2]
    )
    plain = advantages(four, normalize_advantages_std=False)
    assert plain.tolist() == [2.0, 2.0, 2.0, -1.0, -1.0]
    assert torch.allclose(advantages(four), plain / 3**0.5, atol=1e-5)
    # Leave-one-out of three conversations: 4 - 1, 1 - 2.5, 1 - 2.5.
    assert advantages(four, advantage_estimator="rloo").tolist() == [3.0, 3.0, 3.0, -1.5, -1.5]


def test_a_sample_that_is_not_trained_on_counts_in_its_group():
    masked = batch_of([2, 1], rewards=[1, 0], loss_mask=[0, 0, 1])
    assert advantages(masked, normalize_advantages_std=False)[2] == -0.5


KINDS = ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_a_penalty_inside_the_reward_is_that_reward(kind, data):
    """With k1, kl_coef × sum of (policy - reference) off each sample's reward, by group; and by
    token where an estimator knows tokens."""
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    samples = batch_of(lengths)
    total = sum(lengths)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    signals = Signals(
        proximal=torch.from_numpy(rng.normal(size=total)).float(),
        reference=torch.from_numpy(rng.normal(size=total)).float(),
        values=torch.from_numpy(rng.normal(size=total)).float(),
    )
    found = advantages(samples, signals, advantage_estimator=kind, kl_coef=0.3)
    if kind in ("reinforce_plus_plus", "gae"):
        away = 0.3 * (signals.proximal - signals.reference)
        values = signals.values if kind == "gae" else torch.zeros(total)
        # gamma = lambda = 1: return to go, less the value.
        end, expected = 0, []
        for i, length in enumerate(lengths):
            own = -away[end : end + length].clone()
            own[-1] += float(samples.rewards[i])
            expected.append(own.flip(0).cumsum(0).flip(0) - values[end : end + length])
            end += length
        expected = torch.cat(expected)
        if kind == "reinforce_plus_plus":
            if total < 2:
                return
            expected = (expected - expected.mean()) / (expected.var() + 1e-8).sqrt()
        assert torch.allclose(found, expected, atol=1e-4)
        return
    sample_R = sequence_of_tokens(torch.tensor(lengths), num_tokens=total)
    sums = torch.zeros(len(lengths)).index_add_(0, sample_R, signals.proximal - signals.reference)
    lowered = dataclasses.replace(
        samples, rewards=(samples.rewards - 0.3 * sums.numpy()).astype(np.float32)
    )
    assert torch.allclose(found, advantages(lowered, advantage_estimator=kind), atol=1e-3)


def test_whitened_over_the_whole_rollout():
    samples = batch_of([2, 3], rewards=[3, 1], loss_mask=[1, 1, 1, 1, 0])
    found = advantages(samples, normalize_advantages=True)
    kept = found[[0, 1, 2, 3]]
    assert found[4] == 0
    assert abs(float(kept.mean())) < 1e-6 and float(kept.std()) == pytest.approx(1, abs=1e-4)


def test_what_no_stage_computed_is_named():
    samples = batch_of([1, 1])
    with pytest.raises(CorruptError, match="no stage has computed reference"):
        advantages(samples, Signals(proximal=torch.zeros(2)), kl_coef=0.1)
    with pytest.raises(CorruptError, match="gae needs a critic's values"):
        advantages(samples, advantage_estimator="gae")


def test_your_own_estimator_sees_the_episodes():
    samples = batch_of([1, 2])

    def own(episodes, settings):
        assert settings.gamma == 0.5
        return episodes.rewards_B.repeat_interleave(episodes.lengths_B) * 2

    assert advantages(samples, custom=own, gamma=0.5).tolist() == [0.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (torch.zeros(4), r"returned a tensor of \(4,\), not float\[3\]"),
        ([0.0] * 3, "returned list"),
        ((torch.zeros(3),) * 3, "returned tuple"),
    ],
)
def test_another_shape_from_your_own_is_an_error_of_the_configuration(made, said):
    with pytest.raises(ConfigError, match=said):
        advantages(batch_of([1, 2]), custom=lambda *_: made)


def test_with_a_critic_your_own_must_give_targets_too():
    signals = Signals(values=torch.zeros(3))
    with pytest.raises(ConfigError, match="no targets for the critic"):
        advantages(batch_of([1, 2]), signals, custom=lambda *_: torch.zeros(3))


def test_distillation_adds_to_the_tasks_advantages_or_stands_alone():
    signals = Signals(proximal=torch.tensor([-1.0, -2.0]), teacher=torch.tensor([-1.5, -0.5]))
    task = torch.tensor([1.0, -1.0])

    def distilled(**values):
        teacher = Teacher.model_validate({"hf_checkpoint": "/t", "coef": 2.0, **values})
        return signals.distilled(task, teacher).tolist()

    assert distilled() == [1.0 - 1.0, -1.0 + 3.0]
    assert distilled(use_rewards=False) == [-1.0, 3.0]
    assert distilled(top_logprobs_num=4) == task.tolist()
    assert distilled(top_logprobs_num=4, use_rewards=False) == [0.0, 0.0]
