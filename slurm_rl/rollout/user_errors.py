"""What the user's code raised, in one line; and where in that code it was.

Owns the words alone: who calls the code, and what an error means for the run, is decided elsewhere.
The whole trace is the cause of the error that these words are put into, and the stage's entry
writes it to the log.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Characters of an exception's text that a person is shown; the rest is in the log.
_MOST = 300
#: Where code lies that is not the user's: this package, Python's own, what is installed.
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(__file__).parents[1],
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)


def say_error(error: BaseException) -> str:
    """`ValueError: its text at .../file.py:3`, in one line, whatever the exception is.

    Of a group of exceptions the first is said too.
    """
    return f"{_say_alone(error)}{raised_at(error)}"


def raised_at(error: BaseException) -> str:
    """` at file:line`: the deepest line that is neither ours nor a library's, else the deepest.

    Of a file that is no Python, the line that is none.
    """
    if isinstance(error, SyntaxError) and _is_file(error.filename) and error.lineno:
        return f" at {error.filename}:{error.lineno}"
    # Frozen frames are the import's own machinery, and no file at all.
    found = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in found if not frame.filename.startswith("<frozen ")]
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    at = (own or frames)[-1:]
    return f" at {at[0].filename}:{at[0].lineno}" if at else ""


def name_function(function: Callable[..., Any]) -> str:
    """`name (file:line)`, for a person to click on."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else str(name)


def show_value(value: Any, *, most: int = 60) -> str:
    """The beginning of its `repr`, in one line; its type where that raises."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # the user's own __repr__
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}…"


def _is_file(name: str | None) -> bool:
    return bool(name) and not str(name).startswith("<")


def _say_alone(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = " ".join(str(error).split())
    except Exception as second:  # the user's own __str__
        text = f"(its own text cannot be had: {type(second).__name__})"
    if len(text) > _MOST:
        text = f"{text[:_MOST]}…"
    said = f"{name}: {text}" if text else name
    if isinstance(error, BaseExceptionGroup):
        return f"{said}: {_say_alone(error.exceptions[0])}"
    return said
