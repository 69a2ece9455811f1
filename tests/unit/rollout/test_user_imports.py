"""Dotted paths of the user's, and modules that do what they like when they are imported."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

from slurm_rl.errors import ConfigError, RewardError, Stopped
from slurm_rl.rollout.user_errors import say_error
from slurm_rl.rollout.user_imports import import_function

Code = Callable[[str], str]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("sys.nope", "the module sys has no function 'nope'"),
        ("sys.path", "the module sys has no function 'path', but a list of that name"),
        ("json.nope", r"json/__init__\.py has no function 'nope'"),
        ("no_such_module.f", "no module named 'no_such_module'; add the folder"),
        ("json.no_such_module.f", "no module named 'json.no_such_module'; add the folder"),
    ],
)
def test_paths_that_lead_nowhere(path: str, problem: str) -> None:
    with pytest.raises(RewardError, match=problem) as caught:
        import_function(path, field="rollout.custom_rm_path")
    assert str(caught.value).startswith(f"rollout.custom_rm_path = {path!r}: ")


@pytest.mark.parametrize("path", ["f", ".f", "f.", "a..f", "a-b.f", "a b.f"])
def test_what_is_no_path(path: str) -> None:
    with pytest.raises(ConfigError, match=r"write module\.function"):
        import_function(path, field="rollout.custom_rm_path")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise ValueError('one\\ntwo')", r"importing \w+ raised ValueError: one two at .*\.py:1"),
        ("import sys\nsys.exit('bye')", r"raised SystemExit: bye at .*\.py:2"),
        ("raise KeyboardInterrupt", r"raised KeyboardInterrupt at .*\.py:1"),
        ("raise type('Own', (BaseException,), {})", r"raised Own at .*\.py:1"),
        ("import json\njson.loads('{')", r"raised JSONDecodeError: .* at .*code.*\.py:2"),
        ("def f(:\n", r"raised SyntaxError: .*line 1\)"),
        ("import no_such", r"no module named 'no_such', which is imported at .*\.py:1"),
        ("def __getattr__(name): 1 / 0", r"asking \w+ for it raised ZeroDivisionError"),
    ],
)
def test_a_module_that_fails_is_one_line(code: Code, text: str, problem: str) -> None:
    with pytest.raises(RewardError, match=problem) as caught:
        import_function(f"{code(text)}.f", field="x")
    assert "\n" not in str(caught.value)


def test_an_import_that_never_ends(code: Code) -> None:
    began = time.monotonic()
    before = signal.getsignal(signal.SIGALRM)
    name = code(
        "import time\ntry:\n    time.sleep(3600)\nexcept Exception: pass\n\ndef f(): pass\n"
    )
    with pytest.raises(RewardError, match=rf"importing {name} took longer than 0.3 s at .*\.py:3"):
        import_function(f"{name}.f", field="x", timeout_s=0.3)
    assert time.monotonic() - began < 20
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_it_works_in_a_thread(code: Code) -> None:
    found = []
    name = code("def f(): return 3\n")
    thread = threading.Thread(target=lambda: found.append(import_function(f"{name}.f", field="x")))
    thread.start()
    thread.join()
    assert found[0]() == 3


def test_a_signal_that_stops_us_is_no_fault_of_the_modules(code: Code) -> None:
    name = code("from slurm_rl.errors import Stopped\nraise Stopped(15)\n")
    with pytest.raises(Stopped):
        import_function(f"{name}.f", field="x")


def test_words_for_every_exception() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise OSError

    cases = [
        (ValueError("a\n\n  b\tc"), "ValueError: a b c"),
        (KeyError("k"), "KeyError: 'k'"),
        (SystemExit(), "SystemExit"),
        (Mute(), "Mute: (its own text cannot be had: OSError)"),
        (ValueError("x" * 999), f"ValueError: {'x' * 300}…"),
        (
            ExceptionGroup("many", [ValueError("a"), KeyError("b")]),
            "ExceptionGroup: many (2 sub-exceptions): ValueError: a",
        ),
    ]
    for error, words in cases:
        assert say_error(error) == words
