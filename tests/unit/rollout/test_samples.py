from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from slurm_rl.errors import CorruptError
from slurm_rl.rollout.samples import (
    Sample,
    as_version,
    pack_samples,
    read_samples,
    take_samples,
    write_samples,
    write_tensors,
)


def make_sample(group: int, index: int, *, length: int = 2, **changes: object) -> Sample:
    values = {
        "group_index": group,
        "sample_index": index,
        "prompt_tokens": tuple(range(group + 1)),
        "response_tokens": tuple(100 * group + 10 * index + k for k in range(length)),
        "rollout_logprobs": tuple(-0.1 * (k + index) for k in range(length)),
        "loss_mask": (1,) * length,
        "reward": group + index / 4,
        "label": "ü",
    }
    return Sample(**(values | changes))  # type: ignore[arg-type]


def test_shards_come_back_sorted_with_their_own_tokens(tmp_path: Path) -> None:
    samples = [make_sample(g, i, length=1 + (g + i) % 3) for g in range(4) for i in range(2)]
    for shard in range(2):
        (tmp_path / f"s{shard}").mkdir()
        mine = [s for s in samples if s.group_index % 2 == shard]
        assert write_samples(tmp_path / f"s{shard}", mine[::-1]) == [
            "samples.jsonl",
            "samples.safetensors",
        ]
    batch = read_samples([tmp_path / "s1/samples.safetensors", tmp_path / "s0/samples.safetensors"])
    assert len(batch) == 8
    for i, sample in enumerate(samples):
        assert batch.group_index[i] == sample.group_index
        assert batch.sample_tokens(i).tolist() == sample.tokens
        part = batch.response_slice(i)
        np.testing.assert_allclose(batch.rollout_logprobs[part], sample.rollout_logprobs)
        assert batch.rewards[i] == sample.reward


@given(st.permutations(range(6)))
def test_bytes_do_not_depend_on_the_order_of_arrival(tmp_path_factory, order) -> None:  # type: ignore[no-untyped-def]
    samples = [make_sample(k // 2, k % 2) for k in range(6)]
    written = []
    for arrangement in (range(6), order):
        root = tmp_path_factory.mktemp("samples")
        names = write_samples(root, [samples[k] for k in arrangement])
        written.append([(root / name).read_bytes() for name in names])
    assert written[0] == written[1]


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write_samples(tmp_path, [make_sample(0, 0)])
    path = tmp_path / "samples.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptError, match=r"samples\.safetensors: not a whole"):
        read_samples([path])


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_samples(tmp_path, [make_sample(0, 0), make_sample(0, 1)])
    path = tmp_path / "samples.safetensors"
    batch = read_samples([path])
    arrays = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    del arrays["routed_experts"]
    save_file(arrays | {"tokens": batch.tokens[:-1]}, path)
    with pytest.raises(CorruptError, match="do not fit"):
        read_samples([path])
    save_file(arrays | {"rewards": batch.rewards.astype(np.float64)}, path)
    with pytest.raises(CorruptError, match="tensor rewards"):
        read_samples([path])


def test_what_a_sample_leaves_out_follows_from_the_rest(tmp_path: Path) -> None:
    """A rollout of its own, all tokens of the weights that finished it, and no reward: NaN."""
    plain = make_sample(0, 1, weights_version=4, reward=None)
    told = make_sample(0, 2, weights_version=4, token_versions=(3, 4), rollout_index=1)
    write_samples(tmp_path, [told, plain])
    batch = read_samples([tmp_path / "samples.safetensors"])
    assert batch.token_versions.tolist() == [4, 4, 3, 4]
    assert batch.rollout_index.tolist() == [1, 1]
    assert np.isnan(batch.rewards).tolist() == [True, False]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=8), st.data())
def test_some_samples_in_any_order_keep_what_is_theirs(sizes, data) -> None:  # type: ignore[no-untyped-def]
    samples = [make_sample(g, i, length=n) for i, (g, n) in enumerate(sizes)]
    order = data.draw(
        st.lists(st.sampled_from(range(len(samples))), max_size=8) if samples else st.just([])
    )
    taken = take_samples(pack_samples(samples), np.array(order, np.intp))
    expected = pack_samples([samples[i] for i in order])
    for name in expected.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(taken, name), getattr(expected, name), name)


def test_versions_move_together_and_not_below_zero() -> None:
    samples = [make_sample(0, 0, weights_version=4, token_versions=(1, 4)), make_sample(0, 1)]
    batch = as_version(pack_samples(samples), 2)
    assert batch.weights_version.tolist() == [2, 2]
    assert batch.token_versions.tolist() == [0, 2, 2, 2]
    same = as_version(pack_samples(samples[:1]), 4)
    assert same.token_versions.tolist() == [1, 4] and same.token_versions.dtype == np.int32


def test_arrays_written_alone_read_back(tmp_path: Path) -> None:
    batch = pack_samples([make_sample(0, 0), make_sample(0, 1)])
    assert write_tensors(tmp_path, batch) == ["samples.safetensors"]
    again = read_samples([tmp_path / "samples.safetensors"])
    for name in batch.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(again, name), getattr(batch, name), name)
