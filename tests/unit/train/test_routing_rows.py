"""The experts of a token stay with it, however its sequence is padded, packed and regrouped."""

import dataclasses

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.rollout.samples import SampleBatch
from slurm_rl.train.batch import pack_microbatch
from slurm_rl.train.regroup import regroup

LAYERS, TOP_K = 3, 2


def numbered(lengths):
    """Samples whose tokens are 1, 2, 3, …, and ids that follow from the token."""
    prompts = np.array([prompt for prompt, _ in lengths], np.int32)
    responses = np.array([response for _, response in lengths], np.int32)
    tokens = np.arange(1, int((prompts + responses).sum()) + 1, dtype=np.int32)
    num, trained = len(lengths), int(responses.sum())
    zeros = np.zeros(num, np.int64)
    return SampleBatch(
        tokens=tokens,
        prompt_lengths=prompts,
        response_lengths=responses,
        rollout_logprobs=np.zeros(trained, np.float32),
        loss_mask=np.ones(trained, np.uint8),
        token_versions=np.zeros(trained, np.int32),
        rewards=np.zeros(num, np.float32),
        group_index=np.arange(num),
        sample_index=zeros,
        rollout_index=zeros,
        weights_version=np.zeros(num, np.int32),
        truncated=np.zeros(num, np.uint8),
        routed_experts=experts_of(tokens),
    )


def experts_of(tokens):
    """uint8[…, L, K]; of token 0, which is padding, the first K."""
    places = np.arange(LAYERS * TOP_K).reshape(LAYERS, TOP_K)
    ids = (np.asarray(tokens)[..., None, None] * 7 + places) % 251
    padding = np.broadcast_to(np.arange(TOP_K), ids.shape)
    return np.where(np.asarray(tokens)[..., None, None] == 0, padding, ids).astype(np.uint8)


LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=8, max_size=8)
MEMBERS = st.lists(st.integers(0, 7), max_size=4, unique=True)


@given(LENGTHS, MEMBERS, st.sampled_from([1, 2, 4, 8]), st.sampled_from([None, 1, 2, 4]))
def test_packing_keeps_them_together(lengths, members, multiple, sequence_multiple):
    samples = numbered(lengths)
    options = {
        "arrays_R": {},
        "weights_R": torch.ones(len(samples.loss_mask)),
        "per_token": False,
        "length_multiple": multiple,
        "sequence_multiple": sequence_multiple,
    }
    batch = pack_microbatch(samples, members, routed_TLK=samples.routed_experts, **options)
    assert batch.routed_bSLK.dtype == torch.uint8
    np.testing.assert_array_equal(batch.routed_bSLK, experts_of(batch.tokens_bS))
    plain = pack_microbatch(samples, members, **options)
    assert plain.routed_bSLK is None
    for field in dataclasses.fields(batch):
        mine, other = getattr(batch, field.name), getattr(plain, field.name)
        if isinstance(mine, torch.Tensor) and other is not None:
            assert torch.equal(mine, other), field.name


@given(LENGTHS, st.lists(MEMBERS, min_size=1, max_size=4), st.integers(1, 60), st.booleans())
def test_other_micro_batches_keep_them_together(lengths, plan, max_tokens, is_replayed):
    samples = numbered(lengths)
    batches = [
        pack_microbatch(
            samples,
            members,
            arrays_R={},
            weights_R=torch.ones(len(samples.loss_mask)),
            per_token=False,
            length_multiple=4,
            sequence_multiple=2,
            routed_TLK=samples.routed_experts if is_replayed else None,
        )
        for members in plan
    ]
    passes, _ = regroup(batches, max_tokens=max_tokens, multiple=4)
    for batch in passes:
        if not is_replayed:
            assert batch.routed_bSLK is None
        else:
            np.testing.assert_array_equal(batch.routed_bSLK, experts_of(batch.tokens_bS))
