"""Plain JSON, against the standard library's own opinion."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.rollout.plain_json import NotPlain, copy_object, copy_plain

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=20,
)  # fmt: skip


def spoil(value: Any) -> None:
    """Change everything in it that can be changed."""
    if isinstance(value, list):
        for entry in value:
            spoil(entry)
        value.append("spoiled")
    elif isinstance(value, dict):
        for entry in value.values():
            spoil(entry)
        value["spoiled"] = 1


@given(PLAIN)
def test_plain_values_come_back_and_nobody_else_holds_them(value: Any) -> None:
    text = json.dumps(value)
    copied = copy_plain(value, name="x")
    assert json.dumps(copied) == text
    spoil(value)
    assert json.dumps(copied) == text


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [1, {2}]}, r"^metadata\['a'\]\[1\] is of type set, for which JSON has no form$"),
        ({"a": np.float32(1)}, r"^metadata\['a'\] is of type float32"),
        ({"a": np.zeros(2)}, r"^metadata\['a'\] is of type ndarray"),
        ({"a": float("nan")}, r"^metadata\['a'\] is nan, which JSON does not have"),
        ({"a": [float("-inf")]}, r"^metadata\['a'\]\[0\] is -inf"),
        ({"a": {1: 2}}, r"^metadata\['a'\] has a name of type int"),
        ({"a": "\ud800"}, r"^metadata\['a'\] holds a text that is no Unicode"),
        ({"\ud800": 1}, r"^metadata holds a text that is no Unicode"),
        ([1], "^metadata is of type list, not an object$"),
        (3, "^metadata is of type int, not an object$"),
    ],
)
def test_what_is_none_is_named(value: Any, problem: str) -> None:
    with pytest.raises(NotPlain, match=problem):
        copy_object(value, name="metadata")


def test_one_that_holds_itself() -> None:
    value: dict[str, Any] = {}
    value["self"] = [value]
    with pytest.raises(NotPlain, match="more than 100 levels deep") as caught:
        copy_object(value, name="metadata")
    assert len(str(caught.value)) < 200


def test_values_that_read_back_the_same() -> None:
    class Name(str):
        pass

    found = copy_plain({"a": (1, np.float64(0.5)), "b": Name("x")}, name="x")
    assert found == {"a": [1, 0.5], "b": "x"}
    assert [type(v) for v in (found["a"], found["a"][1], found["b"])] == [list, float, str]
