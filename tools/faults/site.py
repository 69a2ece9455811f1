"""The cluster and the run as seen from outside: queue, processes, commits, repairs to come.

Owns the file that holds the chain back (`TOY_HOLD`) and the list of repairs.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slurm.cluster import Cluster
from slurm.processes import find_supervisors
from toy.commands import ToyRun

from faults.report import AttemptRecord
from slurm_rl.launch.slurm import expand_nodes

_ANSWER_S = 15.0
_FORMAT = "%i|%T|%N|%r|%j"
#: States in which nothing more will happen to a job.
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


@dataclass(frozen=True, slots=True)
class Job:
    """A line of squeue."""

    job_id: str
    state: str
    nodes: tuple[str, ...]
    reason: str
    name: str

    @property
    def is_link(self) -> bool:
        return ".i0" in self.name

    @property
    def stage(self) -> str:
        """As `i0003.train`; `tick` for a tick."""
        return ".".join(self.name.split(".")[1:-1])


@dataclass
class Site:
    """One cluster, one run, and the faults that are still in effect."""

    cluster: Cluster
    run: ToyRun
    hold: Path
    num_stages: int
    began: float = field(default_factory=time.time)
    broken: set[str] = field(default_factory=set)
    controller_killed: float = -1e9
    _repairs: list[tuple[float, str, Callable[[], object]]] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.run.root

    def elapsed_s(self) -> float:
        return time.time() - self.began

    # -- Slurm --------------------------------------------------------------------------------

    def call(self, *argv: str) -> str | None:
        """Standard output of one of Slurm's commands; None if it fails or does not answer."""
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_ANSWER_S)
        except subprocess.TimeoutExpired:
            return None
        return done.stdout if done.returncode == 0 else None

    def jobs(self) -> list[Job]:
        """The run's jobs; none if the controller does not answer."""
        said = self.call("squeue", "-h", "-t", "all", "-r", "-o", _FORMAT) or ""
        found = []
        for line in said.splitlines():
            job_id, state, nodes, reason, name = line.split("|", 4)
            if name.startswith("toy."):
                names = tuple(expand_nodes(nodes)) if nodes else ()
                found.append(Job(job_id, state, names, reason, name))
        return found

    def left(self) -> list[str] | None:
        """Names of all jobs that are not over; None if that cannot be said."""
        said = self.call("squeue", "-h", "-o", "%T|%j")
        if said is None:
            return None
        lines = [line.partition("|") for line in said.splitlines()]
        return [name for state, _, name in lines if state not in _ENDED]

    def working(self) -> list[Job]:
        """Running links of stages that are not committed, their supervisors alive, on nodes that
        nobody broke."""
        names = {process.job for process in find_supervisors(self.root)}
        done = {f"i{p.parts[-3][2:]}.{p.parts[-2].partition('.')[0]}" for p in self.commits()}
        return [
            job
            for job in self.jobs()
            if job.state == "RUNNING" and job.name in names and job.stage not in done
            and not self.broken & set(job.nodes)
        ]  # fmt: skip

    def kill_controller(self) -> None:
        self.controller_killed = time.monotonic()
        self.cluster.tool("controller", "kill")

    # -- the run ------------------------------------------------------------------------------

    def commits(self) -> list[Path]:
        return sorted(self.root.glob("iterations/*/*.t*/COMMIT"))

    def progress(self) -> int:
        return len(self.commits())

    def allow(self, place: int) -> None:
        """Let stages up to that place end; the last of all only by `release`."""
        now = int(self.hold.read_text())
        self._write_hold(max(now, min(place, self.num_stages - 2)))

    def release(self) -> None:
        self._write_hold(self.num_stages)

    @contextlib.contextmanager
    def nothing_ends(self) -> Iterator[None]:
        """Meanwhile no stage may end."""
        before = int(self.hold.read_text())
        self._write_hold(-1)
        try:
            yield
        finally:
            self._write_hold(before)

    def num_claims(self, stage: str) -> int:
        """Claims of a stage such as `i0003.train`, whole or by shards."""
        iteration, _, kind = stage.partition(".")
        folder = self.root / "iterations" / f"00{iteration[1:]}"
        return len(list(folder.glob(f"{kind}.t*/claim.????")))

    def _write_hold(self, place: int) -> None:
        fresh = self.hold.with_suffix(".new")
        fresh.write_text(str(place))
        fresh.replace(self.hold)

    def attempts(self) -> list[AttemptRecord]:
        """Every attempt, from its claim to its last sign of life."""
        found = []
        for claim in self.root.glob("iterations/*/*.t*/claim.*"):
            if not claim.suffix[1:].isdigit():
                continue
            said = json.loads(claim.read_bytes())
            name = f"a{said['epoch']:04d}-{said['attempt_token']}"
            commit = claim.parent / "COMMIT"
            won = commit.exists() and json.loads(commit.read_bytes())["provenance"]["attempt"]
            began = claim.stat().st_mtime
            last = max([f.stat().st_mtime for f in (claim.parent / name).glob("*")] or [began])
            slot = "/".join(claim.parts[-3:-1])
            found.append(AttemptRecord(slot, began, max(0.0, last - began), won == name))
        return found

    def num_submissions(self) -> int:
        found = self.root.glob("iterations/*/*/submit.*")
        return sum(path.suffix[1:].isdigit() for path in found)

    # -- mending ------------------------------------------------------------------------------

    def repair_later(self, delay_s: float, what: str, action: Callable[[], object]) -> None:
        """Do `action` in a while; `what` is the node that is broken until then, or a word."""
        self.broken.add(what)
        self._repairs.append((time.monotonic() + delay_s, what, action))

    def repair(self, *, all_of_it: bool = False) -> None:
        """Do what is due."""
        now = time.monotonic()
        due = [entry for entry in self._repairs if all_of_it or entry[0] <= now]
        for entry in due:
            self._repairs.remove(entry)
            entry[2]()
            if entry[1] not in {what for _, what, _ in self._repairs}:
                self.broken.discard(entry[1])

    def node_up(self, node: str) -> None:
        """Switch a node on, or start its slurmd, as an administrator does."""
        self.cluster.tool("node", "up", node)
        self.undrain()

    def undrain(self) -> None:
        """Give drained nodes back (`Duplicate jobid`, after a controller that forgot), as an
        administrator does."""
        said = self.call("sinfo", "-h", "-N", "-p", "low", "-t", "drain", "-o", "%N")
        for node in (said or "").split():
            self.call("scontrol", "update", f"nodename={node}", "state=resume")
