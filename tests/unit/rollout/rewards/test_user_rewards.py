"""What a reward of the user's may return, and what it may do to the samples that it gets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_rl.config.schema import Settings
from slurm_rl.errors import RewardError
from slurm_rl.rollout.grading import run_grading
from slurm_rl.rollout.journal import Journal, parse_samples, render_line
from slurm_rl.rollout.rewards import Graded, Grader
from slurm_rl.rollout.samples import Sample

Code = Callable[[str], str]
Grade = Callable[..., Graded]
Make = Callable[..., Sample]
IMPORTS = "import numpy, fractions, torch\n"


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        ("True", 1.0),
        ("numpy.bool_(True)", 1.0),
        ("numpy.bool_(False)", 0.0),
        ("numpy.int8(3)", 3.0),
        ("numpy.array(0.5)", 0.5),
        ("torch.tensor(0.25)", 0.25),
        ("torch.tensor(True)", 1.0),
        ("fractions.Fraction(1, 4)", 0.25),
    ],
)
def test_numbers_of_every_library_count(
    grade: Grade, code: Code, sample: Make, value: str, reward: float
) -> None:
    name = code(f"{IMPORTS}def score(args, sample):\n    return {value}\n")
    (one,) = grade([sample()], custom_rm_path=f"{name}.score").samples
    assert (one.reward, type(one.reward)) == (reward, float)
    name = code(f"{IMPORTS}def score(args, sample):\n    return {{'a': {value}, 'b': {value}}}\n")
    (one,) = grade([sample()], custom_rm_path=f"{name}.score", reward_key="a").samples
    assert (one.reward, one.rewards) == (reward, {"b": reward})


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("numpy.array([0.5])", "returned a ndarray, not a number"),
        ("numpy.float32('nan')", "returned nan for"),
        ("'0.5'", "returned a str, not a number"),
        ("1j", "returned a complex, not a number"),
        ("{'b': 1.0}", r"an object without 'a' \(it has b\) .*name another entry as .*reward_key"),
        ("{}", r"an object without 'a' \(it has nothing\)"),
        ("{'a': {'a': 1.0}}", "returned a dict, not a number"),
        ("{'a': float('inf')}", "returned inf for"),
    ],
)
def test_what_is_no_reward_is_one_line(
    grade: Grade, code: Code, sample: Make, value: str, problem: str
) -> None:
    name = code(f"{IMPORTS}def score(args, sample):\n    return {value}\n")
    with pytest.raises(RewardError, match=problem) as caught:
        grade([sample()], custom_rm_path=f"{name}.score", reward_key="a")
    assert "\n" not in str(caught.value) and "reward score (" in str(caught.value)


UNREADABLE = """
import numbers

class Odd:
    @property
    def shape(self):
        raise OSError("no shape")

class Sized:
    shape = 3

class Unreal(numbers.Real):
    def __float__(self):
        raise OSError("no float")
    __str__ = __float__

Unreal.__abstractmethods__ = frozenset()
"""


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("Odd()", r"returned what raised OSError: no shape at .*\.py:\d+ for the prompt"),
        ("10 ** 400", "returned 1000000"),
        ("10 ** 5000", "returned a number that cannot be shown for the prompt .*single precision"),
        ("Unreal()", "returned a number that cannot be shown"),
    ],
)
def test_a_value_that_cannot_be_read_is_one_line(
    grade: Grade, code: Code, sample: Make, value: str, problem: str
) -> None:
    name = code(f"{UNREADABLE}\ndef score(args, sample):\n    return {value}\n")
    with pytest.raises(RewardError, match=problem) as caught:
        grade([sample()], custom_rm_path=f"{name}.score")
    assert "\n" not in str(caught.value)
    # What does not count need not be a number.
    name = code(f"{UNREADABLE}\ndef score(args, sample):\n    return {{'a': 1.0, 'b': {value}}}\n")
    (one,) = grade([sample()], custom_rm_path=f"{name}.score", reward_key="a").samples
    assert (one.reward, one.rewards) == (1.0, {})


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("Odd()", "returned what raised OSError: no shape"),
        ("Sized()", "returned what raised TypeError"),
        ("[1.0, Odd()]", "returned what raised OSError: no shape"),
    ],
)
def test_so_are_a_groups(grade: Grade, code: Code, sample: Make, value: str, problem: str) -> None:
    name = code(f"{UNREADABLE}\ndef score(args, samples):\n    return {value}\n")
    with pytest.raises(RewardError, match=problem):
        grade([sample(), sample()], custom_rm_path=f"{name}.score", group_rm=True)


@pytest.mark.parametrize("value", ["numpy.ones(2)", "torch.ones(2)", "(1, numpy.bool_(True))"])
def test_a_groups_rewards_may_be_an_array(
    grade: Grade, code: Code, sample: Make, value: str
) -> None:
    name = code(f"{IMPORTS}def score(args, samples):\n    return {value}\n")
    graded = grade([sample(), sample()], custom_rm_path=f"{name}.score", group_rm=True)
    assert [one.reward for one in graded.samples] == [1.0, 1.0]


@pytest.mark.parametrize("value", ["numpy.ones((2, 1))", "numpy.ones(3)", "'11'", "{0: 1, 1: 1}"])
def test_what_is_no_list_of_rewards(grade: Grade, code: Code, sample: Make, value: str) -> None:
    name = code(f"{IMPORTS}def score(args, samples):\n    return {value}\n")
    with pytest.raises(RewardError, match=r"returned (a \w+|3 rewards) for 2 samples"):
        grade([sample(), sample()], custom_rm_path=f"{name}.score", group_rm=True)


ODD = """
class Mute(Exception):
    def __str__(self): return str(1 / 0)
def score(args, sample):
    raise Mute()
"""


def test_an_exception_without_words(grade: Grade, code: Code, sample: Make) -> None:
    with pytest.raises(RewardError, match=r"raised Mute: \(its own text .*ZeroDivisionError\)"):
        grade([sample()], custom_rm_path=f"{code(ODD)}.score")


def test_several_lines_are_one_and_the_trace_is_kept(
    code: Code, sample: Make, make: Callable[..., Settings], tmp_path: Path
) -> None:
    """It is the error's cause, also where a score stage grades; the stage's entry logs it."""
    name = code("def score(args, sample):\n    raise ValueError('one\\n\\ntwo')\n")
    grader = Grader(make(custom_rm_path=f"{name}.score"))
    with Journal(tmp_path / "journal") as journal, pytest.raises(RewardError) as caught:
        run_grading([("k", [sample()])], grader, concurrency=2, journal=journal, done=print)
    assert "raised ValueError: one two at" in str(caught.value)
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError) and cause.__traceback__ is not None


# -- metadata ---------------------------------------------------------------------------------


def test_metadata_that_a_reward_changes_is_kept_for_each_sample(
    grade: Grade, code: Code, sample: Make
) -> None:
    """Samples of a group share what they have from their row; what is written is each one's own."""
    shared = {"row": [1], "gone": 2}
    group = [sample(text, metadata=shared) for text in "abc"]
    name = code(
        "def score(args, sample):\n"
        "    sample.metadata['said'] = (sample.response, None)\n"
        "    sample.metadata['row'].append(sample.response)\n"
        "    del sample.metadata['gone']\n    return 1.0\n"
    )
    graded = grade(group, custom_rm_path=f"{name}.score")
    assert [one.metadata for one in graded.samples] == [
        {"row": [1, text], "said": [text, None]} for text in "abc"
    ]
    assert shared == {"row": [1], "gone": 2}
    read = parse_samples(render_line("k", graded.samples).rstrip(b"\n"))
    assert read == list(graded.samples)


def test_so_it_is_with_a_reward_of_the_group(grade: Grade, code: Code, sample: Make) -> None:
    name = code(
        "def score(args, samples):\n    for k, s in enumerate(samples): s.metadata['k'] = k\n"
        "    samples.reverse()\n    return [s.metadata['k'] for s in samples[::-1]]\n"
    )
    graded = grade([sample(), sample()], custom_rm_path=f"{name}.score", group_rm=True)
    assert [(one.reward, one.metadata) for one in graded.samples] == [(0, {"k": 0}), (1, {"k": 1})]


def test_several_terms_change_what_they_change(grade: Grade, code: Code, sample: Make) -> None:
    name = code(
        "def a(args, sample):\n    sample.metadata['a'] = 1; sample.metadata['both'] = 'a'\n"
        "    sample.metadata.pop('old', None)\n    return 1.0\n"
        "def b(args, sample):\n    assert 'a' not in sample.metadata\n"
        "    sample.metadata['both'] = 'b'\n    return 1.0\n"
    )
    rewards = [{"custom_rm_path": f"{name}.{x}", "name": x} for x in "ab"]
    (one,) = grade([sample(metadata={"old": 0, "kept": 0})], rewards=rewards).samples
    assert one.metadata == {"kept": 0, "a": 1, "both": "b"}


def test_nothing_else_that_it_changes_is_kept(grade: Grade, code: Code, sample: Make) -> None:
    name = code(
        "def score(args, sample):\n    sample.prompt.append('x'); sample.label['x'] = 1\n"
        "    sample.rewards['x'] = 2.0\n    return 1.0\n"
    )
    given = sample(prompt=["q"], label={})
    before = copy.deepcopy(given)
    (one,) = grade([given], custom_rm_path=f"{name}.score").samples
    assert (one.prompt, one.label, one.rewards) == (["q"], {}, {})
    assert given == before


BAD = [
    ("{1, 2}", r"metadata\['x'\] is of type set, for which JSON has no form"),
    ("[numpy.float32(1)]", r"metadata\['x'\]\[0\] is of type float32"),
    ("numpy.zeros(3)", r"metadata\['x'\] is of type ndarray"),
    ("float('nan')", r"metadata\['x'\] is nan"),
    ("{(1, 2): 3}", r"metadata\['x'\] has a name of type tuple"),
    ("sample.metadata", "levels deep"),
    ("'\\ud800'", r"metadata\['x'\] holds a text that is no Unicode"),
]


@pytest.mark.parametrize(("value", "problem"), BAD)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_metadata_that_cannot_be_kept_names_function_and_key(
    grade: Grade, code: Code, sample: Make, kind: str, value: str, problem: str
) -> None:
    name = code(
        f"import numpy\n{kind} score(args, sample):\n"
        f"    sample.metadata['x'] = {value}\n    return 1.0\n"
    )
    path = f"{name}.score"
    with pytest.raises(RewardError, match=rf"reward score \(.*:2\) left .*{problem}") as caught:
        grade([sample(metadata={"x": 0})], custom_rm_path=path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    group = [sample(metadata={"x": 0})]
    graded = grade(group, custom_rm_path=path, on_reward_error="drop")
    assert (graded.outcome, graded.samples[0].metadata) == ("dropped", {"x": 0})
    render_line("k", graded.samples, outcome="dropped")


def test_a_late_hand_changes_nothing(grade: Grade, code: Code, sample: Make) -> None:
    """What the function still holds, it holds alone."""
    name = code(
        "held = []\ndef score(args, sample):\n    sample.metadata['x'] = [1]\n"
        "    held.append(sample)\n    return 1.0\n"
    )
    (one,) = grade([sample()], custom_rm_path=f"{name}.score").samples
    held: list[Any] = __import__(name).held
    held[0].metadata["x"].append(2)
    assert one.metadata == {"x": [1]}
