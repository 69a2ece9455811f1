from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.config import row_rules
from slurm_rl.errors import RewardError
from slurm_rl.rollout.rewards import BUILT_IN
from slurm_rl.rollout.rewards.texts import last_boxed, last_code, tagged_answer
from slurm_rl.rollout.samples import Sample

Make = Callable[..., Sample]
QUICK = {name: entry.quick for name, entry in BUILT_IN.items() if entry.quick is not None}
ARGS = SimpleNamespace(reward_options={})


def reward(name: str, sample: Sample) -> float:
    function = BUILT_IN[name].quick
    assert function is not None
    return function(ARGS, sample)


@pytest.mark.parametrize(
    ("name", "response", "label", "expected"),
    [
        ("exact_match", " 12\n", 12, 1.0),
        ("exact_match", "12 13", "12", 0.0),
        ("prefix_match", "ab", "ab", 1.0),
        ("prefix_match", "ac", "ab", 0.5),
        ("prefix_match", "cb", "ab", 0.0),
        ("prefix_match", "abab", "ab", 0.5),
        ("prefix_match", "", "ab", 0.0),
        ("f1", "the cat sat", "a cat sat down", 4 / 7),
        ("f1", "cat cat", "cat", 2 / 3),
        ("f1", "", "", 0.0),
        ("gsm8k", "so 3 + 4 = 7.0", "#### 7", 1.0),
        ("gsm8k", "1,234 apples", "1234", 1.0),
        ("gsm8k", "-5", "5", 0.0),
        ("gsm8k", "none", "5", 0.0),
        ("dapo", "so\nAnswer: 42", "42", 1.0),
        ("dapo", "Answer: 41\nAnswer: $42$", "42", 1.0),
        ("dapo", "Answer: 42\nAnswer: 41", "42", -1.0),
        ("dapo", "answer : \\boxed{1,234}.", "1234", 1.0),
        ("dapo", "Answer: 42" + "x" * 300, "42", -1.0),
        ("dapo", "Answer: x = 42", "42", 1.0),
        ("dapo", "Answer: 42 cm", "42", 1.0),
        ("dapo", "Answer: 42.0", "42", 1.0),
        ("dapo", "Answer: 1/2", "0.5", 1.0),
        ("dapo", "Answer: \\text{yes}", "Yes", 1.0),
        ("dapo", "the answer is 42", "42", -1.0),
        ("dapo", "Answer: 1e999999999", "1", -1.0),
        ("dapo", "Answer: 1/0", "1/0", 1.0),
        ("format", "<think>a</think>\n<answer>b</answer>", "", 1.0),
        ("format", "<think>a</think> x <answer>b</answer>", "", 0.0),
        ("format", "x<think>a</think><answer>b</answer>", "", 0.0),
        ("format", "<think>a</think><answer>b</answer>x", "", 0.0),
        ("format", "<think>a</think><answer>b", "", 0.0),
        ("format", "<think>a<think></think><answer>b</answer>", "", 0.0),
        ("format", "<answer>a</answer><think>b</think>", "", 0.0),
    ],
)
def test_table(sample: Make, name: str, response: str, label: object, expected: float) -> None:
    assert reward(name, sample(response, label)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("response", "label", "metadata", "expected"),
    [
        ("The answer is B.", "B", {}, 1),
        ("The answer is (B).", "B", {}, 1),
        ("Answer: **B**", "B", {}, 1),
        ("answer: $\\boxed{\\text{B}}$", "B", {}, 1),
        ("\\boxed{B} since option A is wrong", "B", {}, 1),
        ("Option A is wrong. The answer is C", "C", {}, 1),
        ("The answer is a mistake; B", "B", {}, 1),
        ("answer: b", "B", {}, 1),
        ("the choice (b)", "B", {}, 1),
        ("A or B? I'd say D", "D", {}, 1),
        ("<think>answer is A</think> answer: B", "B", {}, 1),
        ("answer: B", "A", {}, 0),
        ("answer: K", "A", {}, 0),
        ("", "A", {}, 0),
        ("B", 1, {"choices": ["x", "y"]}, 1),
        ("B", "y", {"choices": ["x", "y"]}, 1),
        ("it is the red one", "red one", {"choices": ["blue one", "red one"]}, 1),
        ("red one, not blue one", "red one", {"choices": ["blue one", "red one"]}, 0),
        ("C", "y", {"choices": {"A": "x", "C": "y"}}, 1),
        ("answer: C", "anything", {"correct_letter": "C"}, 1),
    ],
)
def test_multiple_choice(
    sample: Make, response: str, label: object, metadata: dict[str, object], expected: float
) -> None:
    assert reward("gpqa", sample(response, label, metadata=metadata)) == expected


def test_a_label_that_is_no_choice_is_the_datas_fault(sample: Make) -> None:
    with pytest.raises(RewardError, match="label 'green' is no choice"):
        reward("multiple_choice", sample("A", "green", metadata={"choices": ["red", "blue"]}))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"a \boxed{1} b \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{a \boxed{3}}}", "3"),
        (r"\fbox{4}", "4"),
        (r"\boxed {5}", "5"),
        (r"\boxed{6} and then \boxed{", "6"),
        (r"\boxed{}", ""),
        (r"boxed{7}", None),
        (r"\boxed 8", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_the_program_of_a_response() -> None:
    text = "```\na\n```\n```python\nb\n```\ntext\n```py\nc\n```\n```json\nd\n```"
    assert last_code(text) == "c\n"
    assert last_code("```\na\n```") == "a\n"
    assert last_code("a") == "a"


def test_the_tagged_answer() -> None:
    assert tagged_answer("<answer>1</answer> <answer> 2 </answer>") == "2"
    assert tagged_answer("<think>x</think> 3") == "3"


words = st.lists(st.sampled_from(["a", "b", "c", "ä", "42", ","]), max_size=12).map(" ".join)


@given(words, words)
def test_f1_is_symmetric_and_bounded(one: str, other: str) -> None:
    from collections import Counter

    def build(response: str, label: str) -> Sample:
        return Sample(0, 0, (1,), (2,), (0.0,), (1,), response=response, label=label)

    value = reward("f1", build(one, other))
    assert value == reward("f1", build(other, one))
    assert 0 <= value <= 1
    ours, wanted = one.replace(",", " ").split(), other.replace(",", " ").split()
    assert (value == 1) == (Counter(ours) == Counter(wanted) and bool(ours))
    assert (value > 0) == bool(set(ours) & set(wanted))


@pytest.mark.parametrize("name", sorted(QUICK))
@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{" * 20_000,
        "<answer>" * 20_000,
        "answer" + " " * 100_000,
        "answer: " + "(" * 100_000,
        "Answer:" + "9" * 100_000,
        "-" * 100_000,
        "1," * 50_000,
        "A " * 50_000,
        "```\n" * 20_000,
        "<think>" + "</think>" * 10_000,
    ],
)
def test_no_response_holds_the_loop_for_long(sample: Make, name: str, response: str) -> None:
    """They run between two requests: also what a broken model writes takes milliseconds."""
    began = time.process_time()
    value = reward(name, sample(response, "B"))
    for find in (tagged_answer, last_code, last_boxed):
        find(response)
    assert math.isfinite(value)
    assert time.process_time() - began < 0.5


def test_random_depends_on_the_seed_alone(sample: Make) -> None:
    values = [reward("random", sample(seed=seed)) for seed in (1, 2, 1)]
    assert values[0] == values[2] != values[1]


@pytest.mark.parametrize("name", sorted(QUICK))
def test_rewards_are_finite_numbers(sample: Make, name: str) -> None:
    assert math.isfinite(reward(name, sample("x", np.int64(3), metadata={"choices": list("abcd")})))


COMPARING = [name for name in row_rules.COMPARING if name in QUICK]


def test_what_compares_is_known(sample: Make) -> None:
    """Each reward either says that there is no label, or does not look at it."""
    assert {"f1", "gsm8k", "dapo", "gpqa"} < set(COMPARING)
    for name in QUICK:
        said = "None"  # which `str(None)` would be right about
        if name in COMPARING:
            with pytest.raises(RewardError, match=r"no label to compare with; set rollout\.label"):
                reward(name, sample(said, None))
        else:
            assert reward(name, sample(said, None)) == reward(name, sample(said, "x"))


@pytest.mark.parametrize("name", [name for name in COMPARING if name in row_rules.READING])
def test_an_empty_label_holds_no_answer(sample: Make, name: str) -> None:
    with pytest.raises(RewardError, match="has no label to compare with"):
        reward(name, sample("5", " "))


def test_a_correct_letter_is_a_label(sample: Make) -> None:
    made = sample("A", None, metadata={"correct_letter": "A"})
    assert reward("multiple_choice", made) == 1.0
    assert reward("exact_match", sample("", "")) == 1.0
