"""Scores: the same bytes in any order, one for each sample, and what was given up goes."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from slurm_rl.errors import CorruptError
from slurm_rl.rollout.samples import Sample, SampleBatch, pack_samples
from slurm_rl.rollout.scores import (
    Score,
    apply_scores,
    drop_ungraded,
    read_scores,
    write_scores,
)


def make_batch(num_groups: int = 3, num: int = 2) -> SampleBatch:
    """Ungraded samples; sample k of group g has g + k + 1 response tokens."""
    return pack_samples(
        [
            Sample(
                g, k, (g,), (10 * g + k,) * (g + k + 1), (-0.5,) * (g + k + 1), (1,) * (g + k + 1)
            )
            for g in range(num_groups)
            for k in range(num)
        ]
    )


def make_scores(num_groups: int = 3, num: int = 2) -> list[Score]:
    return [
        Score(g, k, g + k / 4, {"part": float(k)}) for g in range(num_groups) for k in range(num)
    ]


def written(folder: Path, scores: list[Score]) -> Path:
    folder.mkdir()
    assert write_scores(folder, scores) == ["scores.jsonl", "scores.safetensors"]
    return folder / "scores.safetensors"


@given(st.permutations(range(6)))
def test_bytes_do_not_depend_on_the_order_of_arrival(tmp_path_factory, order) -> None:  # type: ignore[no-untyped-def]
    found = []
    for arrangement in (range(6), order):
        root = tmp_path_factory.mktemp("scores")
        scores = make_scores()
        names = write_scores(root, [scores[k] for k in arrangement])
        found.append([(root / name).read_bytes() for name in names])
    assert found[0] == found[1]


def test_rewards_come_to_their_samples_from_every_shard(tmp_path: Path) -> None:
    scores = make_scores()
    paths = [written(tmp_path / "b", scores[1::2]), written(tmp_path / "a", scores[::2])]
    batch = apply_scores(make_batch(), read_scores(paths))
    assert batch.rewards.tolist() == [0.0, 0.25, 1.0, 1.25, 2.0, 2.25]
    lines = [json.loads(line) for line in (tmp_path / "a/scores.jsonl").read_text().splitlines()]
    assert lines[1] == {"group_index": 1, "index": 0, "reward": 1.0, "rewards": {"part": 0.0}}


@pytest.mark.parametrize("reward", [None, math.nan])
def test_a_group_that_was_given_up_goes_as_a_whole(tmp_path: Path, reward: float | None) -> None:
    scores = make_scores()
    scores[3] = dataclasses.replace(scores[3], reward=reward)
    path = written(tmp_path / "a", scores)
    assert json.loads((tmp_path / "a/scores.jsonl").read_text().splitlines()[3])["reward"] is None
    whole = make_batch()
    kept, num_dropped = drop_ungraded(apply_scores(whole, read_scores([path])))
    assert num_dropped == 1
    assert list(zip(kept.group_index, kept.sample_index, strict=True)) == [
        (0, 0),
        (0, 1),
        (2, 0),
        (2, 1),
    ]
    # Each kept sample has its own tokens still.
    for here, there in enumerate((0, 1, 4, 5)):
        np.testing.assert_array_equal(kept.sample_tokens(here), whole.sample_tokens(there))
    assert not np.isnan(kept.rewards).any()


def test_all_groups_may_be_given_up(tmp_path: Path) -> None:
    scores = [dataclasses.replace(score, reward=None) for score in make_scores()]
    scored = apply_scores(make_batch(), read_scores([written(tmp_path / "a", scores)]))
    kept, num_dropped = drop_ungraded(scored)
    assert (len(kept), num_dropped) == (0, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s[:-1], "sample 1 of group 2 has no score"),
        (lambda s: [*s, Score(9, 0, 1.0)], "sample 0 of group 9 has a score, but is not in"),
        (lambda s: [*s, s[2]], "sample 0 of group 1 has two scores"),
        (lambda s: [], "sample 0 of group 0 has no score"),
    ],
)
def test_each_sample_has_exactly_one_score(tmp_path: Path, change, said: str) -> None:  # type: ignore[no-untyped-def]
    path = written(tmp_path / "a", change(make_scores()))
    with pytest.raises(CorruptError, match=said):
        apply_scores(make_batch(), read_scores([path]))


def test_files_that_are_not_whole_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a", make_scores())
    good = read_scores([path])
    arrays = {name: getattr(good, name) for name in good.__dataclass_fields__}
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptError, match=r"scores\.safetensors: not a whole"):
        read_scores([path])
    save_file(arrays | {"rewards": good.rewards.astype(np.float64)}, path)
    with pytest.raises(CorruptError, match=r"scores\.safetensors: tensor rewards"):
        read_scores([path])
    save_file(arrays | {"rewards": good.rewards[:-1]}, path)
    with pytest.raises(CorruptError, match="do not fit"):
        read_scores([path])
