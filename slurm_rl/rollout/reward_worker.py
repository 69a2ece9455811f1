"""The program of a reward worker: tasks come in, values go out, one at a time.

Started by `rewards/workers.py`, which says how both are framed. A task has seconds of *processor*
time: how busy the machine is must not decide whether an answer is right. When they are over the
kernel ends the process, wherever it hangs. Libraries are imported by the first task that needs
them; none of them may write to our standard output, which carries the answers.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

_SET_PDEATHSIG = 1
_MEMORY_BYTES = 8 << 30
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
#: A word is compared as a word: as mathematics it would be a product of its letters.
_WORDS = re.compile(r"[A-Za-z][a-z]{3,}(?:[ -][A-Za-z]+)*")


def main() -> None:
    """Until our standard input ends, or we are killed."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _limit(resource.RLIMIT_AS, _MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while head := sys.stdin.buffer.read(8):
        task = pickle.loads(sys.stdin.buffer.read(int.from_bytes(head, "big")))
        _answer(answers, run_task(task))


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """What goes back for a task: {"value"}, {"error"} or {"missing", "why"}."""
    if "cpu_s" in task:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + task["cpu_s"]) + 1)
    prepare, function, library = _KINDS[task["kind"]]
    try:
        prepare()
        return {"value": None if task.get("warm") else function(task)}
    except ImportError as error:
        return {"missing": library, "why": str(error)}
    except Exception as error:  # a library that stumbles over an answer
        return {"error": f"{type(error).__name__}: {error}"}


def compare(task: dict[str, Any]) -> float:
    """1 if the answer is one of the labels by math-verify."""
    answer, labels = task["answer"], task["labels"]
    return float(any(_is_equal(label, answer, task["text"]) for label in labels))


def _is_equal(label: str, answer: str | None, text: str) -> bool:
    from math_verify import parse, verify

    word = _word(label)
    if word is not None:
        said = text if answer is None else answer
        said = " ".join(_WRAPPED.sub(r"\1", said).lower().replace("$", "").split())
        return said.strip(" .") == word or (answer is None and said.rstrip(" .").endswith(word))
    # The library's own limits are of wall time, and work by signals: ours hold without them.
    gold = parse(_boxed(label), parsing_timeout=None)
    target = parse(text if answer is None else _boxed(answer), parsing_timeout=None)
    return bool(verify(gold, target, timeout_seconds=None))


def _word(label: str) -> str | None:
    plain = " ".join(_WRAPPED.sub(r"\1", label).replace("$", "").split())
    return plain.lower() if _WORDS.fullmatch(plain) else None


def _boxed(text: str) -> str:
    """What the library takes for LaTeX as a whole, whatever is in it."""
    text = text.strip()
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inner = text[len(left) : len(text) - len(right)]
        if text.startswith(left) and text.endswith(right) and inner and left not in inner:
            text = inner.strip()
    return f"\\boxed{{{text}}}"


def match(task: dict[str, Any]) -> float:
    """1 if the whole text has the form of the pattern."""
    return float(re.fullmatch(task["pattern"], task["text"], re.DOTALL) is not None)


def score(task: dict[str, Any]) -> float:
    """What the data set of reasoning-gym says of the answer."""
    from reasoning_gym.factory import get_score_answer_fn

    from slurm_rl.rollout.data.procedural import REWARD_NAME, score_answer

    if REWARD_NAME in task["entry"]["metadata"]:  # made by a data source, which can do it again
        return score_answer(task["entry"]["metadata"], task["answer"])
    return float(get_score_answer_fn(task["data_set"])(task["answer"], task["entry"]))


def _import_math() -> None:
    import logging

    logging.disable(logging.CRITICAL)  # it logs every answer that it cannot read
    import math_verify  # noqa: F401


def _import_gym() -> None:
    import reasoning_gym  # noqa: F401


_Kind = tuple[Callable[[], None], Callable[[dict[str, Any]], float], str]
_KINDS: dict[str, _Kind] = {
    "math": (_import_math, compare, "math-verify"),
    "pattern": (lambda: None, match, "re"),
    "reasoning_gym": (_import_gym, score, "reasoning-gym"),
}


def _limit(which: int, value: int) -> None:
    """Lower a soft limit; SIGXCPU's default ends us."""
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(which, (value, hard))


def _answer(pipe: BinaryIO, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    pipe.write(len(data).to_bytes(8, "big") + data)
    pipe.flush()
