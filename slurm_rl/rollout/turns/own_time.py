"""A deadline for code of the user's that asks the engine: what the engine takes does not count.

How long the engine needs for an answer says how busy it is, nothing about who asked. The clock of a
conversation therefore stands while a request of it is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

#: How long code that is told to end may take to tidy up; then nobody waits for it.
_TIDY_UP_S = 1.0


class OwnTime:
    """The clock of one conversation. is_over: who asks now has been left behind."""

    def __init__(self) -> None:
        self.is_over = False
        self._num_asked = 0
        self._limit: asyncio.Timeout | None = None
        self._left_s = 0.0

    async def within(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        """What it returns or raises; TimeoutError after `timeout_s` of its own time, in all.

        It is then cancelled, and left behind where it does not heed that.
        """
        task = asyncio.ensure_future(coroutine)
        try:
            async with asyncio.timeout(timeout_s) as self._limit:
                await asyncio.wait({task})
            return task.result()
        finally:
            self._limit, self.is_over = None, True
            if not task.done():
                task.cancel()
                task.add_done_callback(_forget)
                await asyncio.wait({task}, timeout=_TIDY_UP_S)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Around a request to the engine; several may be under way at once."""
        self._num_asked += 1
        if self._num_asked == 1 and (limit := self._running()) is not None:
            self._left_s = (limit.when() or 0.0) - asyncio.get_running_loop().time()
            limit.reschedule(None)
        try:
            yield
        finally:
            self._num_asked -= 1
            if self._num_asked == 0 and (limit := self._running()) is not None:
                limit.reschedule(asyncio.get_running_loop().time() + self._left_s)

    def _running(self) -> asyncio.Timeout | None:
        return None if self._limit is None or self._limit.expired() else self._limit


def _forget(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()  # else asyncio reports it as never retrieved
