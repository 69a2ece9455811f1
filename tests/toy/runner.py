"""The toy program inside a process of the in-memory cluster: its work takes virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rl.errors import SlurmRlError
from slurm_rl.launch.memory_process import Process
from slurm_rl.storage.fs import Fs
from slurm_rl.types import Order, parse_order
from toy.program import Crash, Steps, leave_failure, toy_steps


@dataclass
class ToyPayload:
    """A running program: looked at, it has done what it could do by now."""

    order: Order
    fs: Fs
    clock: Callable[[], float]
    due: float = 0.0
    status: int | None = None
    is_told_to_stop: bool = False
    steps: Steps = field(init=False)

    def __post_init__(self) -> None:
        self.steps = toy_steps(self.order, fs=self.fs)
        self.due = self.clock()

    def poll(self) -> int | None:
        while self.status is None and self.due <= self.clock():
            if self.is_told_to_stop:
                self.status = 143
                break
            try:
                self.due += next(self.steps)
            except StopIteration:
                self.status = 0
            except Crash:
                self.status = -9
            except SlurmRlError as error:
                self.status = leave_failure(self.order, error, self.fs)
        return self.status

    def terminate(self) -> None:
        self.is_told_to_stop, self.due = True, self.clock()

    def kill(self) -> None:
        if self.status is None:
            self.status = -9


@dataclass
class ToyRunner:
    """Implements `Runner`; a SIGTERM that reaches the program alone goes to its payload."""

    process: Process

    def start(self, order_path: Path, *, kind: str) -> ToyPayload:
        fs = self.process.fs()
        payload = ToyPayload(parse_order(fs.read(order_path)), fs, self.process.cluster.clock)
        assert payload.order.kind == kind
        self.process.on_terminate = payload.terminate
        return payload
