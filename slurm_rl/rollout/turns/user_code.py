"""Calling code that a user wrote: whatever it raises is one line that says where.

Errors of our own tree pass through untouched: they are the engine's or say what to do already.
"""

from __future__ import annotations

import asyncio
import inspect
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from slurm_rl.errors import RewardError, SlurmRlError
from slurm_rl.rollout.rewards import describe
from slurm_rl.rollout.turns.session import ConversationCut

T = TypeVar("T")

#: Where code lies that is not the user's: this package, Python's own, what is installed.
_LIBRARIES = (
    str(Path(__file__).parents[2]),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


async def call_user(
    function: Callable[..., Any],
    *args: Any,
    field: str,
    passes: tuple[type[BaseException], ...] = (),
    **kwargs: Any,
) -> Any:
    """What a plain function or a coroutine returns; RewardError naming `field`, file and line.

    passes: what the caller wants to see as it is.
    """
    untouched: tuple[type[BaseException], ...]
    untouched = (asyncio.CancelledError, SlurmRlError, ConversationCut, *passes)
    try:
        value = function(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value
    except untouched:
        raise
    except BaseException as error:  # the user's code, `sys.exit` too
        raise RewardError(
            f"{field}: {describe(function)} raised {type(error).__name__}:"
            f" {_one_line(error)}{_raised_at(error)}"
        ) from error


async def in_thread(function: Callable[[], T]) -> T:
    """`function` in a thread of its own, which does not hold the process when it never ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            value = function()
        except BaseException as error:  # raised again where it is awaited
            told: Callable[[], None] = _teller(future, error=error)
        else:
            told = _teller(future, value=value)
        try:
            loop.call_soon_threadsafe(told)
        except RuntimeError:
            pass  # the loop has ended; nobody waits

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await future


def as_coroutine(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """A plain function so that it does not hold the loop: it runs in a thread."""
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return function

    async def call(*args: Any, **kwargs: Any) -> Any:
        value = await in_thread(lambda: function(*args, **kwargs))
        return await value if inspect.isawaitable(value) else value

    call.__wrapped__ = function  # type: ignore[attr-defined]  # `describe` looks through it
    call.__qualname__ = getattr(function, "__qualname__", type(function).__name__)
    return call


def _teller(
    future: asyncio.Future[T], *, value: Any = None, error: BaseException | None = None
) -> Callable[[], None]:
    def tell() -> None:
        if future.done():  # cancelled: a deadline has passed
            return
        if error is None:
            future.set_result(value)
        elif isinstance(error, StopIteration):  # no future takes it
            future.set_exception(RuntimeError("it raised StopIteration"))
        else:
            future.set_exception(error)

    return tell


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _raised_at(error: BaseException) -> str:
    """The deepest line that is neither ours nor a library's, else the deepest of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    at = (own or frames)[-1:]
    return f" at {at[0].filename}:{at[0].lineno}" if at else ""
