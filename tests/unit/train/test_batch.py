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
from slurm_rl.train.packing import Budget
from slurm_rl.train.returns import spread


def three_samples():
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


@pytest.fixture
def samples():
    return three_samples()


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


def test_a_sample_that_is_not_trained_on_is_in_no_target(samples):
    """Its own tokens have no place in the batch."""
    masked = dataclasses.replace(samples, loss_mask=np.array([0, 0, 1, 1, 1, 1], np.uint8))
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


def test_packed_samples_lie_end_to_end(samples):
    batch = pack(samples, [0, 1, 2], sequence_multiple=1)
    assert batch.tokens_bS.tolist() == [[1, 2, 10, 11, 3, 12, 13, 14, 4, 5, 6, 15]]
    assert batch.lengths == (4, 4, 4) and batch.num_sequences == 3
    assert batch.position_N.tolist() == [1, 2, 4, 6, 10]
    assert batch.sequence_N.tolist() == [0, 0, 1, 1, 2]


def test_packed_samples_and_the_row_are_padded_to_multiples(samples):
    batch = pack(samples, [0, 1], sequence_multiple=3, length_multiple=4)
    assert batch.lengths == (6, 6)
    assert batch.tokens_bS.tolist() == [[1, 2, 10, 11, 0, 0, 3, 12, 13, 14, 0, 0]]
    longer = pack(samples, [0], sequence_multiple=3, length_multiple=4)
    assert longer.lengths == (12,) and longer.tokens_bS.shape == (1, 12)
    assert pack(samples, [], sequence_multiple=2, length_multiple=4).lengths == (4,)


@given(
    members=st.permutations(range(3)),
    length=st.integers(1, 5),
    sequence=st.integers(1, 5),
    per_token=st.booleans(),
)
def test_packed_or_padded_every_trained_token_has_the_same_values(
    members, length, sequence, per_token
):
    made = three_samples()
    padded = pack(made, members, length_multiple=length, per_token=per_token)
    packed = pack(
        made, members, length_multiple=length, sequence_multiple=sequence, per_token=per_token
    )
    for name in ("targets_N", "sequence_N", "weights_N", "rollout_N", "served_N"):
        assert torch.equal(getattr(padded, name), getattr(packed, name)), name
    assert torch.equal(padded.arrays["advantages"], packed.arrays["advantages"])
    assert padded.denominator == packed.denominator
    for batch in (padded, packed):
        flat = batch.tokens_bS.flatten()
        assert flat[batch.position_N + 1].tolist() == batch.targets_N.tolist()
    assert sum(packed.lengths) == packed.tokens_bS.shape[1]
    assert packed.tokens_bS.shape[1] % length == 0
    assert all(own % sequence == 0 for own in packed.lengths)
    # Each sample begins where those before it, with their padding, end.
    starts = [sum(packed.lengths[:row]) for row in range(3)]
    begins = [[1, 2, 10, 11], [3, 12, 13, 14], [4, 5, 6, 15]]
    for start, i in zip(starts, members, strict=True):
        assert packed.tokens_bS[0, start : start + 4].tolist() == begins[i]


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=20),
    step=st.integers(1, 8),
    dp=st.integers(1, 4),
    budget=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_no_sample_is_lost_or_doubled_however_it_is_packed(sizes, step, dp, budget, seed):
    g = np.random.default_rng(seed)
    lengths = g.integers(1, 40, sum(sizes)).tolist()
    order = g.permutation(len(sizes)).tolist()
    plan = plan_steps(
        sizes,
        global_batch_size=step,
        micro_batch_size=1,
        dp_size=dp,
        order=order,
        lengths=lengths,
        budget=Budget(max_tokens=budget),
    )
    flat = [i for ranks in plan for batches in ranks for batch in batches for i in batch]
    assert sorted(flat) == list(range(sum(sizes)))
    assert len(plan) == -(-len(sizes) // step)
    owner = [u for u, size in enumerate(sizes) for _ in range(size)]
    for number, ranks in enumerate(plan):
        assert len(ranks) == dp and all(batches for batches in ranks)
        members = {owner[i] for batches in ranks for batch in batches for i in batch}
        assert members == set(order[number * step : (number + 1) * step])
        for batch in (batch for batches in ranks for batch in batches):
            assert len(batch) <= 1 or sum(lengths[i] for i in batch) <= budget


def test_an_order_of_conversations_is_kept():
    plan = plan_steps(
        [2, 1, 3], global_batch_size=2, micro_batch_size=9, dp_size=1, order=[2, 0, 1]
    )
    assert plan == [[[[3, 4, 5, 0, 1]]], [[[2]]]]
