"""A server over several nodes: who starts when, and who ends with whom. Fake servers."""

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_rl.errors import EngineError
from slurm_rl.rollout.engine import Weights
from slurm_rl.rollout.sglang import SglangEngine, SglangOptions, serve_follower
from slurm_rl.rollout.sglang.nodes import Leader, LeaderWatch, done_path

FAKE = Path(__file__).parent / "fake_sglang.py"


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"architectures": ["X"]}')
    return Weights(path, 3, "xxh3:1", "run/v3/xxh3:1")


@pytest.fixture
def options(tmp_path: Path) -> SglangOptions:
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/commands\nexec {sys.executable} -I {FAKE} "$@"\n'
    )
    program.chmod(0o755)
    environment = {**os.environ, "FAKE_FOLDER": str(tmp_path)}
    return SglangOptions(
        {"device": "cpu", "tp_size": 2},
        environment,
        tmp_path / "sglang.log",
        python=str(program),
        num_nodes=2,
        start_timeout_s=30,
    )


class Follower(threading.Thread):
    """`serve_follower` of rank 1, as another node's process would run it."""

    def __init__(self, options: SglangOptions, weights: Weights, **more: Any) -> None:
        super().__init__(daemon=True)
        self.error: EngineError | None = None
        self._work = lambda: serve_follower(options, weights, rank=1, **more)
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except EngineError as error:
            self.error = error


@pytest.fixture
def engine(options: SglangOptions) -> Iterator[SglangEngine]:
    engine = SglangEngine(options)
    yield engine
    engine.stop()


def commands(folder: Path) -> list[list[str]]:
    """Command lines of the servers that were started, in their order."""
    path = folder / "commands"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def wait_for(condition: Callable[[], object], *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def by_rank(folder: Path) -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {"0": [], "1": []}
    for command in commands(folder):
        found[value(command, "--node-rank")].append(command)
    return found


def test_followers_join_the_leader_and_leave_with_it(
    engine: SglangEngine, options: SglangOptions, weights: Weights, tmp_path: Path
) -> None:
    follower = Follower(options, weights)
    time.sleep(0.3)
    assert commands(tmp_path) == [], "nobody to join yet"
    engine.start(weights)
    wait_for(lambda: by_rank(tmp_path)["1"])
    ((leading,), (following,)) = by_rank(tmp_path).values()
    for flag in ("--dist-init-addr", "--nnodes", "--weight-version", "--tp-size", "--random-seed"):
        assert value(leading, flag) == value(following, flag)
    assert value(leading, "--nnodes") == "2"
    assert (tmp_path / "sglang-node1.log").exists()
    engine.stop()
    follower.join(60)
    assert not follower.is_alive()
    assert follower.error is None


def test_a_leader_that_starts_again_elsewhere_is_followed(
    engine: SglangEngine, options: SglangOptions, weights: Weights, tmp_path: Path
) -> None:
    fault = json.dumps({"0": {"port_taken": True}})
    taken = dataclasses.replace(
        options, environment={**options.environment, "FAKE": fault, "FAKE_NUMBER": "0"}
    )
    follower = Follower(options, weights)
    leading = SglangEngine(taken)
    try:
        leading.start(weights)
        first, second = by_rank(tmp_path)["0"]
        assert value(first, "--dist-init-addr") != value(second, "--dist-init-addr")
        address = value(second, "--dist-init-addr")
        wait_for(
            lambda: address in [value(one, "--dist-init-addr") for one in by_rank(tmp_path)["1"]]
        )
    finally:
        leading.stop()
    follower.join(60)
    assert not follower.is_alive()
    assert follower.error is None


@pytest.mark.slow
@pytest.mark.slow
def test_a_leader_that_falls_silent_ends_the_follower(
    options: SglangOptions, weights: Weights, tmp_path: Path
) -> None:
    leader = Leader(tmp_path / "engine.json", beat_s=0.1)
    follower = Follower(options, weights, silence_s=3.0)
    leader.announce("127.0.0.1:12345")
    wait_for(lambda: by_rank(tmp_path)["1"])
    time.sleep(3.5)
    assert follower.is_alive(), "it hears the beat"
    leader._is_over.set()  # as if its process were killed: no word more
    follower.join(60)
    assert "first rank has fallen silent" in str(follower.error)


def test_a_server_that_ends_with_its_leaders_is_no_error(
    options: SglangOptions, weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks' processes see the connection break before the file says why."""
    dying = dataclasses.replace(
        options, environment={**options.environment, "FAKE": '{"*": {"die_at_start": true}}'}
    )
    leader = Leader(tmp_path / "engine.json", beat_s=0.1)
    follower = Follower(dying, weights)
    leader.announce("127.0.0.1:12345")
    wait_for(lambda: by_rank(tmp_path)["1"])
    time.sleep(1.0)
    assert follower.is_alive()
    leader.stop()
    follower.join(60)
    assert follower.error is None
    done_path(tmp_path / "engine.json").unlink()
    # Without a word from the leader it is one, after a while.
    monkeypatch.setattr("slurm_rl.rollout.sglang.nodes._GRACE_S", 0.5)
    leader = Leader(tmp_path / "engine.json", beat_s=0.1)
    leader.announce("127.0.0.1:12346")
    follower = Follower(dying, weights)
    follower.join(60)
    leader.stop()
    assert "rank 1 of the server: the server ended with status 1: ValueError" in str(follower.error)


def test_a_leader_that_never_comes(tmp_path: Path) -> None:
    watch = LeaderWatch(tmp_path / "engine.json", 100.0, start_timeout_s=30.0)
    assert watch.look(129.0) == ""
    with pytest.raises(EngineError, match="first rank has not started for 30 s"):
        watch.look(131.0)
    Leader(tmp_path / "engine.json").announce("n1:5")
    assert watch.look(131.0) == "n1:5"
    assert watch.look(300.0) == "n1:5"
    with pytest.raises(EngineError, match="has fallen silent for 180 s"):
        watch.look(312.0)
    done_path(tmp_path / "engine.json").touch()
    assert watch.look(1e9) is None
