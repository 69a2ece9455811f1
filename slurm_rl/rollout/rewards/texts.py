"""Rewards that only look at texts: pure, and quick enough to run between two requests.

Each is `function(args, sample) -> float`. What of a response is the answer is found by the small
functions at the end; `args.reward_options` has a term's own options.
"""

from __future__ import annotations

import numbers
import random
import re
import string
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from slurm_rl.config.row_rules import lacks_label
from slurm_rl.errors import RewardError
from slurm_rl.rollout.samples import Sample
from slurm_rl.seeds import derive_seed

#: How much of a response the DAPO recipe looks at.
_DAPO_CHARACTERS = 300
_DAPO_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{")
_MOST_BOXES, _LONGEST_BOX = 16, 4000
#: Where a chosen letter is looked for.
_CHOICE_CHARACTERS = 2000
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_WORD = re.compile(r"\w+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
#: Never with an exponent: `1e999999999` would take for ever.
_FRACTION = re.compile(r"-?\d{1,60}(?:\.\d{1,60}|/\d{1,60})?")
#: What is written beside a number without changing it.
_UNITS = re.compile(
    r"\b(?:degrees?|dollars?|cents?|units?|points?|hours?|minutes?|seconds?|days?|years?|ways?"
    r"|cm|mm|km|kg|meters?|miles?|feet|inch(?:es)?|percent)\b(?:\^\d)?",
    re.IGNORECASE,
)
#: A small letter only right behind a mark, else it is an article.
_LETTER_SAID = re.compile(
    r"(?i:answer|option|choice)(?:\s|(?i:is)\b|[:=({\[*]|\\boxed|\\text){0,12}"
    r"([A-Z]|(?:(?<=[:=({\[*])|(?<=[:=({\[*]\s))[a-z])(?![A-Za-z])"
)
_LETTER_ALONE = re.compile(r"(?<![A-Za-z'’])([A-Z])(?![A-Za-z'’])")


def exact_match(args: Any, sample: Sample) -> float:
    """1 if the response is the label, apart from white space around it."""
    return float(sample.response.strip() == label_of(sample, "exact_match").strip())


def prefix_match(args: Any, sample: Sample) -> float:
    """Share of the label that the response gets right before its first wrong character.

    Denominator: the longer of the two, so that going on past the label costs as well.
    """
    response, label = sample.response.strip(), label_of(sample, "prefix_match").strip()
    num_right = 0
    for ours, wanted in zip(response, label, strict=False):
        if ours != wanted:
            break
        num_right += 1
    return num_right / max(len(response), len(label), 1)


def f1(args: Any, sample: Sample) -> float:
    """F1 of the words of the response against the label's, each counted as often as it is there."""
    ours = Counter(_WORD.findall(sample.response.lower()))
    wanted = Counter(_WORD.findall(label_of(sample, "f1").lower()))
    num_shared = (ours & wanted).total()
    return 2 * num_shared / max(ours.total() + wanted.total(), 1)


def last_number(args: Any, sample: Sample) -> float:
    """1 if the last number in the response equals the last one in the label (GSM8K's rule)."""
    label = label_of(sample, "gsm8k")
    ours, wanted = (_NUMBER.findall(text) for text in (sample.response, label))
    return float(bool(ours and wanted) and _value(ours[-1]) == _value(wanted[-1]))


def seeded_random(args: Any, sample: Sample) -> float:
    """Uniform in [0, 1), from the sample's seed: says nothing about it; for trying things out."""
    return random.Random(derive_seed(sample.seed, "reward")).random()


def dapo(args: Any, sample: Sample) -> float:
    """+1 if the last `Answer:` line near the end says the label, else -1 (arXiv 2503.14476).

    Numbers are compared as numbers, else the texts without LaTeX's wrappings and units.
    """
    label = label_of(sample, "dapo")
    found = _DAPO_ANSWER.findall(sample.response[-_DAPO_CHARACTERS:])
    if not found:
        return -1.0
    return 1.0 if _plain(found[-1]) == _plain(label) else -1.0


def multiple_choice(args: Any, sample: Sample) -> float:
    """1 if the response chooses the label's letter.

    The label is a letter, a place from 0, or the text of one of `metadata.choices` (a list, or an
    object by letter); `metadata.correct_letter` wins over it. A response that names no letter may
    quote the right choice's text.
    """
    choices = _choices(sample.metadata.get("choices"))
    letters = "".join(choices) or string.ascii_uppercase[:10]
    right = _right_letter(sample, choices, letters)
    answer = after_thinking(sample.response)[-_CHOICE_CHARACTERS:]
    chosen = _chosen_letter(answer, letters)
    if chosen is not None:
        return float(chosen == right)
    text = _words(choices.get(right, ""))
    others = [_words(other) for letter, other in choices.items() if letter != right]
    said = f" {_words(answer)} "
    is_said = bool(text) and f" {text} " in said
    return float(is_said and not any(f" {other} " in said for other in others if other))


def think_answer(args: Any, sample: Sample) -> float:
    """1 if all of the response is `<think>…</think> <answer>…</answer>`, each tag once."""
    text = sample.response.strip()
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(text.count(tag) != 1 for tag in tags):
        return 0.0
    places = [text.index(tag) for tag in tags]
    between = text[places[1] + len("</think>") : places[2]]
    is_whole = text.startswith("<think>") and text.endswith("</answer>")
    return float(is_whole and places == sorted(places) and not between.strip())


def check_label(sample: Sample, name: str) -> None:
    """Raises RewardError where the reward `name` would compare with nothing."""
    if lacks_label(name, sample.label, sample.metadata):
        raise RewardError(
            f"reward {name}: the sample has no label to compare with",
            hint="set rollout.label_key, and give each row a label",
        )


def label_of(sample: Sample, name: str) -> str:
    """The label as text. Raises RewardError if there is none, so that it is never `None`."""
    check_label(sample, name)
    return str(sample.label)


def after_thinking(text: str) -> str:
    """What follows the last `</think>`, or the whole text."""
    return text.rpartition("</think>")[2]


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{…}` (or `\fbox{…}`), braces balanced; else None.

    A few candidates are looked at, each a few thousand characters long: a response may be full of
    boxes that never close.
    """
    end = len(text)
    for _ in range(_MOST_BOXES):
        start = max(text.rfind(r"\boxed", 0, end), text.rfind(r"\fbox", 0, end))
        if start < 0:
            return None
        opening = _BOX.match(text, start)
        content = None if opening is None else _braced(text, opening.end() - 1)
        if content is not None:
            return content
        end = start
    return None


def last_code(text: str) -> str:
    """The program in a response: its last fenced block, one marked as Python first."""
    blocks = re.findall(r"```([^\n`]*)\n(.*?)```", text, re.DOTALL)
    python = [body for name, body in blocks if name.strip().lower() in ("python", "py", "python3")]
    if python:
        return str(python[-1])
    return str(blocks[-1][1]) if blocks else text


def tagged_answer(text: str) -> str:
    """The content of the last `<answer>…</answer>`, or what follows the thinking."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return (after_thinking(text) if start < 0 else text[start + len("<answer>") : end]).strip()


def _braced(text: str, start: int) -> str | None:
    """What lies between the brace at `start` and its partner; None if there is none near."""
    depth = 0
    for at in range(start, min(len(text), start + _LONGEST_BOX)):
        if text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : at]
    return None


def _plain(text: str) -> Fraction | str:
    """An answer as a number if it is one, else without what LaTeX and people put around it."""
    text = (last_boxed(text) or text).rpartition("=")[2]
    text = _WRAPPED.sub(r"\1", text)
    for noise in (
        "\\left",
        "\\right",
        "\\!",
        "\\,",
        "\\;",
        "\\ ",
        "\\$",
        "$",
        "^\\circ",
        "\\%",
        "%",
    ):
        text = text.replace(noise, "")
    text = text.replace("{,}", ",").replace("^{\\circ}", "")
    text = _UNITS.sub("", text).strip().strip("*`\"'").rstrip(".").strip()
    number = _THOUSANDS.sub("", text).replace(" ", "")
    if _FRACTION.fullmatch(number):
        try:
            return Fraction(number)
        except ZeroDivisionError:
            pass
    return "".join(text.split()).lower()


def _choices(value: Any) -> dict[str, str]:
    """Letter -> text."""
    if isinstance(value, dict):
        return {str(letter).strip().upper(): str(text) for letter, text in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return dict(zip(string.ascii_uppercase, map(str, value), strict=False))
    return {}


def _right_letter(sample: Sample, choices: dict[str, str], letters: str) -> str:
    label = sample.metadata.get("correct_letter")
    if label is None:
        check_label(sample, "multiple_choice")
        label = sample.label
    is_place = isinstance(label, numbers.Integral) and not isinstance(label, bool)
    if is_place and 0 <= int(label) < len(letters):
        return letters[int(label)]
    text = str(label).strip()
    letter = text.strip("().").upper()
    if len(letter) == 1 and letter in letters:
        return letter
    for letter, choice in choices.items():
        if _words(choice) == _words(text):
            return letter
    raise RewardError(
        f"label {text!r} is no choice: neither one of {', '.join(letters)} nor the text of one",
        hint="mend the data's label_key, or its `choices`",
    )


def _chosen_letter(text: str, letters: str) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None:
        inner = _WRAPPED.sub(r"\1", boxed).strip().strip("().").upper()
        if len(inner) == 1 and inner in letters:
            return inner
    for pattern in (_LETTER_SAID, _LETTER_ALONE):
        found = [letter.upper() for letter in pattern.findall(text)]
        found = [letter for letter in found if letter in letters]
        if found:
            return str(found[-1])
    return None


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text.lower()))


def _value(text: str) -> float:
    return float(text.replace(",", ""))
