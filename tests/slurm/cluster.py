"""The real Slurm of `tools/slurm_cluster.sh`, as tests see it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_TOOL = Path(__file__).parents[2] / "tools" / "slurm_cluster.sh"
#: Beside the default's, so that a developer's own cluster may run at the same time.
_PORT = 26817

T = TypeVar("T")


@dataclass(frozen=True)
class Cluster:
    """Slurm's commands are found on PATH and go where SLURM_CONF points while it is up."""

    root: Path
    num_nodes: int = 3

    @property
    def conf(self) -> Path:
        return self.root / "etc" / "slurm.conf"

    def tool(self, *argv: str) -> str:
        """Run the tool; its standard output."""
        env = os.environ | {
            "SLURM_CLUSTER_DIR": str(self.root),
            "SLURM_CLUSTER_NODES": str(self.num_nodes),
            "SLURM_CLUSTER_PORT": str(_PORT),
            "SLURM_CLUSTER_GRACE": "2",
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

    def clear(self) -> None:
        """Cancel every job, and wait until the nodes are free."""
        self.call("scancel", "--user", str(os.getuid()))
        wait_for(lambda: not self.call("squeue", "-h", "-o", "%i").strip(), what="an empty queue")


def wait_for(look: Callable[[], T], *, what: str, timeout_s: float = 30.0) -> T:
    """The first true value of `look`."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"no {what} after {timeout_s:.0f} s: {found!r}"
        time.sleep(0.1)
