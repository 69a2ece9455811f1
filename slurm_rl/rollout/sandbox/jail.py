"""The process that encloses one run of a program; it starts, watches and ends it.

It reads one line of JSON from its standard input (`runner.py` writes it), answers with one, and
ends. If its input is closed before, its caller is gone, and so is the run. Standard library only,
without `site`: it starts in a few hundredths of a second.

    jail ── A ── B ── C        A enters a user namespace, which the jail gives its ids from
                               outside, then the others. B is the first process of the new pid
                               namespace: it builds the root and starts C, the program; when B
                               ends, the kernel ends all that is left in there.
    jail ── B ── C             without namespaces: orphans come to B, then to the jail, which
                               kills them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

from slurm_rl.rollout.sandbox import confine

_SETUP_S = 20.0
_TICK_S = 0.05
_KILL_S = 5.0
_CHUNK = 1 << 16


def main() -> None:
    """One run: from the line on stdin to the line on stdout."""
    spec = json.loads(sys.stdin.buffer.readline())
    confine.adopt_orphans()
    _mark_for_oom()
    answer: dict[str, Any] = {}
    why = ""
    if spec["isolate"]:
        answer = Run(spec, isolated=True).watch()
        why = answer.get("why", "")
    if not spec["isolate"] or (answer["status"] == "unavailable" and spec["best_effort"]):
        answer = Run(spec, isolated=False).watch() | {"isolation": why}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class Run:
    """One try at a run. Its children are ended when `watch` returns."""

    def __init__(self, spec: dict[str, Any], *, isolated: bool) -> None:
        self._spec = spec
        self._isolated = isolated
        self._out: dict[int, bytearray] = {}
        self._problem = ""
        self._ended: int | None = None

    def watch(self) -> dict[str, Any]:
        """Start, wait, end; what came of it."""
        report, theirs = os.pipe()
        ack, go = os.pipe()
        out, err = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            _enclosed(self._spec, self._isolated, theirs, ack, out[1], err[1])
        for fd in (theirs, ack, out[1], err[1]):
            os.close(fd)
        self._out = {out[0]: bytearray(), err[0]: bytearray()}
        lines = _Lines(report)
        try:
            self._start(pid, lines, go)
            began = time.monotonic()
            if not self._problem:
                self._wait(lines, began)
            seconds = time.monotonic() - began
        finally:
            kill_children()
        self._read_rest()
        texts = [bytes(text).decode("utf-8", "replace") for text in self._out.values()]
        for fd in (report, go, *self._out):
            os.close(fd)
        return self._answer(texts, seconds)

    def _start(self, pid: int, lines: _Lines, go: int) -> None:
        """Until the program runs, or cannot."""
        deadline = time.monotonic() + _SETUP_S
        while True:
            line = lines.next(deadline)
            if line == "map":
                try:
                    os.write(go, b"1" if confine.map_ids(pid) else b"0")
                except OSError as error:
                    self._problem = f"unavailable mapping its ids: {error.strerror}"
                    return
            elif line == "up":
                return
            else:
                self._problem = line or "unavailable the start took too long"
                return

    def _wait(self, lines: _Lines, began: float) -> None:
        """Collect what it says until it ends or breaks a limit."""
        deadline = began + self._spec["timeout_s"]
        watched = [*self._out, lines.fd, 0]
        checked = began
        while not self._problem and self._ended is None:
            ready, _, _ = select.select(watched, [], [], _TICK_S)
            for fd in ready:
                if fd in self._out and not self._read(fd):
                    watched.remove(fd)
                elif fd == lines.fd:
                    self._hear(lines.next(deadline))
                elif fd == 0 and not os.read(0, 1):
                    self._problem = "gone"
            now = time.monotonic()
            if now > deadline and self._ended is None:
                self._problem = "timeout"
            if now - checked > _TICK_S:
                checked = now
                if resident_mb(os.getpid()) > self._spec["memory_mb"] * 1.5 + 64:
                    self._problem = "memory"

    def _hear(self, line: str) -> None:
        if line.startswith("end "):
            self._ended = int(line[4:])
        else:
            self._problem = line or "killed"

    def _read(self, fd: int) -> bool:
        try:
            data = os.read(fd, _CHUNK)
        except OSError:
            return False
        room = self._spec["output_bytes"] - len(self._out[fd])
        self._out[fd] += data[:room]
        if len(data) > room:
            self._problem = "output"
        return bool(data)

    def _read_rest(self) -> None:
        """What lies in the pipes after the end."""
        for fd in self._out:
            os.set_blocking(fd, False)
            while not self._problem and self._read(fd):
                pass

    def _answer(self, texts: list[str], seconds: float) -> dict[str, Any]:
        status, _, why = self._problem.partition(" ")
        if self._ended is not None and not status:
            code = os.waitstatus_to_exitcode(self._ended)
            status = "ok" if code == 0 else "error" if code > 0 else "killed"
            status = "timeout" if code == -signal.SIGXCPU else status
        return {
            "status": status,
            "why": why,
            "stdout": texts[0],
            "stderr": texts[1],
            "seconds": round(seconds, 4),
            "isolated": self._isolated,
        }


class _Lines:
    """Lines from a pipe, each waited for."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._data = b""

    def next(self, deadline: float) -> str:
        """The next line; empty if none comes until the deadline, or no writer is left."""
        while b"\n" not in self._data:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.fd], [], [], left)[0]:
                return ""
            data = os.read(self.fd, _CHUNK)
            if not data:
                return ""
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        return line.decode()


def _enclosed(
    spec: dict[str, Any], isolated: bool, report: int, ack: int, out: int, err: int
) -> None:
    """A, or B without namespaces. Never returns."""
    try:
        confine.die_with_parent()
        can_be_nobody = os.geteuid() == 0
        if isolated:
            can_be_nobody = _leave(report, ack)
            pid = os.fork()
            if pid > 0:
                os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255)
            confine.die_with_parent()
            confine.build_root(spec["binds"], size_mb=spec["disk_mb"])
        else:
            confine.adopt_orphans()
            os.chdir(spec["folder"])
        _place(spec, to_nobody=can_be_nobody)
        _attend(spec, isolated, report, out, err, to_nobody=can_be_nobody)
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        os.write(report, f"unavailable {what}{error.strerror}\n".encode())
    finally:
        os._exit(1)


def _leave(report: int, ack: int) -> bool:
    """Enter all namespaces; True if the program can become nobody in there.

    Root can do without one for users, where they are switched off.
    """
    try:
        confine.enter_user_namespace()
    except OSError:
        if os.geteuid() != 0:
            raise
        confine.enter_namespaces()
        return True
    os.write(report, b"map\n")
    can_be_nobody = os.read(ack, 1) == b"1"
    confine.enter_namespaces()
    confine.forbid_namespaces()
    return can_be_nobody


def _place(spec: dict[str, Any], *, to_nobody: bool) -> None:
    """Write the files of the run into its folder, which is where we are."""
    for name, text in spec["files"].items():
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
        if to_nobody:
            os.chown(name, confine.NOBODY, confine.NOBODY)
    if to_nobody:
        try:
            os.chown(".", confine.NOBODY, confine.NOBODY)
        except PermissionError:
            pass  # open to all already


def _attend(
    spec: dict[str, Any], isolated: bool, report: int, out: int, err: int, *, to_nobody: bool
) -> None:
    """B: start C, say so, bury whatever ends, and tell how C ended."""
    num_others = 0
    if not (isolated and confine.counts_by_namespace()) and os.path.isdir("/proc/self"):
        num_others = confine.count_tasks(confine.NOBODY if to_nobody else os.geteuid())
    program = os.fork()
    if program == 0:
        _become_program(spec, report, out, err, num_others, to_nobody=to_nobody)
    os.close(out)
    os.close(err)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            os.write(report, f"end {status}\n".encode())
            os._exit(0)


def _become_program(
    spec: dict[str, Any], report: int, out: int, err: int, num_others: int, *, to_nobody: bool
) -> None:
    """C: input, limits, rights; then the program. Never returns."""
    try:
        source = os.memfd_create("stdin")
        data = spec["stdin"].encode("utf-8", "surrogatepass")
        while data:
            data = data[os.write(source, data) :]
        os.lseek(source, 0, os.SEEK_SET)
        os.setsid()
        os.dup2(source, 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.set_inheritable(report, False)
        confine.drop_rights(to_nobody=to_nobody)
        confine.set_limits(spec, num_processes=spec["processes"] + num_others)
        confine.die_with_parent()
        os.umask(0o077)
        _close_others(report)
        if not os.access(spec["argv"][0], os.X_OK):
            raise PermissionError(13, "cannot be run by this user", spec["argv"][0])
        os.write(report, b"up\n")
        os.execve(spec["argv"][0], spec["argv"], spec["env"])
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        os.write(report, f"unavailable {what}{error.strerror}\n".encode())
    finally:
        os._exit(127)


def _close_others(report: int) -> None:
    os.closerange(3, report)
    os.closerange(report + 1, 4096)


def kill_children() -> None:
    """SIGKILL every descendant; orphans become our children, so that none is missed."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        for pid in children_of(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # none is left
        time.sleep(0.002)


def children_of(pid: int) -> list[int]:
    """Ids of a process's children; () if it is gone."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return [int(child) for child in file.read().split()]
    except FileNotFoundError:
        pass
    except OSError:
        return []
    return _scan_children(pid) if os.path.isdir(f"/proc/{pid}") else []


def _scan_children(pid: int) -> list[int]:
    """The same for kernels that keep no such list."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if parent == pid:
                found.append(int(name))
    return found


def resident_mb(pid: int) -> float:
    """Memory of all descendants of a process."""
    total, todo = 0, children_of(pid)
    while todo:
        child = todo.pop()
        todo += children_of(child)
        try:
            with open(f"/proc/{child}/statm", "rb") as file:
                total += int(file.read().split()[1])
        except (OSError, IndexError):
            continue
    return total * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _mark_for_oom() -> None:
    """Where memory ends for the whole job, this run goes first."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass
