"""One attempt at a slot: order, program, heartbeat, result, commit.

What a crash leaves: a claim, perhaps an attempt directory with anything in it, and a COMMIT only if
everything it names is whole. The next attempt starts in a directory of its own.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Generator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_rl import __version__
from slurm_rl.chain.observe import read_current
from slurm_rl.errors import CorruptError, SlurmRlError, StorageError
from slurm_rl.storage.claims import (
    AttemptEnd,
    attempt_dir,
    is_superseded,
    write_end,
    write_heartbeat,
)
from slurm_rl.storage.commits import (
    make_content,
    publish_commit,
    read_commit,
    read_stage_commit,
    resolve_input,
)
from slurm_rl.storage.control import Control, Halt, write_halt
from slurm_rl.storage.durable import wait_for_size, write_file
from slurm_rl.types import Claim, Input, Order, Result, Slot, dump_record, parse_order, parse_result

if TYPE_CHECKING:
    from slurm_rl.launch.supervisor import Payload, Supervisor

logger = logging.getLogger(__name__)

#: Exit statuses of a program that was told to stop by somebody else (SIGTERM).
_STOPPED_BY_SIGNAL = (-15, 143)


class AttemptOutcome(Enum):
    """How an attempt ended for the job that made it."""

    COMMITTED = "committed"
    LOST = "lost"  # the race for the claim: look again
    SUPERSEDED = "superseded"  # somebody else has the slot now, or its commit: leave
    FAILED = "failed"
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
        self.parents: dict[str, str] = {}  # role -> digest of the input; known with the order

    def run(self) -> Generator[float, None, AttemptOutcome]:
        """Start the program, watch it, publish what it leaves."""
        try:
            order_path = self._write_order()
            payload = self.supervisor.runner.start(order_path, kind=self.slot.kind)
        except Exception as error:  # whatever keeps the program from starting: say it
            return self._fail(getattr(error, "blame", "system"), type(error).__name__, str(error))
        if not self.slot.shard:
            self.supervisor.advance_beside()  # one task of an array is enough
        outcome = yield from self._watch(payload)
        if outcome is not None:
            return outcome
        return self._conclude(payload.poll())

    def _conclude(self, status: int | None) -> AttemptOutcome:
        """What the program's end means. Its own word counts for more than its exit status.

        When one rank fails, srun ends the others by SIGTERM, and may report that as the status.
        """
        if status == 0:
            return self._publish()
        blame, error, message = self._read_failure(status)
        told_to_stop = error == "Stopped" or (error == "Exit" and status in _STOPPED_BY_SIGNAL)
        if told_to_stop:
            return self._stop(self.supervisor.job.stop or "the program was told to stop")
        return self._fail(blame, error, message)

    # -- before -------------------------------------------------------------------------------

    def _write_order(self) -> Path:
        inputs = self._resolve_inputs()
        self.parents = _digests_of(inputs)
        graph = self.supervisor.chain.graph
        order = Order(
            run_dir=str(self.run_dir.root),
            run_id=self.supervisor.run_id,
            kind=self.slot.kind,
            iteration=self.slot.iteration,
            timeline=self.slot.timeline,
            attempt_dir=str(self.folder),
            settings_path=str(self.run_dir.settings_path),
            code_dir=self.supervisor.code_dir,
            inputs=inputs,
            shard=self.slot.shard or 0,
            num_shards=graph.node(self.slot.kind).num_shards,
            earlier_attempts=self._earlier_with_same_inputs(),
        )
        path = self.folder / "order.json"
        write_file(path, dump_record(order), fs=self.run_dir.fs)
        return path

    def _resolve_inputs(self) -> dict[str, Input]:
        chain = self.supervisor.chain
        inputs = {}
        for role, ref in chain.graph.parents(self.slot.stage).items():
            commit = read_current(self.run_dir, chain.graph, self.control, ref)
            if commit is None:
                raise CorruptError(f"{ref}: its commit is gone")
            place = Slot(ref.iteration, ref.kind, self.control.timeline_of(ref))
            inputs[role] = resolve_input(self.run_dir, role, ref, place, commit)
        return inputs

    def _earlier_with_same_inputs(self) -> list[str]:
        """Directories of earlier attempts that were made from the same inputs."""
        found = []
        for claim in self.earlier:
            folder = attempt_dir(self.run_dir, self.slot, claim)
            try:
                order = parse_order(self.run_dir.fs.read(folder / "order.json"))
            except (OSError, ValueError, TypeError, KeyError):
                continue  # it never got as far as its order
            if _digests_of(order.inputs) == self.parents:
                found.append(str(folder))
        return found

    # -- during -------------------------------------------------------------------------------

    def _watch(self, payload: Payload) -> Generator[float, None, AttemptOutcome | None]:
        """Beat and look until the program ends (None), or until we must end it."""
        clock, timing = self.supervisor.monotonic, self.supervisor.timing
        deadline_s = self.supervisor.deadlines.get(self.slot.kind)
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
            if deadline_s is not None and now - began > deadline_s:
                payload.kill()
                return self._fail("system", "Deadline", f"ran longer than {deadline_s:.0f} s")
            yield timing.poll_s
        return None

    def _beat(self, counter: int) -> bool:
        """Show that we live; False if somebody else has the slot now."""
        try:
            write_heartbeat(self.run_dir, self.slot, self.claim, counter)
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

    def _publish(self) -> AttemptOutcome:
        try:
            result = self._read_result()
        except CorruptError as error:
            return self._fail("system", "CorruptError", str(error))
        supervisor = self.supervisor
        content = make_content(
            self.slot, result, parents=self.parents, settings_digest=supervisor.settings_digest
        )
        try:
            won = publish_commit(
                self.run_dir, self.slot, content=content, provenance=self._provenance(result)
            )
        except (SlurmRlError, OSError) as error:
            return self._fail("system", type(error).__name__, f"publishing the commit: {error}")
        if not won:
            return self._lose("somebody else committed first")
        logger.info("%s: committed", self.slot)
        self._say(AttemptEnd("committed"))
        if self.slot.shard is not None:
            num_shards = supervisor.chain.graph.node(self.slot.kind).num_shards
            ref, timeline = self.slot.stage, self.slot.timeline
            read_stage_commit(self.run_dir, ref, timeline=timeline, num_shards=num_shards)
        return AttemptOutcome.COMMITTED

    def _read_result(self) -> Result:
        path = self.folder / "result.json"
        try:
            result = parse_result(self.run_dir.fs.read(path))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CorruptError(f"{path}: exit status 0, but no result ({error})") from error
        for entry in result.files:
            size = wait_for_size(self.folder / entry.path, entry.size_bytes)
            if size != entry.size_bytes:
                raise CorruptError(
                    f"{self.folder / entry.path}: {size} bytes, but {entry.size_bytes} were written"
                )
        return result

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
            "slurm_rl": __version__,
            "metrics": result.metrics,
        }

    def _read_failure(self, status: int | None) -> tuple[str, str, str]:
        """Blame, error and message of a program that ended with `status`."""
        try:
            raw = json.loads(self.run_dir.fs.read(self.folder / "failure.json"))
            message = str(raw["message"])
            hint = str(raw.get("hint", ""))
            return str(raw["blame"]), str(raw["error"]), f"{message}; {hint}" if hint else message
        except (OSError, ValueError, KeyError, TypeError):
            how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
            return "system", "Exit", f"the program ended with {how}; see {self.folder}"

    def _fail(self, blame: str, error: str, message: str) -> AttemptOutcome:
        """Leave word; what is the user's to mend halts the run instead of being tried again."""
        logger.error("%s: %s: %s", self.slot, error, message)
        self._say(AttemptEnd("failed", blame, error, message))
        if blame == "user":
            hint = f"mend it, then `slurm-rl resume {self.run_dir.root}`"
            if error in ("RewardError", "ConfigError"):
                hint = "settings and code are fixed in a run: mend yours, start another (run.name)"
            halt = Halt(f"{self.slot}: {message}", hint, str(self.folder), time.time())
            write_halt(self.run_dir, halt)
        return AttemptOutcome.FAILED

    def _stop(self, why: str) -> AttemptOutcome:
        if is_superseded(self.run_dir, self.slot, self.claim):
            return self._lose(f"superseded; {why}")
        logger.info("%s: stopped: %s", self.slot, why)
        self._say(AttemptEnd("timed_out" if why == "time limit" else "stopped", message=why))
        return AttemptOutcome.STOPPED

    def _lose(self, why: str) -> AttemptOutcome:
        committed = read_commit(self.run_dir, self.slot) is not None
        logger.info("%s: %s%s", self.slot, why, "; it has a commit" if committed else "")
        self._say(AttemptEnd("superseded", message=why))
        return AttemptOutcome.SUPERSEDED

    def _say(self, end: AttemptEnd) -> None:
        word = AttemptEnd(
            end.outcome,
            end.blame,
            end.error,
            end.message,
            self.supervisor.job.node,
            self.supervisor.chain.clock(),
        )
        try:
            write_end(self.run_dir, self.slot, self.claim, word)
        except (OSError, StorageError) as error:
            logger.warning("%s: cannot leave word: %s", self.slot, error)


def _digests_of(inputs: dict[str, Input]) -> dict[str, str]:
    return {role: entry.digest for role, entry in inputs.items()}
