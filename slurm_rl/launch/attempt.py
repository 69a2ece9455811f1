"""One attempt at a slot: order, program, heartbeat, result, commit.

What a crash leaves: a claim, perhaps an attempt directory with anything in it, and a COMMIT only if
everything it names is whole. The next attempt starts in a directory of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import time
from collections.abc import Generator
from enum import Enum
from typing import TYPE_CHECKING, Any

from slurm_rl import __version__
from slurm_rl.chain.history import plan_deadline, read_durations
from slurm_rl.chain.slots import link_slots
from slurm_rl.chain.usage import read_iteration, read_total
from slurm_rl.config.stages import section_of
from slurm_rl.errors import StorageError
from slurm_rl.launch.input_lease import InputLease
from slurm_rl.launch.interpreter import explain_exit
from slurm_rl.launch.orders import Prepared, prepare_order
from slurm_rl.launch.results import Failure, await_result, read_failure
from slurm_rl.storage.claims import (
    AttemptEnd,
    attempt_dir,
    is_superseded,
    read_elapsed,
    read_end,
    write_end,
    write_heartbeat,
)
from slurm_rl.storage.commits import (
    has_commit,
    make_content,
    publish_commit,
    read_commit,
    read_stage_commit,
)
from slurm_rl.storage.control import Control, Halt, read_control, write_halt
from slurm_rl.types import (
    KEPT,
    Claim,
    Result,
    Slot,
)

if TYPE_CHECKING:
    from slurm_rl.launch.duty import Payload
    from slurm_rl.launch.supervisor import Supervisor

logger = logging.getLogger(__name__)

#: Exit statuses of a program that was told to stop by somebody else (SIGTERM).
_STOPPED_BY_SIGNAL = (-15, 143)
#: Attempts in a row without space after which the run halts. Others' scratch files, or a collection
#: that was due, may make room within minutes; but a quota does not grow by itself, and each try
#: costs the start of the stage's whole allocation.
SPACE_TRIES = 3


class AttemptOutcome(Enum):
    """How an attempt ended for the job that made it."""

    COMMITTED = "committed"
    LOST = "lost"  # the race for the claim: look again
    SUPERSEDED = "superseded"  # somebody else has the slot now, or its commit: leave
    FAILED = "failed"
    DEFERRED = "deferred"  # a service outside of the run is down: later
    STOPPED = "stopped"  # told to stop: the job goes back to the queue


class Attempt:
    """One execution of a slot's program by `supervisor`."""

    def __init__(
        self,
        supervisor: Supervisor,
        slot: Slot,
        claim: Claim,
        control: Control,
        earlier: list[Claim],
    ) -> None:
        self.supervisor = supervisor
        self.run_dir = supervisor.chain.run
        self.slot = slot
        self.claim = claim
        self.control = control
        self.earlier = earlier
        self.folder = attempt_dir(self.run_dir, slot, claim)
        self.started = time.time()
        self.began = supervisor.monotonic()
        self.prepared = Prepared(self.folder / "order.json")
        self.lease = InputLease(self.run_dir, supervisor.chain.clock, supervisor.monotonic)

    def run(self) -> Generator[float, None, AttemptOutcome]:
        """Start the program, watch it, publish what it leaves."""
        try:
            self.supervisor.check_space(self.slot, self.control)
            self.prepared = prepare_order(self)
            payload = self.supervisor.runner.start(self.prepared.path, kind=self.slot.kind)
        except Exception as error:  # whatever keeps the program from starting: say it
            return self._refuse(error)
        if self._is_first():
            self.supervisor.advance_beside()
        try:
            outcome = yield from self._watch(payload)
        except BaseException:
            payload.kill()  # nobody watches it any more
            raise
        if outcome is not None:
            return outcome
        return (yield from self._conclude(payload.poll()))

    def _is_first(self) -> bool:
        """Whether it is the one of its array's tasks that advances the chain beside its work."""
        job, graph = self.supervisor.job, self.supervisor.chain.graph
        slots = [s for s in link_slots(graph, self.control, job.link) if s.stage == self.slot.stage]
        return self.slot not in slots or self.slot == slots[0]

    def _conclude(self, status: int | None) -> Generator[float, None, AttemptOutcome]:
        """What the program's end means. Its own word counts for more than its exit status.

        When one rank fails, srun ends the others by SIGTERM, and may report that as the status.
        """
        if status == 0:
            return (yield from self._publish())
        failure = read_failure(self.folder, status, fs=self.run_dir.fs)
        unable = explain_exit(self.folder) if failure.error == "Exit" else None
        if unable is not None:
            return self._refuse(unable)
        # When a rank is killed srun stops the others, which say so; the status is its signal's.
        was_stopped = bool(self.supervisor.job.stop) or status in _STOPPED_BY_SIGNAL
        if was_stopped and failure.error in ("Stopped", "Exit"):
            return self._stop(self.supervisor.job.stop or "the program was told to stop")
        if failure.error == "Stopped":
            message = f"a rank was ended by status {status}; see {self.folder}"
            failure = Failure("repeat", "Exit", message, place=f"status {status}")
        return self._fail(failure)

    # -- during -------------------------------------------------------------------------------

    def _watch(self, payload: Payload) -> Generator[float, None, AttemptOutcome | None]:
        """Beat and look until the program ends (None), or until we must end it."""
        clock, timing = self.supervisor.monotonic, self.supervisor.timing
        deadline_s = self._deadline_s()
        began = clock()
        beat, counter = began, 0
        while payload.poll() is None:
            now = clock()
            if now >= beat:
                beat, counter = now + timing.heartbeat_s, counter + 1
                if not self._beat(counter):
                    payload.kill()
                    return self._lose("superseded by a later claim")
            if self.supervisor.job.stop:
                yield from self._end_payload(payload)
                if payload.poll() == 0:
                    return None  # it was done before it heard
                return self._stop(self.supervisor.job.stop)
            if now - began > deadline_s:
                payload.kill()
                name = ".".join((*section_of(self.slot.kind), "deadline_s"))
                message = f"ran longer than {deadline_s:.0f} s, and was taken to hang ({name})"
                return self._fail(Failure("system", "Deadline", message))
            yield timing.poll_s
        return None

    def _deadline_s(self) -> float:
        """Seconds after which the program is taken to hang."""
        longest_s = self.supervisor.deadlines.get(self.slot.kind, math.inf)
        graph, iteration = self.supervisor.chain.graph, self.slot.iteration
        past = read_durations(self.run_dir, graph, self.control, self.slot.kind, before=iteration)
        ends = [read_end(self.run_dir, self.slot, claim) for claim in self.earlier]
        hung = sum(end is not None and end.error == "Deadline" for end in ends)
        # What is taken to hang twice may just have become longer.
        return min(longest_s, plan_deadline(past, longest_s=longest_s) * 2.0**hung)

    def _beat(self, counter: int) -> bool:
        """Show that we live; False if somebody else has the slot now."""
        try:
            elapsed_s = self.supervisor.monotonic() - self.began
            write_heartbeat(self.run_dir, self.slot, self.claim, counter, elapsed_s=elapsed_s)
            self.lease.beat()
            return not is_superseded(self.run_dir, self.slot, self.claim)
        except (OSError, StorageError) as error:
            logger.warning("heartbeat: %s", error)  # a full disk must not end the work
            return True

    def _end_payload(self, payload: Payload) -> Generator[float, None, None]:
        payload.terminate()
        deadline = self.supervisor.monotonic() + self.supervisor.timing.stop_grace_s
        while payload.poll() is None:
            if self.supervisor.monotonic() > deadline:
                payload.kill()
                return
            yield self.supervisor.timing.poll_s

    # -- after --------------------------------------------------------------------------------

    def _publish(self) -> Generator[float, None, AttemptOutcome]:
        supervisor = self.supervisor
        clock, patience_s = supervisor.monotonic, supervisor.timing.visible_s
        try:
            result = yield from await_result(
                self.folder,
                fs=self.run_dir.fs,
                clock=clock,
                patience_s=patience_s,
                beat=functools.partial(self._beat, -1),
            )
        except (StorageError, OSError) as error:
            return self._fail(Failure("system", type(error).__name__, str(error)))
        parents, digest = self.prepared.parents, self.prepared.settings_digest
        content = make_content(self.slot, result, parents=parents, settings_digest=digest)
        provenance = self._provenance(result)
        for wait_s in (*supervisor.timing.publish_again, None):
            try:
                won = publish_commit(
                    self.run_dir, self.slot, content=content, provenance=provenance
                )
                break
            except (StorageError, OSError) as error:
                if wait_s is None:
                    message = f"publishing the commit: {error}"
                    return self._fail(Failure("system", type(error).__name__, message))
                logger.warning("%s: %s; once more in %.0f s", self.slot, error, wait_s)
            self._beat(-1)
            yield wait_s
        if not won:
            return self._lose("somebody else committed first")
        logger.info("%s: committed", self.slot)
        self._say(AttemptEnd("committed"))
        if self.slot.shard is not None:
            num_shards = supervisor.chain.graph.node(self.slot.kind).num_shards
            ref, timeline = self.slot.stage, self.slot.timeline
            read_stage_commit(self.run_dir, ref, timeline=timeline, num_shards=num_shards)
        return AttemptOutcome.COMMITTED

    def _provenance(self, result: Result) -> dict[str, Any]:
        job = self.supervisor.job
        return {
            **result.provenance,
            "run_id": self.supervisor.run_id,
            "attempt": self.claim.attempt_name,
            "epoch": self.claim.epoch,
            "job_name": job.name,
            "job_id": job.job_id,
            "node": job.node,
            "started": self.started,
            "ended": time.time(),
            **self._work_s(),
            "code": self.prepared.code,
            "startup_s": round(self.supervisor.startup_s, 3),
            "committed": self._now(),
            "gpu_s": self._gpu_s(),
            "slurm_rl": __version__,
            "metrics": result.metrics,
        }

    def _work_s(self) -> dict[str, float]:
        """How long the whole stage took; not told where an earlier attempt did a part of it."""
        if any(read_end(self.run_dir, self.slot, claim) for claim in self.earlier):
            return {}
        return {"work_s": round(self.supervisor.monotonic() - self.began, 3)}

    def _gpu_s(self) -> float:
        """GPU seconds of the run up to the end of this iteration, if this is its last stage; of an
        evaluation, those of its own attempts."""
        chain, iteration = self.supervisor.chain, self.slot.iteration
        gpus = dict(chain.spec.gpus).get(chain.graph.job_kind(self.slot), 0)
        own_s = gpus * (self.supervisor.monotonic() - self.began)
        if gpus and self.slot.stage.is_eval:
            earlier = (read_elapsed(self.run_dir, self.slot, claim) for claim in self.earlier)
            return round(own_s + gpus * sum(earlier), 1)
        if not gpus or self.slot.stage != chain.graph.last_stage(iteration):
            return 0.0
        known_s = gpus * read_elapsed(self.run_dir, self.slot, self.claim)  # up to the last beat
        args = self.run_dir, chain.graph, self.control
        others_s = read_iteration(*args, chain.spec, iteration) - known_s
        return round(read_total(*args, iteration - 1) + others_s + own_s, 1)

    def _fail(self, failure: Failure) -> AttemptOutcome:
        """Leave word; what is the user's to mend halts the run instead of being tried again."""
        if self._is_out_of_date():
            return self._lose(f"out of date; {failure.message}")
        if failure.blame == "outage":
            return self._defer(failure)
        blame, error, message = failure.blame, failure.error, failure.message
        logger.error("%s: %s: %s", self.slot, error, message)
        is_full = error == "SpaceError" and self._num_space_errors() + 1 >= SPACE_TRIES
        self._say(AttemptEnd("failed", blame, error, message, failure.node, place=failure.place))
        # An evaluation that fails for good is given up; the run goes on without it.
        if (blame == "user" or is_full) and not self.slot.stage.is_eval:
            root = self.run_dir.root
            hint = f"mend it, then `slurm-rl resume {root}`"
            if error in ("RewardError", "ConfigError", "InterpreterError"):
                hint = f"`slurm-rl set {root} KEY=VALUE` or `code=FOLDER` adopts what you mended,"
                hint += f" then `slurm-rl resume {root}`"
            halt = Halt(f"{self.slot}: {message}", hint, str(self.folder), self._now())
            write_halt(self.run_dir, halt)
        return AttemptOutcome.FAILED

    def _refuse(self, error: Exception) -> AttemptOutcome:
        """The program could not start."""
        blame, place = getattr(error, "blame", "system"), getattr(error, "place", "")
        return self._fail(Failure(blame, type(error).__name__, str(error), place))

    def _defer(self, failure: Failure) -> AttemptOutcome:
        logger.warning("%s: deferred: %s", self.slot, failure.message)
        end = AttemptEnd("deferred", failure.blame, failure.error, failure.message, failure.node)
        self._say(dataclasses.replace(end, service=failure.service))
        return AttemptOutcome.DEFERRED

    def _is_out_of_date(self) -> bool:
        """Whether nobody waits for this attempt any more: what it met must halt nothing."""
        run, slot = self.run_dir, self.slot
        if is_superseded(run, slot, self.claim) or has_commit(run, slot):
            return True
        return read_control(run).timeline_of(slot.stage) != slot.timeline

    def _num_space_errors(self) -> int:
        """How many of the attempts just before this one found no space either."""
        base = dict(self.control.forgiven).get(str(self.slot), 0)
        counted = [claim for claim in reversed(self.earlier) if claim.epoch > base]
        ends = (read_end(self.run_dir, self.slot, claim) for claim in counted)
        full = itertools.takewhile(lambda end: end is not None and end.error == "SpaceError", ends)
        return sum(1 for _ in full)

    def _stop(self, why: str) -> AttemptOutcome:
        if is_superseded(self.run_dir, self.slot, self.claim):
            return self._lose(f"superseded; {why}")
        logger.info("%s: stopped: %s", self.slot, why)
        # What was kept is not done again: that is progress, not one more time-out.
        kept = (path for pattern in KEPT for path in self.folder.glob(pattern))
        has_moved = any(path.stat().st_size for path in kept)
        timed_out = why == "time limit" and not has_moved
        self._say(AttemptEnd("timed_out" if timed_out else "stopped", message=why))
        return AttemptOutcome.STOPPED

    def _lose(self, why: str) -> AttemptOutcome:
        committed = read_commit(self.run_dir, self.slot) is not None
        logger.info("%s: %s%s", self.slot, why, "; it has a commit" if committed else "")
        self._say(AttemptEnd("superseded", message=why))
        return AttemptOutcome.SUPERSEDED

    def _now(self) -> float:
        """By the file system's clock; for words to people, by this node's where that cannot be."""
        try:
            return self.supervisor.chain.clock()
        except (OSError, StorageError):
            return time.time()

    def _say(self, end: AttemptEnd) -> None:
        word = dataclasses.replace(
            end,
            node=end.node or self.supervisor.job.node,
            ended=self._now(),
            elapsed_s=round(self.supervisor.monotonic() - self.began, 1),
        )
        try:
            write_end(self.run_dir, self.slot, self.claim, word)
        except (OSError, StorageError) as error:
            logger.warning("%s: cannot leave word: %s", self.slot, error)
        self.lease.drop()
