"""Dotted paths of the user's, and modules that do what they like when they are imported."""

from __future__ import annotations

import importlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import slurm_rl
from slurm_rl.errors import ConfigError, RewardError, Stopped
from slurm_rl.rollout.user_errors import raised_at, say_error
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


@pytest.mark.parametrize("path", ["f", ".f", "f.", "a..f", "."])
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
    outer = signal.setitimer(signal.ITIMER_REAL, 0.0)  # pytest's own, on this test's time
    name = code(
        "import time\ntry:\n    time.sleep(3600)\nexcept Exception: pass\n\ndef f(): pass\n"
    )
    with pytest.raises(RewardError, match=rf"importing {name} took longer than 0.3 s at .*\.py:3"):
        import_function(f"{name}.f", field="x", timeout_s=0.3)
    assert time.monotonic() - began < 20
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    signal.setitimer(signal.ITIMER_REAL, *outer)


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """A timer of somebody else's: its handler notes that it was called."""
    found: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: found.append(number))
    outer = signal.setitimer(signal.ITIMER_REAL, 0.0)
    yield found
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *outer)


def test_a_timer_that_runs_already_goes_on(code: Code, alarms: list[int]) -> None:
    name = code("import time\ntime.sleep(0.3)\ndef f(): pass\n")
    signal.setitimer(signal.ITIMER_REAL, 60.0, 7.0)
    import_function(f"{name}.f", field="x")
    left_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    assert 30 < left_s <= 59.7 and interval_s == 7.0
    assert not alarms


def test_a_timer_whose_time_came_meanwhile_rings_at_once(code: Code, alarms: list[int]) -> None:
    name = code("import time\ntime.sleep(0.3)\ndef f(): pass\n")
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    import_function(f"{name}.f", field="x")
    time.sleep(0.2)
    assert alarms == [signal.SIGALRM]


def test_a_handler_of_a_c_library(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python gives None for it, and takes no None back."""
    set_for_real, given = signal.signal, []

    def set_handler(number: int, handler: object) -> object:
        given.append(handler)
        before = set_for_real(number, handler)  # type: ignore[arg-type]
        return None if len(given) == 1 else before

    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", set_handler)
        import_function(f"{code('def f(): pass')}.f", field="x")
        assert given[1] is signal.SIG_DFL
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "it would end the process"


def test_a_module_whose_name_has_a_hyphen(tmp_path: Path, code: Code) -> None:
    name = code("")
    (tmp_path / f"{name}-dash").mkdir()
    (tmp_path / f"{name}-dash" / "mod.py").write_text("def load(): return 3\n")
    assert import_function(f"{name}-dash.mod.load", field="x")() == 3


def test_a_module_that_is_no_python_is_named_with_its_line(tmp_path: Path, code: Code) -> None:
    broken = code("a = 1\ndef f(:\n")
    for name in (broken, code(f"import {broken}\n")):
        with pytest.raises(RewardError, match=r"raised SyntaxError: .*line 2\)") as caught:
            import_function(f"{name}.f", field="x")
        assert str(caught.value).endswith(f" at {tmp_path / broken}.py:2")


def test_frames_without_a_file_are_not_named() -> None:
    """Python's own import is frozen; a text that is evaluated is named where it is."""
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("no_such.module")
    trace = caught.value.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<frozen"):
        trace = trace.tb_next
    assert trace is not None
    assert raised_at(caught.value.with_traceback(trace)) == ""
    with pytest.raises(SyntaxError) as broken:
        eval("1 +")
    assert raised_at(broken.value).startswith(f" at {__file__}:")


def test_a_folder_beside_the_package_is_the_users() -> None:
    package = Path(slurm_rl.__file__).parent
    names: dict[str, Any] = {}
    text = "def outer(inner): inner()\ndef fail(): raise ValueError"
    for file in (package / "own.py", Path(f"{package}_rewards/own.py")):
        exec(compile(text, file, "exec"), names.setdefault(str(file), {}))
    ours, users = names.values()
    with pytest.raises(ValueError) as caught:
        users["outer"](ours["fail"])
    assert raised_at(caught.value) == f" at {package}_rewards/own.py:1"


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
