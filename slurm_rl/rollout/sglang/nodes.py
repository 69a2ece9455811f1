"""One SGLang server over several nodes: how its processes find each other, and when they end.

The first rank serves; each other node runs `serve_follower`, which starts the same command with
its own rank. They meet by a file in the attempt's directory and by nothing else:

    engine.json   the leader's: {"address": "host:port", "beat": n}; a new address (the port was
                  taken) has the followers start again, and a beat that stands still says that the
                  leader is gone
    engine.done   the leader's, before it ends its server: all is well, leave

Liveness is change that is seen, by the observer's own clock.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rl.errors import EngineError
from slurm_rl.rollout.engine import Weights
from slurm_rl.rollout.server_process import ServerProcess, find_free_port, start_server
from slurm_rl.rollout.sglang.options import (
    Place,
    SglangOptions,
    plan_meeting,
    read_dtype,
    render_command,
)
from slurm_rl.storage.durable import refresh, write_hint
from slurm_rl.types import canonical_json

log = logging.getLogger(__name__)

BEAT_S = 10.0
#: Far above what a shared file system takes to show a change.
SILENCE_S = 180.0
#: A server ends with its leader's, a little before the file is seen that says why.
_GRACE_S = 30.0
_POLL_S = 0.5


class Leader:
    """What the first rank tells the others. `stop` may be called at any time, and twice."""

    def __init__(self, meeting: Path, *, beat_s: float = BEAT_S) -> None:
        self._meeting = meeting
        self._beat_s = beat_s
        self._address = ""
        self._beat = 0
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine-beat", daemon=True)

    def announce(self, address: str) -> None:
        """Have the others join at `address`, and beat from now on."""
        with self._lock:
            self._address = address
        self._write()
        if not self._thread.is_alive() and not self._is_over.is_set():
            self._thread.start()

    def stop(self) -> None:
        """Say that the engine is done, and end the beat."""
        self._is_over.set()
        write_hint(done_path(self._meeting), b"{}")
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._beat_s):
            try:
                self._write()
            except OSError as error:  # the next beat tries again; the others are patient
                log.warning("%s could not be written: %s", self._meeting, error)

    def _write(self) -> None:
        with self._lock:
            self._beat += 1
            write_hint(
                self._meeting, canonical_json({"address": self._address, "beat": self._beat})
            )


@dataclass(slots=True)
class LeaderWatch:
    """What a follower makes of the meeting file. Pure but for `look`'s reading.

    began: when the watch began, by the observer's clock.
    """

    meeting: Path
    began: float
    start_timeout_s: float
    silence_s: float = SILENCE_S
    address: str = ""
    _last: bytes = b""
    _changed: float = field(init=False)

    def __post_init__(self) -> None:
        self._changed = self.began

    def look(self, now: float) -> str | None:
        """The leader's address, empty before it has one, None once it is done.

        Raises EngineError if it never came, or has fallen silent.
        """
        refresh(self.meeting)
        if done_path(self.meeting).exists():
            return None
        try:
            said = self.meeting.read_bytes()
        except OSError:
            said = self._last  # not yet, or just being replaced
        if said != self._last:
            self._last, self._changed = said, now
            self.address = str(json.loads(said)["address"])
        patience_s = self.silence_s if self.address else self.start_timeout_s
        if now - self._changed > patience_s:
            what = "has fallen silent" if self.address else "has not started"
            raise EngineError(
                f"{self.meeting}: the engine's first rank {what} for {patience_s:.0f} s",
                hint="see the log of rank 0",
            )
        return self.address


def done_path(meeting: Path) -> Path:
    """The file that says that all is over."""
    return meeting.with_suffix(".done")


def serve_follower(
    options: SglangOptions, weights: Weights, *, rank: int, silence_s: float = SILENCE_S
) -> None:
    """Run this node's part of the server until the leader is done.

    options: as the leader's. weights: on this node. Raises EngineError if the server ends before,
    or if the leader has gone; nothing of the server is left then either.
    """
    dtype = read_dtype(weights.path)
    watch = LeaderWatch(
        plan_meeting(options), time.monotonic(), options.start_timeout_s, silence_s=silence_s
    )
    joined, process = "", None
    dying_since: float | None = None
    try:
        while (address := watch.look(time.monotonic())) is not None:
            if address and address != joined:
                if process is not None:
                    process.stop(grace_s=0.0)
                process, joined, dying_since = (
                    _start(options, weights, dtype, rank, address),
                    address,
                    None,
                )
            elif process is not None:
                dying_since = _check_alive(process, dying_since, rank)
            time.sleep(_POLL_S)
        log.info("the engine is done")
    finally:
        if process is not None:
            process.stop(grace_s=2.0)


def _start(
    options: SglangOptions, weights: Weights, dtype: str | None, rank: int, address: str
) -> ServerProcess:
    command = render_command(
        options,
        weights,
        port=find_free_port(),
        dtype=dtype,
        place=Place(rank, options.num_nodes, address),
    )
    log.info("joins %s: %s", address, " ".join(command))
    path = options.log_path
    return start_server(
        command,
        environment=options.environment,
        log_path=path.with_name(f"{path.stem}-node{rank}{path.suffix}"),
    )


def _check_alive(process: ServerProcess, since: float | None, rank: int) -> float | None:
    """Since when the server has been dead; EngineError once the leader had time to explain it."""
    try:
        process.check_alive()
    except EngineError as error:
        now = time.monotonic()
        if since is not None and now - since > _GRACE_S:
            raise EngineError(
                f"rank {rank} of the server: {error.message}", hint=error.hint
            ) from error
        return now if since is None else since
    return None
