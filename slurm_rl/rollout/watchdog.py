"""Finds and ends every process of a server, also when we no longer can.

Owns the answer to 'which processes belong to that server': those in the session that it was
started in, and those that carry its token in their environment. A process can leave the
group, the session or the job's cgroup, and can be adopted by init, but not shed both easily.
It never signals anything else.

Run as a program, it is the server's watchdog: it holds the reading end of a pipe whose only
writing end is ours, so that our death, however it comes, ends the server as well:

    python -I watchdog.py TOKEN < pipe        (the server's session comes through the pipe)

Standard library only, and no imports of this package: it runs alone and starts in 20 ms.
"""

import os
import signal
import sys
import time
from pathlib import Path

TOKEN_VARIABLE = "SLURM_RL_SERVER_TOKEN"


def find_processes(session: int, token: str) -> list[int]:
    """Ids of live processes in `session` (0: none) or with `token` in their environment.

    Zombies do not count.
    """
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _belongs(entry, session, mark)
    ]


def kill_processes(session: int, token: str, *, timeout_s: float = 10.0) -> list[int]:
    """SIGKILL all of them until none is left; returns those still there at the timeout."""
    deadline = time.monotonic() + timeout_s
    while left := find_processes(session, token):
        if time.monotonic() > deadline:
            return left
        for pid in left:
            _kill(pid, session, token)
        time.sleep(0.05)
    return []


def _kill(pid: int, session: int, token: str) -> None:
    # The id may have passed to a stranger since we looked: hold the process, then look again.
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _belongs(Path(f"/proc/{pid}"), session, f"{TOKEN_VARIABLE}={token}".encode()):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def _belongs(entry: Path, session: int, mark: bytes) -> bool:
    try:
        # After the last ')': state, parent, group, session. The name may hold anything.
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
        if fields[0] in "ZX":
            return False
        if session and int(fields[3]) == session:
            return True
        return mark in (entry / "environ").read_bytes().split(b"\0")
    except (OSError, IndexError, ValueError):  # it ended meanwhile, or is not ours to read
        return False


def main() -> None:
    """Wait for the end of stdin, then kill. Signals that end our job must not end us first."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    said = b""
    while block := os.read(0, 64):
        said += block
    kill_processes(int(said or b"0"), sys.argv[1])


if __name__ == "__main__":
    main()
