"""Kills jobs at named moments of their lives, seen from outside through the run directory.

    queued     the job's process lives, but has not claimed its stage yet
    claimed    the claim is there; the program has not begun to write
    working    the program runs: it has read its order and its log has lines
    result     result.json is there, COMMIT is not
    committed  COMMIT is there, the job has not ended

A kill is SIGKILL to the supervisor and to all its program's processes at once, as if the node had
lost power.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rl.launch.local import SpoolEntry, is_alive, read_entry

PHASES = ("queued", "claimed", "working", "result", "committed")


@dataclass
class Killer:
    """Kills the first job of every stage once, in the phase assigned to it or, if that has gone
    by unseen (some last milliseconds), in the next one that is seen."""

    root: Path
    seed: int
    wanted: dict[str, str] = field(default_factory=dict)
    hits: dict[str, str] = field(default_factory=dict)

    def assign(self, stages: list[str]) -> None:
        """Give each stage a phase, so that every phase has one."""
        # The last phases are the shortest: they come first when there are more stages than phases.
        phases = [PHASES[-1 - index % len(PHASES)] for index in range(len(stages))]
        random.Random(self.seed).shuffle(phases)
        self.wanted = dict(zip(stages, phases, strict=True))

    def look(self) -> None:
        """Kill whatever is in its phase now."""
        for path in (self.root / "scheduler" / "jobs").glob("*.json"):
            entry = read_entry(path)
            if entry is None or not is_alive(entry):
                continue
            stage = ".".join(entry.name.split(".")[1:3])
            phase = self.wanted.get(stage)
            if phase is None or stage in self.hits:
                continue
            now = self._phase_of(stage, path)
            if now and PHASES.index(now) >= PHASES.index(phase):
                self._kill(entry)
                # What is true after the kill is what counts: it may have moved on meanwhile.
                self.hits[stage] = self._phase_of(stage, path)

    def attend(self, watcher: subprocess.Popen[str], *, seconds: float) -> None:
        """Look until `watcher` ends; it must end well, and in time."""
        deadline = time.monotonic() + seconds
        while watcher.poll() is None and time.monotonic() < deadline:
            self.look()
            time.sleep(0.001)
        _, err = watcher.communicate(timeout=10)
        assert watcher.returncode == 0, err

    def _phase_of(self, stage: str, spool: Path) -> str:
        iteration, kind = stage.split(".")
        folder = self.root / "iterations" / f"{int(iteration[1:]):06d}" / f"{kind}.t0"
        if (folder / "COMMIT").exists():
            return "committed"
        claims = sorted(folder.glob("claim.*"))
        if not claims:
            return "queued" if spool.with_suffix(".running").exists() else ""
        attempts = sorted(folder.glob("a0*"))
        if not attempts:
            return "claimed"
        if (attempts[-1] / "result.json").exists():
            return "result"
        logs = list(attempts[-1].glob("rank-*.log"))
        return "working" if any(log.stat().st_size for log in logs) else "claimed"

    def _kill(self, entry: SpoolEntry) -> None:
        victims = [entry.pid, *descendants(entry.pid)]
        with contextlib.suppress(ProcessLookupError):
            os.kill(entry.pid, signal.SIGSTOP)  # so that it starts nothing more
        victims = [*victims, *descendants(entry.pid)]
        for pid in dict.fromkeys(victims):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while is_alive(entry) and time.monotonic() < deadline:
            time.sleep(0.001)


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, from /proc."""
    found, front = [], [pid]
    while front:
        parent = front.pop()
        try:
            text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        except OSError:
            continue
        children = [int(child) for child in text.split()]
        found += children
        front += children
    return found
