"""A thread for all that one conversation calls of an object of the user's.

Objects may belong to a thread, as a connection of sqlite3 does, and need not bear two calls at
once. The thread is a daemon: what hangs in it does not hold the process when it ends.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

#: What was returned, or what was raised: a future refuses some exceptions.
_Outcome = tuple[Any, BaseException | None]


class OwnThread:
    """Calls functions one after the other in a thread, which starts with the first."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[_Outcome]] | None]
        self._jobs = queue.SimpleQueue()
        self._last: Future[_Outcome] | None = None

    async def call(self, function: Callable[[], T]) -> T:
        """What it returns or raises. One that began goes on when this is cancelled."""
        value: T = unpack(await asyncio.wrap_future(self.post(function)))
        return value

    def post(self, function: Callable[[], Any]) -> Future[_Outcome]:
        """Have it called after those before it, whether or not anybody waits; for `unpack`."""
        if self._last is None:
            threading.Thread(
                target=_work, args=(self._jobs,), name="conversation", daemon=True
            ).start()
        self._last = Future()
        self._jobs.put((function, self._last))
        return self._last

    @property
    def is_busy(self) -> bool:
        """Whether a call has not come back, as one that nobody waits for any more."""
        return self._last is not None and not self._last.done()

    def end(self) -> None:
        """Let the thread end after what it was given."""
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[_Outcome]] | None]) -> None:
    while (job := jobs.get()) is not None:
        function, future = job
        if future.set_running_or_notify_cancel():
            try:
                outcome: _Outcome = (function(), None)
            except BaseException as error:  # raised again where it is awaited
                outcome = (None, error)
            future.set_result(outcome)
            del outcome
        del job, function, future  # the user's object need not live until the next one comes


def unpack(outcome: _Outcome) -> Any:
    """What was returned; raises what was raised."""
    value, error = outcome
    if error is not None:
        raise error
    return value
