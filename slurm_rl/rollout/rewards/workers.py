"""Processes in which rewards run that may hang, or take the process with them.

A process takes one task at a time and can be killed at any moment: a new one is started for the
next task. They see no variable of ours, since what they compute comes from a model, and they end
with us. Tasks go there pickled, answers come back as JSON: what a worker says is not trusted.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

from slurm_rl.errors import ConfigError, RewardError

_START_S = 300.0
_ROOT = str(Path(__file__).resolve().parents[3])
_BOOT = (
    f"import sys; sys.path.insert(0, {_ROOT!r});"
    " from slurm_rl.rollout.reward_worker import main; main()"
)
#: Where `pip` finds what a kind of task needs.
_EXTRAS = {"math-verify": "rewards", "reasoning-gym": "procedural"}
_LONGEST_ANSWER = 1 << 20
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "TMPDIR")


class WorkerHung(Exception):
    """A task took longer than it may."""


class WorkerDied(Exception):
    """A task took its process with it."""


class Workers:
    """A few processes, started when they are first needed. An async context manager by `close`."""

    def __init__(self, num_workers: int) -> None:
        self._turns = asyncio.Semaphore(num_workers or default_num_workers())
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()

    async def run(
        self, task: dict[str, Any], *, timeout_s: float, cpu_s: float | None = None
    ) -> Any:
        """What the task gives. Waiting for a free process and its start do not count as its time.

        cpu_s: processor time that it may take. Raises WorkerHung, WorkerDied, RewardError where the
        task failed, and ConfigError where a library is missing.
        """
        async with self._turns:
            worker = self._idle.pop() if self._idle else await self._start()
            is_whole = False
            try:
                if task["kind"] not in worker.warm:
                    _unpack(await worker.ask({"kind": task["kind"], "warm": True}, _START_S))
                    worker.warm.add(task["kind"])
                bounds = {} if cpu_s is None else {"cpu_s": cpu_s}
                answer = await worker.ask(task | bounds, timeout_s)
                is_whole = True
            except TimeoutError:
                raise WorkerHung from None
            except (asyncio.IncompleteReadError, ConnectionError, ValueError):
                await self._end(worker)
                raise (WorkerHung if worker.ran_out_of_time else WorkerDied) from None
            finally:
                if is_whole:
                    self._idle.append(worker)
                else:
                    await self._end(worker)
        return _unpack(answer)

    async def close(self) -> None:
        """Kill them all."""
        await asyncio.gather(*(self._end(worker) for worker in list(self._all)))
        self._idle.clear()

    async def _start(self) -> _Worker:
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-B", "-c", _BOOT),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env=kept,
        )
        worker = _Worker(process)
        self._all.add(worker)
        return worker

    async def _end(self, worker: _Worker) -> None:
        self._all.discard(worker)
        await asyncio.shield(worker.end())


class _Worker:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.warm: set[str] = set()

    async def ask(self, task: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        data = pickle.dumps(task)
        self._process.stdin.write(len(data).to_bytes(8, "big") + data)
        return await asyncio.wait_for(self._answer(self._process.stdout), timeout_s)

    async def _answer(self, pipe: asyncio.StreamReader) -> dict[str, Any]:
        assert self._process.stdin is not None
        await self._process.stdin.drain()
        size = int.from_bytes(await pipe.readexactly(8), "big")
        if size > _LONGEST_ANSWER:
            raise ConnectionError(f"an answer of {size} bytes")
        answer: dict[str, Any] = json.loads(await pipe.readexactly(size))
        return answer

    @property
    def ran_out_of_time(self) -> bool:
        """Whether the kernel ended it for the processor time that it took."""
        return self._process.returncode == -signal.SIGXCPU

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.stdout is not None and not self._process.stdout.at_eof():
            self._kill()
        await self._process.wait()

    def _kill(self) -> None:
        try:
            self._process.kill()
        except ProcessLookupError:
            pass


def default_num_workers() -> int:
    """A quarter of the cores, at least 1 and at most 8."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 4))


def _unpack(answer: dict[str, Any]) -> Any:
    if "missing" in answer:
        raise ConfigError(
            f"this reward needs {answer['missing']}, which cannot be imported: {answer['why']}",
            hint=f"pip install 'slurm-rl[{_EXTRAS[answer['missing']]}]' for this stage",
        )
    if "error" in answer:
        raise RewardError(str(answer["error"]))
    return answer["value"]
