"""The toy program inside a process of the in-memory cluster: its work takes virtual time."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from slurm_rl.errors import SlurmRlError
from slurm_rl.launch.memory_process import Process
from slurm_rl.types import Order, parse_order
from toy.program import Crash, leave_failure, toy_steps


@dataclass
class ToyPayload:
    """A running program, in a process of its own: it can die alone, and outlive its supervisor."""

    order: Order
    process: Process
    status: int | None = None
    is_told_to_stop: bool = False

    def life(self) -> Generator[float, None, int]:
        """Work until the program ends; its exit status."""
        fs = self.process.fs()
        steps = toy_steps(self.order, fs=fs)
        while not self.is_told_to_stop:
            try:
                work_s = next(steps)
            except StopIteration:
                return self._end(0)
            except Crash:
                return self._end(-9)
            except (SlurmRlError, OSError) as error:
                return self._end(leave_failure(self.order, error, fs))
            yield work_s
        return self._end(143)

    def poll(self) -> int | None:
        if self.status is None and not self.process.alive:
            self.status = -9
        return self.status

    def terminate(self) -> None:
        self.is_told_to_stop = True
        if self.process.alive:
            self.process.cluster.interrupt(self.process)

    def kill(self) -> None:
        if self.poll() is None:
            self.process.alive, self.status = False, -9

    def _end(self, status: int) -> int:
        self.status = status
        return status


@dataclass
class ToyRunner:
    """Implements `Runner`; a SIGTERM that reaches the program alone goes to its payload."""

    process: Process

    def start(self, order_path: Path, *, kind: str) -> ToyPayload:
        of = self.process
        order = parse_order(of.fs().read(order_path))
        assert order.kind == kind
        of.program = Process(of.cluster, name=of.name, node=of.node, job_id=of.job_id)
        of.program.command = of.command
        payload = ToyPayload(order, of.program)
        of.on_terminate = payload.terminate
        of.cluster.start_process(of.program, payload.life())
        return payload
