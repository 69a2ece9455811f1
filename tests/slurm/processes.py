"""The processes of a run's jobs, as seen from outside of every node's namespace."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process and its words."""

    pid: int
    words: tuple[str, ...]

    @property
    def job(self) -> str:
        """Name of the job that a supervisor stands for: `… link RUN INTENT NAME …`."""
        return self.words[self.words.index("link") + 3]

    def kill(self) -> bool:
        """SIGKILL; whether it was still there."""
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


def find_supervisors(root: Path) -> list[Process]:
    """The live supervisors (not the ticks) of the run at `root`."""
    return [
        process
        for process in read_processes()
        if "slurm_rl.launch.job" in process.words
        and "link" in process.words
        and str(root) in process.words
    ]


def find_payloads(root: Path) -> list[Process]:
    """The live stage programs of the run at `root`, each rank for itself."""
    prefix = f"{root}/iterations/"
    return [
        process
        for process in read_processes()
        if process.words[-1].startswith(prefix)
        and process.words[-1].endswith("/order.json")
        and Path(process.words[0]).name.startswith("python")
    ]


def read_processes() -> list[Process]:
    """Every process of the machine that has words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        except OSError:
            continue  # it has ended meanwhile
        if words != [""]:
            found.append(Process(int(path.parent.name), tuple(words)))
    return found
