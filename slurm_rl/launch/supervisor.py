"""The supervisor: what a job does around a stage's program.

It re-reads control and disk, takes the earliest runnable stage that its allocation fits (normally
its own), claims it, starts the program, shows a heartbeat, publishes what the program leaves, and
advances the chain. It holds no state that matters: killed anywhere, the next job goes on from disk.

It is written as a generator that yields the seconds it wants to sleep, so that the same code runs
in a real job (`launch/job.py`) and on the in-memory cluster with its virtual clock.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rl.chain.advance import Chain, advance, halt_for
from slurm_rl.chain.graph import Link
from slurm_rl.chain.halts import is_used_up
from slurm_rl.chain.history import percentile, read_durations
from slurm_rl.chain.late import check_not_gone, may_show_late, says_committed
from slurm_rl.chain.observe import CommitReader, find_head, read_current, read_queue
from slurm_rl.chain.outages import deferred_for
from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.chain.slots import link_slots, slots_of, view_slot
from slurm_rl.errors import CorruptError, SlurmRlError, StorageError
from slurm_rl.launch.attempt import Attempt, AttemptOutcome
from slurm_rl.launch.duty import Job, Runner, Timing
from slurm_rl.launch.leaving import leave
from slurm_rl.launch.stage_settings import StageSettings
from slurm_rl.storage.claims import (
    new_token,
    read_claims,
    read_end,
    read_heartbeat,
    read_latest_claim,
    try_claim,
)
from slurm_rl.storage.commits import read_commit
from slurm_rl.storage.control import Control, read_control
from slurm_rl.storage.intents import write_seen
from slurm_rl.types import DECISION_PREFIX, Claim, Slot, StageRef

logger = logging.getLogger(__name__)

#: The job's own stage (or shard) has its commit.
EXIT_DONE = 0
#: It has not: stopped, failed, paused, or nothing to do (EX_TEMPFAIL: squeue tells people).
EXIT_UNFINISHED = 75
#: How often control is read while a service is waited for, which may take days.
_OUTAGE_LOOK_S = 30.0

Sleeps = Generator[float, None, int]


@dataclass
class Supervisor:
    """One job's life.

    fits:      whether this allocation can run a kind of job.
    intent:    the file that says that this job was to be submitted.
    monotonic: the observer's own clock; liveness is change seen on it.
    settle:    what a stage runs with, as control says.
    left_s:    seconds until the job's time limit.
    check_space: raises SpaceError if a slot's stage had better not start.
    """

    chain: Chain
    job: Job
    runner: Runner
    run_id: str
    settle: Callable[[Control, StageRef], StageSettings]
    timing: Timing
    monotonic: Callable[[], float]
    fits: Callable[[str], bool] = lambda kind: True
    left_s: Callable[[], float] = lambda: math.inf
    check_space: Callable[[Slot, Control], None] = lambda slot, control: None
    intent: Path | None = None
    deadlines: dict[str, float] = field(default_factory=dict)
    _seen: dict[tuple[Slot, int], tuple[str, float]] = field(default_factory=dict)
    _free_after: dict[Slot, int] = field(default_factory=dict)
    _num_attempts: int = 0
    startup_s: float = 0.0

    def run(self) -> Sleeps:
        """Work until the own link is complete or nothing more can be done; the exit status.

        Raises CorruptError, after halting the run: the next job would only find the same. Other
        troubles of the file system are tried again a few times: nothing is held in memory.
        """
        for wait_s in (*self.timing.work_again, None):
            try:
                return (yield from self._work())
            except CorruptError as error:
                halt_for(self.chain, error)
                raise
            except (StorageError, OSError) as error:
                if wait_s is None:
                    raise
                logger.warning("%s; once more in %.0f s", error, wait_s)
                yield wait_s
        raise AssertionError("the last try returns or raises")

    def _work(self) -> Sleeps:
        began = self.monotonic()
        if self.intent is not None:
            self._say_seen(self.intent)
        while not self.job.stop:
            slot = yield from self._find_work()
            if slot is None:
                break
            self.startup_s = 0.0 if self._num_attempts else self.monotonic() - began
            self._num_attempts += 1
            outcome = yield from self._attempt(slot)
            if outcome is AttemptOutcome.LOST:
                yield 1.0  # whoever won it may show here only in a while
            if outcome is AttemptOutcome.STOPPED:
                yield from leave(self)
                return EXIT_UNFINISHED
            if outcome is AttemptOutcome.SUPERSEDED and self._is_reborn(slot):
                return EXIT_UNFINISHED
            if self._ends_with(outcome, slot):
                break
        if self.job.stop and any(map(self._waits_out, self._own_slots())):
            yield from leave(self)
            return EXIT_UNFINISHED
        is_done = self._is_own_done()
        if not is_done or self._is_stage_done():
            self.advance(leaving=True)
        return EXIT_DONE if is_done else EXIT_UNFINISHED

    def _ends_with(self, outcome: AttemptOutcome, slot: Slot) -> bool:
        """Whether what is left after an attempt is the next job's."""
        if outcome is AttemptOutcome.DEFERRED:
            return not self._waits_out(slot)
        return outcome in (AttemptOutcome.FAILED, AttemptOutcome.SUPERSEDED)

    def _say_seen(self, intent: Path) -> None:
        try:
            write_seen(self.chain.run, intent)
        except (OSError, StorageError) as error:
            logger.warning("%s: cannot leave word that this job began: %s", intent, error)

    def _is_stage_done(self) -> bool:
        """Whether the whole of the link is committed: of an array, its last task advances."""
        control = read_control(self.chain.run)
        run, graph = self.chain.run, self.chain.graph
        return all(
            read_current(run, graph, control, ref) is not None for ref in self.job.link.stages
        )

    # -- finding work -------------------------------------------------------------------------

    def _find_work(self) -> Generator[float, None, Slot | None]:
        """The slot to claim next; waits while the only runnable stage is held by a live claim, or
        while what it needs may be committed and only not be seen from here yet."""
        began = self.monotonic()
        deadline, sight = began + self.timing.wait_s, began + self.timing.visible_s
        while not self.job.stop:
            control = read_control(self.chain.run)
            if control.stopped:
                logger.info("the run is %s", "halted" if control.halt else "paused")
                return None
            if self._is_own_done(control):
                return self._find_sibling(control)
            slots = self._runnable(control)
            free = next((slot for slot in slots if self._is_free(slot, control)), None)
            if free is not None:
                return free
            if not any(self._is_worth_waiting(slot, control) for slot in slots):
                if self.monotonic() < sight and self._may_show_late(slots, control):
                    yield min(1.0, self.timing.heartbeat_s)
                    continue
                own = self._own_in_time(control)
                check_not_gone(self.chain.run, self.chain.graph, control, slots, own)
                logger.info("nothing to do: no stage that fits this job is runnable now")
                return None
            outage = next(filter(self._waits_out, slots), None)
            if outage is not None:
                yield min(_OUTAGE_LOOK_S, max(1.0, self._delay_s(outage, control)))
                continue
            if self.monotonic() > deadline:
                logger.info("%s is held by a live claim, or delayed; not waiting longer", slots[0])
                return None
            sight = self.monotonic() + self.timing.visible_s  # its commit may show late, too
            yield min(1.0, self.timing.heartbeat_s)
        return None

    def _find_sibling(self, control: Control) -> Slot | None:
        """Another shard of the own stage that nobody works on, once it is decided what is in the
        stage: then all of it is in the journals, and needs no more than a commit. Its own job may
        wait for a place for long."""
        run, ref = self.chain.run, self.job.link.anchor
        folder = run.stage_dir(ref.iteration, ref.kind, control.timeline_of(ref))
        if not any(name.startswith(DECISION_PREFIX) for name in run.fs.list(folder)):
            return None
        if not self._has_time_for(ref, control):
            return None
        slots = slots_of(self.chain.graph, control, ref)
        left = (slot for slot in slots if read_commit(run, slot) is None)
        return next((slot for slot in left if self._is_free(slot, control)), None)

    def _may_show_late(self, slots: list[Slot], control: Control) -> bool:
        """Whether a commit that would give this job work, or end it, may not show here yet."""
        run, graph = self.chain.run, self.chain.graph
        if any(says_committed(run, slot) for slot in slots):
            return True
        return may_show_late(run, graph, control, self._own_in_time(control))

    def _runnable(self, control: Control) -> list[Slot]:
        """Uncommitted slots with committed parents that fit; the own ones first."""
        run, graph = self.chain.run, self.chain.graph
        own = set(self._own_slots(control))
        commits = CommitReader(run, graph, control)
        found = []
        refs = [ref for link in self._window(control) for ref in link.stages]
        for ref in dict.fromkeys([*self.job.link.stages, *refs]):
            slots = [s for s in slots_of(graph, control, ref) if self.fits(graph.job_kind(s))]
            if not slots or commits.read(ref) is not None:
                continue
            parents = graph.parents(ref).values()
            if any(commits.read(parent) is None for parent in parents):
                continue
            if not self._has_time_for(ref, control):
                continue
            found += [s for s in slots if s.shard is None or read_commit(run, s) is None]
        return sorted(found, key=lambda slot: slot not in own)

    def _window(self, control: Control) -> list[Link]:
        """Links that this job may work on: from the first that is not complete to its own. An
        evaluation's does nothing else."""
        if self.job.link.anchor.is_eval:
            return []
        graph, last = self.chain.graph, self.job.link.iteration
        first = find_head(self.chain.run, graph, control)
        return [link for i in range(first, last + 1) for link in graph.links(i)]

    def _own_in_time(self, control: Control) -> list[StageRef]:
        """Own stages that there is time for: what others need to run is not waited for here."""
        return [ref for ref in self.job.link.stages if self._has_time_for(ref, control)]

    def _own_slots(self, control: Control | None = None) -> list[Slot]:
        control = control or read_control(self.chain.run)
        slots = link_slots(self.chain.graph, control, self.job.link)
        return [s for s in slots if s.shard is None or self.job.task in (None, s.shard)]

    def _is_own_done(self, control: Control | None = None) -> bool:
        control = control or read_control(self.chain.run)
        return all(read_commit(self.chain.run, s) is not None for s in self._own_slots(control))

    def _is_free(self, slot: Slot, control: Control) -> bool:
        """Whether the slot may be claimed now: unclaimed, ours, or of an attempt that is over."""
        claims = read_claims(self.chain.run, slot)
        self._free_after[slot] = claims[-1].epoch if claims else 0
        if not claims:
            return True
        last, end = claims[-1], read_end(self.chain.run, slot, claims[-1])
        if end is not None and end.outcome == "committed":
            return False  # its COMMIT shows late, or is gone
        if end is not None and end.outcome == "deferred":
            return self._delay_s(slot, control) <= 0.0
        if last.job_token == self.job.claim_token:
            # A requeue of this very job: its own earlier claim, unless there were enough of those.
            return self._delay_s(slot, control) < math.inf
        if end is None and not self._is_silent(slot, last):
            return False
        return self._delay_s(slot, control) <= 0.0

    def _delay_s(self, slot: Slot, control: Control) -> float:
        """Seconds until a slot that failed may be tried again; infinity: not before a person
        has looked (the next advance halts the run)."""
        spec = self.chain.spec
        # As the queue showed it before we began: what this very job left there was not a failure.
        job = self.job
        own = QueuedJob(job.job_id, job.name, JobState.PENDING, task=job.task)
        view = view_slot(self.chain.run, control, slot, (own,), self.chain.clock(), spec)
        if is_used_up(spec, view):
            return math.inf
        if view.num_deferrals and spec.submits and slot not in self._own_slots(control):
            return math.inf  # it has a job of its own, which asks for no more than it needs
        if not view.failures:
            return deferred_for(view, spec)
        retry_s = spec.retry_delay_s * 2.0 ** (view.failures - 1) - view.since_failure_s
        return max(retry_s, deferred_for(view, spec))

    def _is_worth_waiting(self, slot: Slot, control: Control) -> bool:
        """Whether somebody's attempt at the slot may be alive; or, where jobs submit no jobs,
        whether it may be tried again soon. Elsewhere what is to be tried again later has a job of
        its own, with a time to begin; here the links behind would be burnt in seconds."""
        last = read_latest_claim(self.chain.run, slot)
        end = None if last is None else read_end(self.chain.run, slot, last)
        if last is not None and last.job_token != self.job.claim_token and end is None:
            return True
        if end is not None and end.outcome == "deferred":
            return self._waits_out(slot)
        waits = not self.chain.spec.submits
        return waits and self._delay_s(slot, control) <= self.timing.wait_s

    def _waits_out(self, slot: Slot) -> bool:
        """Whether this job stays until a service is back: where jobs submit no jobs, and it holds
        no GPUs meanwhile. Elsewhere the next look has a job of its own."""
        if self.chain.spec.submits or self.chain.spec.num_gpus(self.job.link):
            return False
        last = read_latest_claim(self.chain.run, slot)
        end = None if last is None else read_end(self.chain.run, slot, last)
        return end is not None and end.outcome == "deferred" and slot in self._own_slots()

    def _has_time_for(self, ref: StageRef, control: Control) -> bool:
        """Whether what is left of the job's time will do: for its own first stage always, for
        another one if half of those before it were done in as much."""
        left_s = self.left_s()
        is_own = ref in self.job.link.stages and not self._num_attempts
        if is_own or left_s == math.inf:
            return True
        run, graph = self.chain.run, self.chain.graph
        past = read_durations(run, graph, control, ref.kind, before=ref.iteration)
        return not past or left_s >= percentile([d.work_s for d in past], 0.5)

    def _is_silent(self, slot: Slot, claim: Claim) -> bool:
        """Whether the holder's heartbeat has not changed for a lease, while we watched."""
        now, counter = self.monotonic(), read_heartbeat(self.chain.run, slot, claim)
        known = self._seen.get((slot, claim.epoch))
        if known is None or known[0] != counter:
            self._seen[slot, claim.epoch] = (counter, now)
            return False
        if now - known[1] < self.timing.lease_s:
            return False
        self._seen[slot, claim.epoch] = (counter, now)  # the next question is a lease away
        queue = read_queue(self.chain.scheduler, self.chain.spec.short_id)
        return claim.job_token not in {
            job.claim_token for job in queue or () if job.state.may_be_at_work
        }

    # -- working ------------------------------------------------------------------------------

    def _attempt(self, slot: Slot) -> Generator[float, None, AttemptOutcome]:
        run = self.chain.run
        control = read_control(run)
        if control.timeline_of(slot.stage) != slot.timeline:
            return AttemptOutcome.LOST
        claims = read_claims(run, slot)
        epoch = 1 + max((c.epoch for c in claims), default=0)
        if epoch != 1 + self._free_after[slot]:
            return AttemptOutcome.LOST  # claimed since it was found free: that one may be alive
        claim = Claim(
            claimed=self.chain.clock(),
            epoch=epoch,
            job_token=self.job.claim_token,
            attempt_token=new_token(),
            host=self.job.node,
            pid=os.getpid(),
            job_id=self.job.job_id,
        )
        if not try_claim(run, slot, claim):
            logger.info("%s: somebody else claimed epoch %d", slot, claim.epoch)
            return AttemptOutcome.LOST
        logger.info("%s: claimed, attempt %s", slot, claim.attempt_name)
        attempt = Attempt(self, slot, claim, control, claims)
        outcome = yield from attempt.run()
        return outcome

    def advance(self, *, leaving: bool) -> None:
        """Advance the chain; whatever goes wrong there must not fail the stage."""
        own = (self.job.token, self.job.task) if leaving else None
        try:
            advance(self.chain, own=own)
        except (SlurmRlError, OSError) as error:
            logger.warning("advance: %s", error)
        except Exception:  # a bug of ours there must not cost what was computed here
            logger.exception("advance")

    def advance_beside(self) -> None:
        """Keep the window filled while the program works."""
        self.advance(leaving=False)

    def _is_reborn(self, slot: Slot) -> bool:
        """Whether a later life of this very job has the slot: then the job goes on without us."""
        last = read_latest_claim(self.chain.run, slot)
        return last is not None and last.job_token == self.job.claim_token
