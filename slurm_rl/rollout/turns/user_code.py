"""Calling code that a user wrote: whatever it raises is one line that says where.

Errors of our own tree pass through untouched: they are the engine's or say what to do already.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from slurm_rl.errors import RewardError, SlurmRlError, Stopped
from slurm_rl.rollout.turns.session import ConversationCut
from slurm_rl.rollout.user_errors import name_function, say_error

T = TypeVar("T")


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
    untouched = (SlurmRlError, Stopped, ConversationCut, *passes)
    try:
        value = function(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # The user's own: it would end the rollout without a word.
        raise RewardError(
            f"{field}: {name_function(function)} raised {say_error(error)}"
        ) from error
    except untouched:
        raise
    except BaseException as error:  # the user's code, `sys.exit` too
        raise RewardError(
            f"{field}: {name_function(function)} raised {say_error(error)}"
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


def as_coroutine(
    function: Callable[..., Any], *, run: Callable[..., Awaitable[Any]] = in_thread
) -> Callable[..., Awaitable[Any]]:
    """A plain function so that it does not hold the loop: `run` runs it, by default in a thread."""
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return function

    async def call(*args: Any, **kwargs: Any) -> Any:
        value = await run(lambda: function(*args, **kwargs))
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
