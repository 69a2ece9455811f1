"""What a supervisor is given: its job, its times, and what starts stage programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from slurm_rl.chain.graph import Link
from slurm_rl.chain.scheduler import make_claim_token, token_of
from slurm_rl.storage.claims import node_name
from slurm_rl.storage.durable import VISIBLE_S

#: Why a job must end: its wall time.
TIME_LIMIT = "time limit"


class Payload(Protocol):
    """A running stage program (all its ranks)."""

    def poll(self) -> int | None:
        """Its exit status (negative: a signal), or None while it runs."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Runner(Protocol):
    """Starts stage programs."""

    def start(self, order_path: Path, *, kind: str) -> Payload: ...


@dataclass
class Job:
    """What a supervisor knows of the job it runs in.

    stop: set from outside (a signal) to the reason why the job must end soon.
    """

    name: str
    link: Link
    task: int | None = None
    job_id: str = ""
    node: str = field(default_factory=node_name)
    stop: str = ""

    @property
    def token(self) -> str:
        return token_of(self.name)

    @property
    def claim_token(self) -> str:
        return make_claim_token(self.token, self.task)


@dataclass(frozen=True)
class Timing:
    """Seconds, by the supervisor's own clock.

    visible_s: how long something of another node's is waited for that may only not show here yet.
    work_again: waits before the work is begun again after an error of the file system.
    publish_again: waits between tries to publish what may have taken hours to compute.
    """

    lease_s: float = 60.0
    heartbeat_s: float = 5.0
    poll_s: float = 0.1
    wait_s: float = 600.0
    stop_grace_s: float = 60.0
    visible_s: float = VISIBLE_S
    work_again: tuple[float, ...] = (5.0, 20.0)
    publish_again: tuple[float, ...] = (5.0, 20.0, 60.0)
