"""The real Slurm of `tools/slurm_cluster.sh`, as tests see it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

_TOOL = Path(__file__).parents[2] / "tools" / "slurm_cluster.sh"
#: First ports that are tried: above the tool's own, below those that Linux hands out.
_PORTS = range(18000, 32000, 100)

T = TypeVar("T")


@dataclass(frozen=True)
class Cluster:
    """Slurm's commands are found on PATH and go where SLURM_CONF points while it is up."""

    root: Path
    num_nodes: int = 3
    port: int = field(default_factory=lambda: find_ports())
    #: Further variables of the tool, without their common beginning: `{"GPUS": "1"}`.
    knobs: Mapping[str, str] = field(default_factory=dict)

    @property
    def program(self) -> Path:
        """The tool itself, for commands whose end is of interest."""
        return _TOOL

    @property
    def conf(self) -> Path:
        return self.root / "etc" / "slurm.conf"

    def tool(self, *argv: str) -> str:
        """Run the tool; its standard output."""
        env = os.environ | {
            "SLURM_CLUSTER_DIR": str(self.root),
            "SLURM_CLUSTER_NODES": str(self.num_nodes),
            "SLURM_CLUSTER_PORT": str(self.port),
            "SLURM_CLUSTER_GRACE": "2",
            **{f"SLURM_CLUSTER_{name}": value for name, value in self.knobs.items()},
        }
        done = subprocess.run([_TOOL, *argv], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def call(self, *argv: str) -> str:
        """Run one of Slurm's own commands; its standard output."""
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{argv}: {done.stderr}{done.stdout}"
        return done.stdout

    def show(self, job_id: str) -> dict[str, str]:
        """`scontrol show job`, by key."""
        text = self.call("scontrol", "show", "job", "-o", job_id)
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def state(self, job_id: str) -> str:
        """Slurm's word for a job's state."""
        return self.call("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T").strip()

    def job_names(self) -> list[str]:
        """Of all jobs in the queue."""
        return self.call("squeue", "-h", "-o", "%j").split()

    def clear(self) -> None:
        """Cancel every job, and wait until the nodes are free."""
        self.call("scancel", "--user", str(os.getuid()))
        wait_for(lambda: not self.call("squeue", "-h", "-o", "%i").strip(), what="an empty queue")


def find_ports() -> int:
    """The first of a hundred ports that nobody listens on: several clusters may run at once."""
    # Each process begins elsewhere, so that two that start together do not choose the same.
    offset = os.getpid() * 7 % len(_PORTS)
    for first in [*_PORTS[offset:], *_PORTS[:offset]]:
        if all(is_free(first + number) for number in (0, 1, 2, 3, 4, 90, 91)):
            return first
    raise RuntimeError(f"no hundred free ports from {_PORTS[0]} to {_PORTS[-1]}")


def is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@contextlib.contextmanager
def running(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, up and the one that Slurm's commands here go to; wiped at the end."""
    cluster.root.mkdir(parents=True, exist_ok=True)
    # Readable for any node's daemons, whoever they run as.
    for folder in (cluster.root, *list(cluster.root.parents)[:2]):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(cluster.conf)
    try:
        cluster.tool("start")
        yield cluster
    finally:
        if before is None:
            os.environ.pop("SLURM_CONF")
        else:
            os.environ["SLURM_CONF"] = before
        cluster.tool("stop", "--wipe")


def wait_for(look: Callable[[], T], *, what: str, timeout_s: float = 60.0) -> T:
    """The first true value of `look`."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"no {what} after {timeout_s:.0f} s: {found!r}"
        time.sleep(0.1)
