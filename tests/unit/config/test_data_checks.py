from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.config.data_names import DataName, find_fault, parse_data_name, parse_slice
from slurm_rl.config.schema import Settings

Complaints = Callable[..., list[str]]
Load = Callable[..., Settings]

A: dict[str, Any] = {"name": "a", "path": "/d/a.jsonl"}
SUMS: dict[str, Any] = {"name": "sums", "path": "reasoning_gym:chain_sum"}
NO_TEMPLATE = "has no effect without apply_chat_template; set apply_chat_template: true"
MADE = "has no effect: the rows are made, not read; take it out"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("d.jsonl", ("d.jsonl", slice(None))),
        ("d.jsonl@[2:5]", ("d.jsonl", slice(2, 5))),
        ("d@x.jsonl@[:-1]", ("d@x.jsonl", slice(None, -1))),
        ("d.jsonl@[3:]", ("d.jsonl", slice(3, None))),
        ("d.jsonl@[:]", ("d.jsonl", slice(None))),
        ("@[1:2]", ("", slice(1, 2))),
    ],
)
def test_slices(text: str, expected: object) -> None:
    assert parse_slice(text) == expected


@given(st.none() | st.integers(-99, 99), st.none() | st.integers(-99, 99))
def test_a_slice_is_python_s(start: int | None, stop: int | None) -> None:
    written = f"/d/x@[{'' if start is None else start}:{'' if stop is None else stop}]"
    assert parse_slice(written) == ("/d/x", slice(start, stop))


@given(st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 9), st.integers(0, 40))
def test_only_slices_that_are_always_empty_are_refused(
    start: int | None, stop: int | None, num_rows: int
) -> None:
    written = f"/d/x.jsonl@[{'' if start is None else start}:{'' if stop is None else stop}]"
    is_empty = not any(range(num)[start:stop] for num in range(60))
    assert (find_fault(written) is not None) == is_empty
    if is_empty:
        assert not range(num_rows)[start:stop]


def test_names_say_the_kind() -> None:
    assert parse_data_name("/d/x.parquet@[:5]") == DataName(
        "parquet", "/d/x.parquet", slice(None, 5)
    )
    assert parse_data_name("/d/x.jsonl").kind == "jsonl"
    assert parse_data_name("/d/saved.v2") == DataName("folder", "/d/saved.v2", slice(None))
    assert parse_data_name("reasoning_gym:gcd@[1:]") == DataName(
        "procedural", "gcd", slice(1, None)
    )


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"rollout__prompt_data": "/d/x.json"}, 'rollout.prompt_data = "/d/x.json" ends in .json, which is not read; write one object a line and call it .jsonl'),
        ({"rollout__prompt_data": "/d/x.csv@[0:3]"}, 'rollout.prompt_data = "/d/x.csv@[0:3]" ends in .csv, which is not read; convert it to jsonl or parquet'),
        ({"rollout__prompt_data": "/d/x.jsonl.gz"}, 'rollout.prompt_data = "/d/x.jsonl.gz" ends in .gz, which is not read; unpack it'),
        ({"rollout__prompt_data": "/d/x.jsonl@[1:9:2]"}, 'rollout.prompt_data = "/d/x.jsonl@[1:9:2]" has a slice that is none; write it as x.jsonl@[10:20], without a step'),
        ({"rollout__prompt_data": "/d/x.jsonl@[-:3]"}, 'rollout.prompt_data = "/d/x.jsonl@[-:3]" has a slice that is none; write it as x.jsonl@[10:20], without a step'),
        ({"rollout__prompt_data": "/d/x.jsonl@[5:2]"}, 'rollout.prompt_data = "/d/x.jsonl@[5:2]" has a slice without rows; write the first row, then the one behind the last'),
        ({"rollout__prompt_data": [A | {"path": "/d/x.jsonl@[-2:-2]"}]}, 'rollout.prompt_data[0].path = "/d/x.jsonl@[-2:-2]" has a slice without rows; write the first row, then the one behind the last'),
        ({"rollout__prompt_data": [], "rollout__label_key": "x"}, "rollout.prompt_data is empty; name a data set"),
        ({"rollout__prompt_data": "reasoning_gym:"}, 'rollout.prompt_data = "reasoning_gym:" names no data set; write reasoning_gym:chain_sum'),
        ({"rollout__prompt_data": []}, "rollout.prompt_data is empty; name a data set"),
        ({"rollout__prompt_data": [A, A]}, 'rollout.prompt_data[1].name = "a" is there twice; rename one of them'),
        ({"rollout__prompt_data": [A | {"weight": 2.0}]}, "rollout.prompt_data[0].weight = 2.0 has no effect: there is one data set; take it out"),
        ({"rollout__prompt_data": [A, {"name": "b", "path": "/d/b.txt"}]}, 'rollout.prompt_data[1].path = "/d/b.txt" ends in .txt, which is not read; convert it to jsonl or parquet'),
        ({"rollout__prompt_data": [A | {"options": {"size": 3}}]}, "rollout.prompt_data[0].options has no effect: the rows are read, not made; take it out, or name reasoning_gym:NAME"),
        ({"rollout__data_options": {"size": 3}}, "rollout.data_options has no effect: the rows are read, not made; take it out, or name reasoning_gym:NAME"),
        ({"rollout__prompt_data": [A, SUMS], "rollout__data_options": {"size": 3}}, "rollout.data_options is for a single data set; give each data set its own options"),
        ({"rollout__prompt_data": [A | {"rollout_temperature": 0.0}]}, "rollout.prompt_data[0].rollout_temperature = 0 must be above 0: log-probs are taken at it; raise it; 0 is for evaluations"),
        ({"rollout__prompt_data": [A | {"rollout_top_k": 0}]}, "rollout.prompt_data[0].rollout_top_k = 0 must be at least 1, or -1 for all tokens; change it"),
        ({"rollout__prompt_data": [A | {"rm_type": "f1", "custom_rm_path": "a.b"}]}, 'rollout.prompt_data[0].custom_rm_path = "a.b" is given beside rm_type; keep one of the two'),
        ({"eval__aime": {"prompt_data": "/d/a.jsonl", "rm_type": "f1", "custom_rm_path": "a.b"}}, 'eval.aime.custom_rm_path = "a.b" is given beside rm_type; keep one of the two'),
        ({"eval__aime": {"prompt_data": "/d/a.tsv"}}, 'eval.aime.prompt_data = "/d/a.tsv" ends in .tsv, which is not read; convert it to jsonl or parquet'),
        ({"eval__aime": {"prompt_data": "/d/a.jsonl", "options": {"size": 3}}}, "eval.aime.options has no effect: the rows are read, not made; take it out, or name reasoning_gym:NAME"),
        ({"rollout__tool_key": "tools"}, f"rollout.tool_key {NO_TEMPLATE}"),
        ({"rollout__system_prompt": "be good"}, f"rollout.system_prompt {NO_TEMPLATE}"),
        ({"rollout__apply_chat_template_kwargs": {"a": 1}}, f"rollout.apply_chat_template_kwargs {NO_TEMPLATE}"),
        ({"rollout__prompt_data": [A | {"system_prompt": "x"}]}, f"rollout.prompt_data[0].system_prompt {NO_TEMPLATE}"),
        ({"rollout__apply_chat_template": True, "rollout__prompt_data": [A | {"tool_key": "x", "apply_chat_template": False}]}, f"rollout.prompt_data[0].tool_key {NO_TEMPLATE}"),
        ({"rollout__prompt_data": "reasoning_gym:chain_sum", "rollout__label_key": "x"}, f'rollout.label_key = "x" {MADE}'),
        ({"rollout__prompt_data": [A, SUMS | {"input_key": "x"}]}, f'rollout.prompt_data[1].input_key = "x" {MADE}'),
        ({"rollout__prompt_data": [A, SUMS | {"path": "reasoning_gym:word_ladder"}]}, 'rollout.prompt_data[1].path = "reasoning_gym:word_ladder" makes other prompts in each process unless PYTHONHASHSEED is set; add PYTHONHASHSEED: 0 to env'),
    ],
)  # fmt: skip
def test_what_cannot_be_or_has_no_effect_is_refused(
    complaints: Complaints, values: dict[str, Any], line: str
) -> None:
    assert complaints(**values) == [line]


@pytest.mark.parametrize(
    "values",
    [
        {"rollout__prompt_data": "/d/folder"},
        {"rollout__prompt_data": [A | {"weight": 2.0}, SUMS | {"options": {"size": 9}}], "rollout__label_key": "x"},
        {"rollout__prompt_data": "reasoning_gym:chain_sum", "rollout__data_options": {"size": 9}},
        # What one data set or evaluation looks at has an effect.
        {"rollout__prompt_data": [A, A | {"name": "b", "apply_chat_template": True}], "rollout__system_prompt": "x", "rollout__apply_chat_template_kwargs": {"a": 1}},
        {"rollout__tool_key": "t", "eval__e": {"prompt_data": "/d/x.jsonl", "apply_chat_template": True}},
        {"rollout__prompt_data": "reasoning_gym:gcd", "rollout__label_key": "x", "eval__e": {"prompt_data": "/d/x.jsonl"}},
        {"eval__e": {"prompt_data": "/d/x.jsonl", "rollout_temperature": 0.0}},
        {"rollout__prompt_data": "reasoning_gym:word_ladder", "env": {"PYTHONHASHSEED": 0}},
    ],
)  # fmt: skip
def test_what_has_an_effect_is_accepted(load: Load, values: dict[str, Any]) -> None:
    load(**values)


def test_paths_in_a_mixture_and_in_evaluations_are_paths(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA", "/big/data")
    settings = load(
        rollout__prompt_data=[
            {"name": "a", "path": "$DATA/a.jsonl@[0:9]"},
            {"name": "b", "path": "reasoning_gym:chain_sum@[0:9]"},
        ],
        eval__aime={"prompt_data": "$DATA/aime.parquet", "python": "python3"},
        eval__made={"prompt_data": "reasoning_gym:gcd"},
    )
    sets = settings.rollout.prompt_data
    assert not isinstance(sets, str)
    assert [own.path for own in sets] == [
        "/big/data/a.jsonl@[0:9]",
        "reasoning_gym:chain_sum@[0:9]",
    ]
    assert settings.eval["aime"].prompt_data == "/big/data/aime.parquet"
    assert settings.eval["aime"].python == "python3"
    assert settings.eval["made"].prompt_data == "reasoning_gym:gcd"
