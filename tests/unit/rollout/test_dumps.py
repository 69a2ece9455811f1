"""slime's dumps: what they hold comes over, what is odd is named, and no code of theirs runs."""

import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.cli.samples import export_samples
from slurm_rl.errors import DataError
from slurm_rl.rollout.dumps import as_version, convert, read_dump
from slurm_rl.rollout.samples import Sample, pack_samples, read_samples


def entry(**changes: Any) -> dict[str, Any]:
    """A sample as slime dumps it; a change to None leaves the field as None."""
    return {
        "group_index": 5,
        "index": 40,
        "prompt": "1+1=",
        "tokens": [1, 2, 3, 7, 8],
        "response": "2!",
        "response_length": 2,
        "label": "2",
        "reward": 1.0,
        "loss_mask": [1, 0],
        "weight_versions": ["3", "4"],
        "rollout_log_probs": [-0.25, -1],
        "remove_sample": False,
        "status": "completed",
        "metadata": {"source": "gsm8k"},
        "train_metadata": None,
        "teacher_log_probs": None,
        "session_id": None,
    } | changes


def dump(path: Path, samples: Any, **top: Any) -> Path:
    value = {"rollout_id": 0, "samples": samples} | top
    if path.suffix == ".pt":
        torch.save(value, path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(value))
    else:
        path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


@pytest.mark.parametrize("suffix", ["pt", "json", "jsonl"])
def test_a_dump_is_read_field_by_field(tmp_path: Path, suffix: str) -> None:
    path = dump(tmp_path / f"rollout_0.{suffix}", [entry(index=41, status="truncated"), entry()])
    first, second = read_dump(path)
    assert first == Sample(
        group_index=5,
        sample_index=0,
        prompt_tokens=(1, 2, 3),
        response_tokens=(7, 8),
        rollout_logprobs=(-0.25, -1),
        loss_mask=(1, 0),
        prompt="1+1=",
        response="2!",
        label="2",
        reward=1.0,
        status="completed",
        weights_version=4,
        metadata={"source": "gsm8k"},
        rollout_index=0,
    )
    assert (second.sample_index, second.rollout_index, second.status) == (1, 1, "truncated")


def test_tensors_are_taken_as_lists(tmp_path: Path) -> None:
    values = entry(tokens=torch.tensor([1, 2, 7]), response_length=1, loss_mask=None)
    values["rollout_log_probs"] = torch.tensor([-0.5])
    (sample,) = read_dump(dump(tmp_path / "a.pt", [values]))
    assert (sample.tokens, sample.loss_mask, sample.rollout_logprobs) == ([1, 2, 7], (1,), (-0.5,))


def test_a_removed_sample_is_kept_for_its_group_and_not_trained_on(tmp_path: Path) -> None:
    (sample,) = read_dump(dump(tmp_path / "a.json", [entry(remove_sample=True)]))
    assert sample.loss_mask == (0, 0) and sample.reward == 1.0


def test_a_reward_of_parts_needs_its_key(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.json", [entry(reward={"math": 0.5, "format": 1})])
    with pytest.raises(DataError, match="sample 0: reward is an object with format, math"):
        read_dump(path)
    with pytest.raises(DataError, match="names none of them"):
        read_dump(path, reward_key="code")
    (sample,) = read_dump(path, reward_key="math")
    assert (sample.reward, sample.rewards) == (0.5, {"math": 0.5, "format": 1.0})


def test_samples_of_one_rollout_are_one_conversation(tmp_path: Path) -> None:
    rows = [entry(index=i, rollout_id=r) for i, r in ((3, 9), (4, 9), (5, 2))]
    found = [sample.rollout_index for sample in read_dump(dump(tmp_path / "a.json", rows))]
    assert found == [0, 0, 1]


def test_versions_may_be_moved(tmp_path: Path) -> None:
    (sample,) = read_dump(dump(tmp_path / "a.jsonl", [entry(token_versions=[3, 4])]))
    moved = as_version(sample, 0)
    assert (moved.weights_version, moved.token_versions) == (0, (0, 0))
    moved = as_version(sample, 9)
    assert (moved.weights_version, moved.token_versions) == (9, (8, 9))
    assert as_version(sample, 4) == sample


ODD = [
    ("tokens", None, "tokens is missing"),
    ("tokens", [1, 2, 3, 7, "8"], "must be a list of token ids"),
    ("tokens", [1, 2, 3, 7, True], "must be a list of token ids"),
    ("tokens", [1, 2, 3, 7, -1], "no token id"),
    ("tokens", [1, 2, 3, 7, 2**31], "no token id"),
    ("tokens", 7, "= 7 must be a list"),
    ("response_length", None, "is missing"),
    ("response_length", 5, "= 5 leaves no prompt of 5 tokens"),
    ("response_length", -1, "leaves no prompt"),
    ("response_length", 2.0, "= 2.0 is not a whole number"),
    ("response_length", True, "= True is not a whole number"),
    ("group_index", None, "is missing"),
    ("index", None, "is missing"),
    ("reward", "1", "= '1' is not a number"),
    ("reward", 10**400, "is not a number"),
    ("group_index", 2**63, "is not a whole number"),
    ("reward", True, "= True is not a number"),
    ("rewards", {"a": "b"}, "must hold numbers"),
    ("loss_mask", [1], "has 1 values, the response 2 tokens"),
    ("loss_mask", [1, 2], "must hold 0 and 1 alone"),
    ("loss_mask", [0.5, 1.0], "must be a list of 0 and 1"),
    ("rollout_log_probs", None, "is missing"),
    ("rollout_log_probs", [-0.5], "has 1 values"),
    ("rollout_log_probs", [-0.5, None], "must be a list of numbers"),
    ("status", None, "is missing"),
    ("status", "pending", "'pending' is not one of completed"),
    ("remove_sample", 1, "is not true or false"),
    ("weight_versions", "v5", "is not a list"),
    ("weight_versions", ["default"], "ends in no number"),
    ("token_versions", [4, 5], "between 0 and 4"),
    ("token_versions", [4], "has 1 values"),
    ("metadata", ["a"], "is not an object"),
    ("response", 3, "is not text"),
    ("rollout_id", "a", "is not a whole number"),
]


@pytest.mark.parametrize(("name", "value", "said"), ODD)
def test_what_is_odd_is_named(tmp_path: Path, name: str, value: Any, said: str) -> None:
    path = dump(tmp_path / "a.json", [entry(index=1), entry(**{name: value})])
    with pytest.raises(DataError) as error:
        read_dump(path)
    assert str(error.value).startswith(f"{path}: sample 1: {name} ") and said in str(error.value)


def test_two_samples_of_one_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="index = 40 is in its group twice"):
        read_dump(dump(tmp_path / "a.json", [entry(), entry()]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"rollout_id": 1}', "no list `samples`"),
        ('{"samples": 3}', "no list `samples`"),
        ("[3]", "sample 0 is not an object"),
        ("[]", "holds no samples"),
    ],
)
def test_files_that_are_no_dumps_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        read_dump(path)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(entry()) + "\n\n{broken\n")
    with pytest.raises(DataError, match=r"a\.jsonl:3: not JSON"):
        read_dump(path)
    with pytest.raises(DataError, match="No such file"):
        read_dump(tmp_path / "none.pt")


class Trap:
    """What runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "ran"))


@pytest.mark.parametrize("how", ["torch", "plain pickle"])
def test_no_code_of_a_dump_runs(tmp_path: Path, how: str) -> None:
    mark, path = tmp_path / "ran", tmp_path / "evil.pt"
    value = {"samples": [entry(metadata=Trap(mark))]}
    if how == "torch":
        torch.save(value, path)
    else:
        path.write_bytes(pickle.dumps(value))
    with pytest.raises(DataError, match=r"evil\.pt: it cannot be read without running code"):
        read_dump(path)
    assert not mark.exists()
    # The trap is one: read the way that runs code, it does.
    with open(path, "rb") as file:
        torch.load(file, weights_only=False) if how == "torch" else pickle.load(file)
    assert mark.exists()


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.pt", [entry()])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="or is damaged"):
        read_dump(path)


def test_converted_it_is_a_rollouts_file(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.pt", [entry(), entry(index=41, reward=math.nan)])
    (tmp_path / "out").mkdir()
    assert convert(path, tmp_path / "out", version=7) == ["samples.jsonl", "samples.safetensors"]
    batch = read_samples([tmp_path / "out/samples.safetensors"])
    assert batch.weights_version.tolist() == [7, 7] == batch.token_versions[:2].tolist()
    assert batch.sample_tokens(1).tolist() == [1, 2, 3, 7, 8]
    assert math.isnan(batch.rewards[1])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.sampled_from([*entry(), "token_versions", "rewards", "rollout_id"]), JSON)
def test_whatever_a_field_holds_it_is_read_or_refused_in_one_line(
    tmp_path_factory: Any, name: str, value: Any
) -> None:
    path = tmp_path_factory.mktemp("dump") / "a.json"
    dump(path, [entry(**{name: value})])
    try:
        batch = pack_samples([as_version(sample, 1) for sample in read_dump(path)])
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert len(batch) == 1 and np.isfinite(batch.loss_mask).all()


def test_a_parquet_export_reads_as_its_lines(tmp_path: Path) -> None:
    """What `slurm-rl samples --export` writes; prompts, labels and metadata may be of any shape."""
    samples = [
        Sample(
            2, k, (1, 2), (3,) * (k + 1), (-0.5,) * (k + 1), (1,) * (k + 1),
            prompt=[{"role": "user", "content": "é"}], label=label, reward=0.5, metadata={"a": [k]},
        )
        for k, label in enumerate(["x", 3, None, [1, "2"]])
    ]  # fmt: skip
    for name in ("a.jsonl", "a.parquet"):
        export_samples(tmp_path / name, samples)
    assert read_dump(tmp_path / "a.parquet") == read_dump(tmp_path / "a.jsonl")
    (tmp_path / "b.parquet").write_bytes(b"hello")
    with pytest.raises(DataError, match=r"b\.parquet: it is no parquet file, or damaged"):
        read_dump(tmp_path / "b.parquet")


def test_a_parquet_file_of_another_origin(tmp_path: Path) -> None:
    from pyarrow import Table, parquet

    table = Table.from_pylist([{"prompt": '"one"', "label": "7"}, {"prompt": "What is 1+1?"}])
    parquet.write_table(table, tmp_path / "a.parquet")
    problem = r"a\.parquet: row 1: prompt = 'What is 1\+1\?' is not JSON \(.*no export of `slurm-rl"
    with pytest.raises(DataError, match=problem):
        read_dump(tmp_path / "a.parquet")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs pyarrow; .*export \.jsonl"):
        read_dump(tmp_path / "a.parquet")
