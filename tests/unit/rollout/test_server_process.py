"""Real processes: a small HTTP-less server in Python that spawns children in awkward ways."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_rl.errors import EngineError
from slurm_rl.rollout import watchdog
from slurm_rl.rollout.server_process import (
    find_free_port,
    read_last_error,
    start_server,
    wait_until,
)

# A parent that ignores SIGTERM if told to; a child in its session; a grandchild that left the
# session and whose parent died, as a scheduler may that was adopted by init.
SERVER = """
import os, signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep)
escape = "import os, subprocess, sys; os.setsid(); subprocess.Popen(sys.argv[1:])"
subprocess.run([sys.executable, "-c", escape, *sleep])
print("ready", flush=True)
time.sleep(600)
"""


def start(log_path: Path, *arguments: str):  # type: ignore[no-untyped-def]
    server = start_server(
        [sys.executable, "-c", SERVER, *arguments], environment=dict(os.environ), log_path=log_path
    )
    wait_until(server, lambda: "ready" in log_path.read_text(), timeout_s=60, interval_s=0.02)
    return server


def wait_for(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("arguments", [(), ("stubborn",)])
def test_stop_leaves_nothing(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    server = start(tmp_path / "log", *arguments)
    assert len(server.processes()) == 3
    server.stop(grace_s=0.5)
    assert server.processes() == []
    server.stop()


def test_a_bystander_is_left_alone(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        start(tmp_path / "log").stop(grace_s=1)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_the_server_does_not_outlive_us(tmp_path: Path) -> None:
    program = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_server_process import start
server = start(Path({str(tmp_path / "log")!r}))
print(server.pid, server._token, flush=True)
time.sleep(600)
"""
    ours = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert ours.stdout is not None
    pid, token = ours.stdout.readline().split()
    assert len(watchdog.find_processes(int(pid), token)) == 3
    ours.send_signal(signal.SIGKILL)
    ours.wait()
    ours.stdout.close()
    wait_for(lambda: watchdog.find_processes(int(pid), token) == [])


def test_a_server_that_ends_is_reported_with_its_own_words(tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    text = "print('starting'); raise ValueError('no such model')"
    server = start_server(
        [sys.executable, "-c", text], environment=dict(os.environ), log_path=log_path
    )
    with pytest.raises(EngineError, match="ended with status 1: ValueError: no such model"):
        wait_until(server, lambda: False, timeout_s=60)
    server.stop()


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    server = start(tmp_path / "log")
    with pytest.raises(EngineError, match="did not answer within 0 s: ready"):
        wait_until(server, lambda: False, timeout_s=0.1)
    server.stop(grace_s=1)


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="/nonexistent/python cannot be run: No such file"):
        start_server(["/nonexistent/python"], environment={}, log_path=tmp_path / "log")


def test_ports_are_free_and_below_the_ephemeral_range() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {find_free_port() for _ in range(20)}
    assert len(ports) > 10
    for port in ports:
        assert 10_000 <= port < first
        with socket.socket() as probe:
            probe.bind(("0.0.0.0", port))


def test_the_telling_line_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for text, expected in (
        ("", "it said nothing"),
        ("loading\nready\n", "ready"),
        ("a\nRuntimeError: out of memory\nbye\n\n", "RuntimeError: out of memory"),
        ("a\nb error: no port\nbye", "b error: no port"),
        (
            "Traceback …\ntorch.OutOfMemoryError: 3 GiB\n\n[12:00] Pyspy failed. Error: not found\nKilled",
            "torch.OutOfMemoryError: 3 GiB",
        ),
    ):
        path.write_text(text)
        assert read_last_error(path) == expected
