from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slurm_rl.config.known_names import ELSEWHERE, VALUES, explain_name
from slurm_rl.config.passthrough import MEGATRON, SGLANG
from slurm_rl.config.rollout_schema import EvalSet
from slurm_rl.config.validation import schema_paths

Complaints = Callable[..., list[str]]

PATHS = {".".join(map(str, path)) for path in schema_paths()}


def is_setting(path: str) -> bool:
    for at, table in (
        ("train.megatron.", MEGATRON),
        ("critic.megatron.", MEGATRON),
        ("rollout.sglang.", SGLANG),
    ):
        if path.startswith(at):
            name = path.removeprefix(at)
            return name in table.entries and table.owner(name) is None
    section, _, rest = path.partition(".NAME")
    if section == "eval":
        return not rest or rest[1:] in {".".join(map(str, p)) for p in schema_paths(EvalSet)}
    return path in PATHS


@pytest.mark.parametrize("name", ELSEWHERE)
def test_every_path_of_the_table_is_a_setting(name: str) -> None:
    meaning = ELSEWHERE[name]
    assert str(meaning)
    assert [path for path in meaning.settings if not is_setting(path)] == []


def test_no_name_of_the_table_is_one_of_ours_or_passes_through() -> None:
    ours = {path.rpartition(".")[2] for path in PATHS}
    for table in (MEGATRON, SGLANG):
        ours |= {name for name in table.entries if table.owner(name) is None}
    assert ours & set(ELSEWHERE) == set()


@pytest.mark.parametrize("name", [n for n in SGLANG.entries if f"rollout.sglang_{n}" not in PATHS])
def test_an_argument_of_sglang_may_have_its_name_in_front(name: str) -> None:
    found = explain_name(f"sglang_{name}")
    assert found is not None
    assert ("take the line out" in found) == (SGLANG.owner(name) is not None)
    assert SGLANG.owner(name) is not None or is_setting(found.removeprefix("here it is "))


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"eval_interval": 2}, "here it is eval.NAME.interval"),
        ({"rollout__rollout_num_gpus_per_engine": 2}, "here it is rollout.sglang.tp_size"),
        ({"sglang_tensor_parallel_size": 2}, "here it is rollout.sglang.tp_size"),
        ({"save_interval": 2}, "here it is retention.keep_every, retention.keep_last: every iter"),
        ({"train__tensor_model_parallel_size": 2}, "did you mean train.megatron.tensor_model_parallel_size?"),
        ({"lr": 1e-6}, "did you mean train.megatron.lr?"),
        ({"colocate": True}, "take the line out: a stage is a job of its own"),
        # Ours, although the name begins as theirs do.
        ({"sglang_python": "p"}, "did you mean rollout.sglang_python?"),
        ({"rollout__sglang_pyton": "p"}, "did you mean rollout.sglang_python?"),
        # Not to be set where it would be pointed to.
        ({"hidden_size": 8}, "it comes from the model's own config.json"),
        ({"attention_dropout": 0.0}, "did you mean train.megatron.attention_dropout?"),
    ],
)  # fmt: skip
def test_a_name_from_elsewhere_is_shown_its_place(
    complaints: Complaints, values: dict[str, Any], fix: str
) -> None:
    (line,) = complaints(**values)
    assert line.partition(" is not a setting; ")[2].startswith(fix)


CHOICES = {
    "kl_loss_type": ("k1", "k2", "k3", "low_var_kl"),
    "policy_loss": ("ppo", "gspo", "cispo", "pg"),
    "advantage_estimator": (
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "gae",
    ),
    "loss_aggregation": ("sequence", "token", "group", "constant"),
}


@pytest.mark.parametrize(("value", "here"), VALUES.items())
def test_a_value_from_elsewhere_too(complaints: Complaints, value: str, here: str) -> None:
    fields = [name for name, choices in CHOICES.items() if here in choices and value not in choices]
    assert fields
    for name in fields:
        (line,) = complaints(**{f"train__{name}": value})
        assert line.endswith(f"must be one of {', '.join(CHOICES[name])}; did you mean {here}?")
    (line,) = complaints(launcher=value)
    assert f"did you mean {here}" not in line


@pytest.mark.parametrize("place", ["", "rollout__", "train__", "eval__a__"])
def test_no_unknown_name_lists_a_whole_section(complaints: Complaints, place: str) -> None:
    values = {"eval__a__prompt_data": "/d.jsonl", f"{place}zq": 1}
    (line,) = complaints(**values)
    assert len(line) < 180 and line.endswith("more: docs/configuration.md")
