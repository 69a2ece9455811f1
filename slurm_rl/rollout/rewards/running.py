"""Runs the user's own functions where they can block, hang or exit without stopping the rollout.

Plain functions run in one thread, one at a time, so that they need not be thread-safe; coroutines
run together on an event loop in a thread of their own. Both threads are daemons: what hangs in them
does not hold the process when it ends. A plain function that takes too long keeps its thread for
ever, and the next one gets a new thread. A function that never gives the interpreter back (a
regular expression that explodes) cannot be helped from within: the stage's deadline ends it.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from slurm_rl.errors import RewardError
from slurm_rl.rollout.rewards.functions import describe, shorten
from slurm_rl.rollout.user_errors import say_error

#: In place of a value: the call was not made, since one before it never came back.
UNTRIED = object()
#: A loop that does not answer within this is blocked by one of its coroutines.
_PING_S = 1.0


class UserCode:
    """Calls functions of the user's. Used from one running event loop.

    what:   what they are called in an error. passes: exceptions of ours that go through the user's
            code and come out as they are.
    """

    def __init__(self, *, what: str = "reward", passes: tuple[type[Exception], ...] = ()) -> None:
        self._what = what
        self._passes = passes
        self._jobs: queue.SimpleQueue[_Job | None] | None = None
        self._turn = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float, prompt: Any
    ) -> Any:
        """What it returns, awaited if it is awaitable. Raises RewardError as `call_each` gives."""
        (value,) = await self.call_each(
            function, [arguments], timeout_s=timeout_s, prompts=[prompt]
        )
        if isinstance(value, RewardError):
            raise value
        return value

    async def call_each(
        self,
        function: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]],
        *,
        timeout_s: float,
        prompts: Sequence[Any],
    ) -> list[Any]:
        """What it returns for each of `calls`, in one trip to its thread; awaited if awaitable.

        A RewardError in its place where it raised, whatever that was, or took longer than
        `timeout_s`; UNTRIED for those behind one that never came back. Waiting for its turn does
        not count as its time.
        """
        if _is_coroutine(function):
            outcomes: list[Any] = [_Later(function, arguments) for arguments in calls]
        else:
            outcomes = await self._run_plain(function, calls, timeout_s)
        awaited = (self._await(outcome, timeout_s) for outcome in outcomes)
        if any(isinstance(outcome, _Later) for outcome in outcomes):
            outcomes = await asyncio.gather(*awaited)
        found = [
            self._judge(outcome, function, timeout_s, prompt)
            for outcome, prompt in zip(outcomes, prompts, strict=False)
        ]
        return found + [UNTRIED] * (len(calls) - len(found))

    async def _await(self, outcome: Any, timeout_s: float) -> Any:
        if not isinstance(outcome, _Later):
            return outcome
        try:
            return await self._run_coroutine(outcome.function, outcome.arguments, timeout_s)
        except (_TookTooLong, _Raised) as problem:
            return problem

    def _judge(
        self, outcome: Any, function: Callable[..., Any], timeout_s: float, prompt: Any
    ) -> Any:
        """A value as it is, a problem as a RewardError; ours go through."""
        if isinstance(outcome, _TookTooLong):
            return RewardError(
                f"{self._what} {describe(function)} took longer than {timeout_s:g} s"
                f" for the prompt {shorten(prompt)}",
                hint="mend it, or raise rollout.reward_timeout_s",
            )
        if not isinstance(outcome, _Raised):
            return outcome
        if isinstance(outcome.error, self._passes):
            raise outcome.error
        error = RewardError(
            f"{self._what} {describe(function)} raised {say_error(outcome.error)}"
            f" for the prompt {shorten(prompt)}"
        )
        error.__cause__ = outcome.error
        return error

    def close(self) -> None:
        """Let both threads end, if they can."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None
        if self._loop is not None:
            _end_loop(self._loop)
            self._loop = None

    async def _run_plain(
        self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], timeout_s: float
    ) -> list[Any]:
        """Outcomes in order; they end at the first call that takes too long."""
        async with self._turn:
            if self._jobs is None:
                self._jobs = queue.SimpleQueue()
                threading.Thread(
                    target=_work, args=(self._jobs,), name="rewards", daemon=True
                ).start()
            job = _Job(function, calls)
            self._jobs.put(job)
            try:
                await job.watch(timeout_s)
            except (_TookTooLong, asyncio.CancelledError) as error:
                job.is_given_up = True
                self._jobs.put(None)  # if it ever comes back
                self._jobs = None
                if isinstance(error, asyncio.CancelledError):
                    raise
                return [*job.outcomes, error]
        return job.outcomes

    async def _run_coroutine(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float
    ) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=_run_loop, args=(self._loop,), name="async rewards", daemon=True
            ).start()
        loop = self._loop
        future = asyncio.run_coroutine_threadsafe(_guard(function, arguments), loop)
        try:
            return await _wait(future, timeout_s)
        except _TookTooLong:
            future.cancel()
            if loop is self._loop and not await _answers(loop):
                self._loop = None  # blocked: the next ones get another
                _end_loop(loop)
            raise
        except asyncio.CancelledError:
            future.cancel()
            raise


class _Later:
    """A coroutine function that is still to be called."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments


class _Job:
    """Calls of one plain function, one after the other. `began`: the present one's start."""

    def __init__(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> None:
        self._function = function
        self._calls = calls
        self._began = time.monotonic()
        self._done: Future[None] = Future()
        self.outcomes: list[Any] = []
        self.is_given_up = False

    def run(self) -> None:
        """In the thread of plain functions."""
        for arguments in self._calls:
            if self.is_given_up:
                return
            self._began = time.monotonic()
            try:
                value = self._function(*arguments)
            except BaseException as error:  # the user's code, `sys.exit` too
                value = _Raised(error)
            if self.is_given_up:
                return
            if inspect.isawaitable(value):
                value = _Later(_give_back, (value,))
            self.outcomes.append(value)
        self._done.set_result(None)

    async def watch(self, timeout_s: float) -> None:
        """Until all calls are done. Raises _TookTooLong for one that is not within `timeout_s`."""
        done = asyncio.wrap_future(self._done)
        while True:
            left = self._began + timeout_s - time.monotonic()
            if left <= 0:
                raise _TookTooLong
            if (await asyncio.wait({done}, timeout=left))[0]:
                return


class _TookTooLong(Exception):
    pass


class _Raised(Exception):
    """Carries what the user's code raised, `SystemExit` too, past our own handling."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


async def _wait(future: Future[Any], timeout_s: float) -> Any:
    """The future's result; it goes on after the timeout, since it cannot be stopped."""
    ours = asyncio.wrap_future(future)
    ours.add_done_callback(_forget)
    done, _ = await asyncio.wait({ours}, timeout=timeout_s)
    if not done:
        raise _TookTooLong
    return ours.result()


def _forget(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # else asyncio reports it as never retrieved


async def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a loop still takes turns."""
    ping: Future[None] = Future()
    loop.call_soon_threadsafe(ping.set_result, None)
    try:
        await _wait(ping, _PING_S)
    except _TookTooLong:
        return False
    return True


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    """The thread of plain functions."""
    while (job := jobs.get()) is not None:
        job.run()
        del job  # its samples need not live until the next one comes


async def _guard(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return await function(*arguments)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _Raised(asyncio.CancelledError("by itself")) from None
    except BaseException as error:  # the user's code; SystemExit would end the loop
        raise _Raised(error) from error


async def _give_back(value: Awaitable[Any]) -> Any:
    return await value


def _is_coroutine(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _end_loop(loop: asyncio.AbstractEventLoop) -> None:
    def end() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.call_later(0.1, loop.stop)

    loop.call_soon_threadsafe(end)
