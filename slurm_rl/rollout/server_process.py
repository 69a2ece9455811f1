"""A server as a child process: start it, know whether it lives, leave nothing of it behind.

Owns the processes, the port and the log. It knows nothing of what the server speaks. Each
server is started in a session of its own with a token in its environment; a watchdog ends
it if we die (`watchdog.py`).
"""

from __future__ import annotations

import logging
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurm_rl.errors import EngineError
from slurm_rl.rollout import watchdog

log = logging.getLogger(__name__)

_PORT_RANGE_PATH = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
#: How a traceback ends: `torch.OutOfMemoryError: CUDA out of memory`.
_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)\b(: |$)")
#: setproctitle, which servers use to name their workers, overwrites the environment that
#: /proc shows, and with it our token, unless told not to.
_KEEP_ENVIRON = {"SPT_NOENV": "1"}


class ServerProcess:
    """One running server. Made by `start_server`; `stop` is safe at any time, and twice."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        guard: subprocess.Popen[bytes],
        *,
        token: str,
        log_path: Path,
    ) -> None:
        self._process = process
        self._guard = guard
        self._token = token
        self.log_path = log_path

    @property
    def pid(self) -> int:
        return self._process.pid

    def check_alive(self) -> None:
        """EngineError with the log's last telling line if the server has ended."""
        code = self._process.poll()
        if code is not None:
            raise EngineError(
                f"the server ended with status {code}: {read_last_error(self.log_path)}",
                hint=f"see {self.log_path}",
            )

    def processes(self) -> list[int]:
        """Ids of every live process of this server."""
        return watchdog.find_processes(self.pid, self._token)

    def stop(self, *, grace_s: float = 15.0) -> None:
        """SIGTERM, wait, SIGKILL what is left. EngineError naming processes that stay."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=grace_s)
            except subprocess.TimeoutExpired:
                log.warning("the server ignores SIGTERM for %.0f s; killing it", grace_s)
        left = watchdog.kill_processes(self.pid, self._token)
        if not left:
            self._process.wait()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        if left:
            raise EngineError(f"processes {left} of the server cannot be killed")
        self._guard.wait(timeout=15)


def start_server(
    command: Sequence[str], *, environment: Mapping[str, str], log_path: Path
) -> ServerProcess:
    """Start `command` in a session of its own; its output goes to `log_path` (appended).

    Raises EngineError if the program cannot be run at all. If we die at any moment of this,
    the watchdog, which is there first, finds what was started by its token.
    """
    token = secrets.token_hex(16)
    guard = subprocess.Popen(
        [sys.executable, "-I", watchdog.__file__, token],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert guard.stdin is not None
    with open(log_path, "ab") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, **_KEEP_ENVIRON, watchdog.TOKEN_VARIABLE: token},
                start_new_session=True,
            )
        except OSError as error:
            guard.stdin.close()
            guard.wait(timeout=15)
            raise EngineError(f"{command[0]} cannot be run: {error.strerror}") from error
    guard.stdin.write(f"{process.pid}\n".encode())
    guard.stdin.flush()
    return ServerProcess(process, guard, token=token, log_path=log_path)


def find_free_port(*, avoid: frozenset[int] = frozenset()) -> int:
    """A TCP port that could be bound just now, below the range from which the kernel hands
    out ports to outgoing connections (one of those could take it before the server does)."""
    below = _first_ephemeral_port()
    for _ in range(200):
        port = random.SystemRandom().randrange(_FIRST_PORT, below)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        if port not in avoid:
            return port
    raise EngineError(f"no free port between {_FIRST_PORT} and {below}")


def read_last_error(log_path: Path, *, size_bytes: int = 65536) -> str:
    """The last line of a log that ends a traceback, else the last that names an error, else the
    last. What a program says after its error is often of how it failed to describe it."""
    with open(log_path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - size_bytes))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    raised = [line for line in lines if _RAISED.match(line)]
    telling = [line for line in lines if "Error" in line or "error:" in line.lower()]
    return (raised or telling or lines or ["it said nothing"])[-1][:300]


def wait_until(
    server: ServerProcess,
    ready: Callable[[], bool],
    *,
    timeout_s: float,
    interval_s: float = 0.2,
) -> None:
    """Call `ready()` until it is true. EngineError if the server ends or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        server.check_alive()
        if time.monotonic() > deadline:
            raise EngineError(
                f"the server did not answer within {timeout_s:.0f} s:"
                f" {read_last_error(server.log_path)}",
                hint=f"see {server.log_path}; raise rollout.server_start_timeout_s if it is slow",
            )
        time.sleep(interval_s)


def _first_ephemeral_port() -> int:
    try:
        first = int(_PORT_RANGE_PATH.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return first if first > _FIRST_PORT + 1000 else 32_768


def ask_interpreter(
    python: str, code: str, *, environment: Mapping[str, str], timeout_s: float
) -> tuple[str, bool]:
    """What `python -c code` said last, and whether it ended well. For looking, not for serving."""
    try:
        done = subprocess.run(
            [python, "-c", code],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {timeout_s:.0f} s", False
    except OSError as error:
        return error.strerror or str(error), False
    is_good = done.returncode == 0
    lines = (done.stdout if is_good else done.stderr).strip().splitlines()
    return lines[-1] if lines else f"status {done.returncode}", is_good
