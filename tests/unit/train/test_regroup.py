"""Other micro-batches of the same sequences: what is computed of them comes back in its place."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.rollout.samples import SampleBatch
from slurm_rl.train.batch import pack_microbatch
from slurm_rl.train.regroup import regroup


def random_samples(num, seed):
    g = np.random.default_rng(seed)
    prompts, responses = (g.integers(1, 9, num).astype(np.int32) for _ in range(2))
    num_tokens, num_trained = int((prompts + responses).sum()), int(responses.sum())
    return SampleBatch(
        tokens=g.integers(1, 999, num_tokens).astype(np.int32),
        prompt_lengths=prompts,
        response_lengths=responses,
        rollout_logprobs=-g.random(num_trained).astype(np.float32),
        loss_mask=(g.random(num_trained) < 0.7).astype(np.uint8),
        token_versions=np.zeros(num_trained, np.int32),
        rewards=g.random(num).astype(np.float32),
        group_index=np.arange(num),
        sample_index=np.zeros(num, np.int64),
        rollout_index=np.zeros(num, np.int64),
        weights_version=np.zeros(num, np.int32),
        truncated=np.zeros(num, np.uint8),
    )


def fingerprints(batch):
    """A number for each trained token, of all tokens of its sequence up to it."""
    starts = np.cumsum([0, *batch.lengths])
    flat = batch.tokens_bS.flatten()
    found = []
    for position, target, row in zip(
        batch.position_N.tolist(), batch.targets_N.tolist(), batch.sequence_N.tolist(), strict=True
    ):
        assert starts[row] <= position < starts[row + 1]
        seen = flat[starts[row] : position + 1].tolist()
        found.append(float(hash((*seen, target)) % 1000003))
    return torch.tensor(found)


@given(
    st.lists(st.lists(st.integers(0, 11), max_size=4, unique=True), min_size=1, max_size=5),
    st.integers(1, 80),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 50),
)
def test_every_token_gets_its_own_value_back(plan, max_tokens, multiple, seed):
    samples = random_samples(12, seed)
    num = len(samples.loss_mask)
    batches = [
        pack_microbatch(
            samples,
            members,
            arrays_R={},
            weights_R=torch.ones(num),
            per_token=False,
            length_multiple=multiple,
            sequence_multiple=2,
        )
        for members in plan
    ]
    passes, put_back = regroup(batches, max_tokens=max_tokens, multiple=multiple)
    for batch in passes:
        assert sum(batch.lengths) == batch.tokens_bS.shape[1]
        assert batch.tokens_bS.shape[1] % multiple == 0
        assert len(batch.lengths) == 1 or sum(batch.lengths) <= max_tokens + multiple
        flat = batch.tokens_bS.flatten()
        assert torch.equal(flat[batch.position_N + 1], batch.targets_N)
    found = put_back([fingerprints(batch) for batch in passes])
    for values, batch in zip(found, batches, strict=True):
        assert torch.equal(values, fingerprints(batch))
