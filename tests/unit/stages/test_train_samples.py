"""What a train stage reads and refuses: versions of tokens, scores, samples without rewards."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurm_rl.config.schema import Settings
from slurm_rl.errors import CorruptError, DataError
from slurm_rl.rollout.samples import Sample, write_samples
from slurm_rl.rollout.scores import Score, write_scores
from slurm_rl.stages.train_samples import read_batch
from slurm_rl.storage.durable import seal_files
from slurm_rl.types import Input, Order


def settings(*, lag: int = 0, **rollout: Any) -> Settings:
    data = {"prompt_data": "p.jsonl", "rollout_batch_size": 2, "n_samples_per_prompt": 2}
    return Settings.model_validate(
        {
            "run": {"name": "a", "dir": "/nowhere"},
            "num_rollout": 9,
            "chain": {"lag": lag},
            "rollout": data | rollout,
            "train": {"global_batch_size": 4},
        }
    )


def sample(group: int, index: int, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "prompt_tokens": (1, 2),
        "response_tokens": (3, 4, 5),
        "rollout_logprobs": (-0.1, -0.2, -0.3),
        "loss_mask": (1, 1, 1),
        "reward": float(index),
        "weights_version": 4,
    }
    return Sample(group, index, **(values | changes))


def four(**changes: Any) -> list[Sample]:
    return [sample(g, k, **changes) for g in range(2) for k in range(2)]


@pytest.fixture
def order_of(tmp_path: Path):  # type: ignore[no-untyped-def]
    """`order_of(samples, scores=None)`: an order to train iteration 4 on them."""

    def as_input(role: str, names: list[str], folder: Path, **content: Any) -> Input:
        entries = [dataclasses.asdict(entry) for entry in seal_files(folder, names)]
        files = {name: str(folder / name) for name in names}
        return Input(
            role, 4, role, f"{role}-digest", str(folder), files, {"files": entries} | content
        )

    def make(
        samples: list[Sample], scores: list[Score] | None = None, of: str = "rollout-digest"
    ) -> Order:
        (tmp_path / "rollout").mkdir()
        inputs = {
            "rollout": as_input(
                "rollout", write_samples(tmp_path / "rollout", samples), tmp_path / "rollout"
            )
        }
        if scores is not None:
            (tmp_path / "score").mkdir()
            names = write_scores(tmp_path / "score", scores)
            inputs["score"] = as_input("score", names, tmp_path / "score", parents={"rollout": of})
        return Order("", "", "train", 4, 0, str(tmp_path), "", "", inputs)

    return make


def test_samples_without_a_reward_are_refused_by_name(order_of) -> None:  # type: ignore[no-untyped-def]
    samples = four()
    samples[2] = dataclasses.replace(samples[2], reward=None)
    with pytest.raises(DataError, match="sample 0 of group 1 has no reward"):
        read_batch(order_of(samples), settings())


def test_the_rewards_of_the_score_stage_win(order_of) -> None:  # type: ignore[no-untyped-def]
    scores = [Score(g, k, 10.0 * g + k) for g in range(2) for k in range(2)]
    batch = read_batch(order_of(four(reward=None), scores), settings())
    assert batch.samples.rewards.tolist() == [0.0, 1.0, 10.0, 11.0]
    assert batch.metrics()["rollout/raw_reward"] == 5.5
    assert batch.metrics()["train/groups_dropped"] == 0


def test_a_group_that_the_score_stage_gave_up_is_left_out_and_counted(order_of) -> None:  # type: ignore[no-untyped-def]
    scores = [Score(g, k, None if (g, k) == (0, 1) else 2.0) for g in range(2) for k in range(2)]
    batch = read_batch(order_of(four(), scores), settings())
    assert batch.samples.group_index.tolist() == [1, 1]
    assert batch.metrics()["train/groups_dropped"] == 1


def test_without_any_group_left_it_says_so(order_of) -> None:  # type: ignore[no-untyped-def]
    scores = [Score(g, k, None) for g in range(2) for k in range(2)]
    with pytest.raises(DataError, match="gave up all 2 groups"):
        read_batch(order_of(four(), scores), settings())


def test_scores_of_another_rollout_are_refused(order_of) -> None:  # type: ignore[no-untyped-def]
    scores = [Score(g, k, 1.0) for g in range(2) for k in range(2)]
    with pytest.raises(CorruptError, match="are of rollout another, not rollout-digest"):
        read_batch(order_of(four(), scores, of="another"), settings())


def test_a_damaged_score_file_is_refused(order_of) -> None:  # type: ignore[no-untyped-def]
    order = order_of(four(), [Score(g, k, 1.0) for g in range(2) for k in range(2)])
    path = Path(order.inputs["score"].files["scores.safetensors"])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"scores\.safetensors: digest"):
        read_batch(order, settings())


CARRIED = {"token_versions": (3, 3, 4), "loss_mask": (0, 0, 1)}


@pytest.mark.parametrize(
    ("changes", "rollout", "said"),
    [
        ({"weights_version": 3}, {}, r"versions \[3\], not 4"),
        ({"token_versions": (4, 4, 5)}, {"partial_rollout": True}, "version 5, newer than 4"),
        (CARRIED, {}, "version 3, older than 4, but rollout.partial_rollout = false"),
        (
            CARRIED | {"loss_mask": (0, 1, 1)},
            {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True},
            "4 tokens of earlier weights are not masked",
        ),
    ],
)
def test_versions_that_cannot_be_are_refused(order_of, changes, rollout, said) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CorruptError, match=said):
        read_batch(order_of(four(**changes)), settings(**rollout))


@pytest.mark.parametrize("masks", [True, False])
def test_tokens_that_a_partial_rollout_brought_along_are_taken(order_of, masks: bool) -> None:  # type: ignore[no-untyped-def]
    changes = CARRIED if masks else CARRIED | {"loss_mask": (1, 1, 1)}
    rollout = {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": masks}
    batch = read_batch(order_of(four(**changes)), settings(**rollout))
    np.testing.assert_array_equal(batch.samples.token_versions, [3, 3, 4] * 4)


def test_with_a_lag_the_version_before_is_served(order_of) -> None:  # type: ignore[no-untyped-def]
    order = order_of(four(weights_version=3))
    assert len(read_batch(order, settings(lag=1)).samples) == 4
    with pytest.raises(CorruptError, match=r"versions \[3\], not 4"):
        read_batch(order, settings())
