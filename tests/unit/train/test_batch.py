"""Steps, ranks, micro-batches: every sample once, every trained token in its place."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.errors import DataError
from slurm_rl.rollout.samples import SampleBatch
from slurm_rl.train.batch import (
    check_samples,
    conversation_sizes,
    pack_microbatch,
    plan_steps,
    rollout_weights,
)
from slurm_rl.train.returns import sample_advantages, spread


@pytest.fixture
def samples():
    """Prompts [1 2], [3], [4 5 6]; responses [10 11], [12 13 14], [15]; 13 is masked."""
    return SampleBatch(
        tokens=np.array([1, 2, 10, 11, 3, 12, 13, 14, 4, 5, 6, 15], np.int32),
        prompt_lengths=np.array([2, 1, 3], np.int32),
        response_lengths=np.array([2, 3, 1], np.int32),
        rollout_logprobs=-np.arange(1, 7, dtype=np.float32),
        loss_mask=np.array([1, 1, 1, 0, 1, 1], np.uint8),
        token_versions=np.zeros(6, np.int32),
        rewards=np.array([1.0, 0.0, 0.5], np.float32),
        group_index=np.array([0, 0, 1], np.int64),
        sample_index=np.array([0, 1, 0], np.int64),
        rollout_index=np.array([0, 1, 0], np.int64),
        weights_version=np.zeros(3, np.int32),
        truncated=np.zeros(3, np.uint8),
    )


def pack(samples, members, **options):
    return pack_microbatch(
        samples,
        members,
        arrays_R={"advantages": spread(torch.tensor([0.1, 0.2, 0.3]), samples)},
        weights_R=options.pop("weights_R", rollout_weights(samples, per_token=False)),
        per_token=options.pop("per_token", False),
        **options,
    )


def test_each_token_is_predicted_from_the_position_before_it(samples):
    batch = pack(samples, [0, 1, 2])
    assert batch.tokens_bS.tolist() == [[1, 2, 10, 11], [3, 12, 13, 14], [4, 5, 6, 15]]
    assert batch.targets_N.tolist() == [10, 11, 12, 14, 15]
    flat = batch.tokens_bS.flatten()
    assert flat[batch.position_N + 1].tolist() == batch.targets_N.tolist()
    assert batch.position_N.tolist() == [1, 2, 4, 6, 10]


def test_values_go_with_their_tokens(samples):
    batch = pack(samples, [0, 1, 2])
    assert batch.rollout_N.tolist() == [-1, -2, -3, -5, -6]
    assert batch.weights_N.tolist() == [0.5, 0.5, 0.5, 0.5, 1.0]
    assert torch.allclose(batch.arrays["advantages"], torch.tensor([0.1, 0.1, 0.2, 0.2, 0.3]))
    assert batch.denominator == 3
    assert pack(samples, [0, 1, 2], per_token=True).denominator == 5


def test_a_part_holds_what_the_whole_does(samples):
    whole, parts = pack(samples, [0, 1, 2]), [pack(samples, [i]) for i in range(3)]
    for name in ("targets_N", "weights_N", "rollout_N"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(joined, getattr(whole, name)), name


def test_no_member_is_one_empty_sequence(samples):
    batch = pack(samples, [], length_multiple=4)
    assert batch.tokens_bS.shape == (1, 4)
    assert len(batch.targets_N) == 0 and batch.denominator == 0


def test_lengths_are_rounded_up_at_the_end(samples):
    batch = pack(samples, [0], length_multiple=3)
    assert batch.tokens_bS.tolist() == [[1, 2, 10, 11, 0, 0]]


@given(
    num=st.integers(1, 40), step=st.integers(1, 16), micro=st.integers(1, 8), dp=st.integers(1, 5)
)
def test_every_sample_is_trained_on_once_and_in_order(num, step, micro, dp):
    plan = plan_steps([1] * num, global_batch_size=step, micro_batch_size=micro, dp_size=dp)
    flat = [i for ranks in plan for batches in ranks for batch in batches for i in batch]
    assert flat == list(range(num))
    assert len(plan) == -(-num // step)
    for ranks in plan:
        assert len(ranks) == dp and all(batches for batches in ranks)
        assert all(len(batch) <= micro for batches in ranks for batch in batches)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("rewards", np.array([1.0, np.nan, 0.5], np.float32), "reward"),
        ("tokens", np.full(12, 99, np.int32), "vocabulary of 20"),
        ("prompt_lengths", np.array([3, 0, 3], np.int32), "empty prompt"),
        ("rollout_logprobs", np.full(6, np.inf, np.float32), "log-probability"),
    ],
)
def test_samples_that_cannot_be_trained_on_are_refused(samples, field, value, said):
    check_samples(samples, vocab_size=20, max_positions=4)
    with pytest.raises(DataError, match=said):
        check_samples(
            dataclasses.replace(samples, **{field: value}), vocab_size=20, max_positions=4
        )


def test_what_is_masked_may_be_anything(samples):
    logprobs = samples.rollout_logprobs.copy()
    logprobs[3] = -np.inf
    check_samples(
        dataclasses.replace(samples, rollout_logprobs=logprobs), vocab_size=20, max_positions=4
    )


def test_too_long_is_refused(samples):
    with pytest.raises(DataError, match="4 tokens, the model takes 3"):
        check_samples(samples, vocab_size=20, max_positions=3)


def conversations(samples):
    """The first two samples are parts of one conversation."""
    return dataclasses.replace(samples, rollout_index=np.array([0, 0, 0], np.int64))


def test_a_conversation_of_two_samples_counts_once(samples):
    parts = conversations(samples)
    assert conversation_sizes(parts).tolist() == [2, 1]
    # Four of its five tokens are trained on: each is a quarter of the conversation.
    batch = pack(parts, [0, 1, 2], weights_R=rollout_weights(parts, per_token=False))
    assert batch.weights_N.tolist() == [0.25, 0.25, 0.25, 0.25, 1.0]
    assert batch.denominator == 2
    # Wherever its parts go, together they add one.
    assert [pack(parts, [i]).denominator for i in range(3)] == [1, 0, 1]
    assert pack(parts, [0, 1, 2], per_token=True).denominator == 5


def test_a_step_takes_whole_conversations(samples):
    sizes = [2, 1, 3, 1]
    plan = plan_steps(sizes, global_batch_size=2, micro_batch_size=2, dp_size=2)
    assert plan == [[[[0, 1]], [[2]]], [[[3, 4]], [[5, 6]]]]


def test_a_conversation_counts_once_in_its_groups_statistics(samples):
    """Rewards 4 (of a conversation of two), 1, 1 in a group: mean 2, not 2.5."""
    four = dataclasses.replace(
        samples,
        rewards=np.array([4.0, 4.0, 1.0, 1.0], np.float32),
        group_index=np.zeros(4, np.int64),
        rollout_index=np.array([0, 0, 1, 2], np.int64),
    )
    assert sample_advantages(four, divide_by_std=False).tolist() == [2.0, 2.0, -1.0, -1.0]
    scaled = sample_advantages(four, divide_by_std=True)
    assert torch.allclose(scaled, torch.tensor([2.0, 2.0, -1.0, -1.0]) / 3**0.5, atol=1e-5)


def test_a_sample_that_is_not_trained_on_counts_in_its_group(samples):
    """Its reward moves the others' advantages; its own tokens have no place in the batch."""
    masked = dataclasses.replace(samples, loss_mask=np.array([0, 0, 1, 1, 1, 1], np.uint8))
    advantages = sample_advantages(masked, divide_by_std=False)
    assert advantages.tolist() == [0.5, -0.5, 0.0]
    batch = pack(masked, [0, 1])
    assert batch.targets_N.tolist() == [12, 13, 14] and batch.denominator == 2


def test_parts_of_a_conversation_that_are_apart_are_refused(samples):
    apart = dataclasses.replace(
        samples,
        group_index=np.zeros(3, np.int64),
        rollout_index=np.array([0, 1, 0], np.int64),
    )
    with pytest.raises(DataError, match="do not follow each other"):
        conversation_sizes(apart)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 3))
def test_every_part_of_a_conversation_is_in_one_step(sizes, step, dp):
    plan = plan_steps(sizes, global_batch_size=step, micro_batch_size=2, dp_size=dp)
    flat = [[i for batches in ranks for batch in batches for i in batch] for ranks in plan]
    owner = [u for u, size in enumerate(sizes) for _ in range(size)]
    assert [i for members in flat for i in members] == list(range(sum(sizes)))
    for number, members in enumerate(flat):
        assert {owner[i] // step for i in members} == {number}


def test_tokens_of_earlier_weights_are_marked(samples):
    carried = dataclasses.replace(
        samples,
        token_versions=np.array([2, 3, 3, 3, 2, 3], np.int32),
        weights_version=np.full(3, 3, np.int32),
    )
    assert pack(carried, [0, 1, 2]).served_N.tolist() == [False, True, True, False, True]
