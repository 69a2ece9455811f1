"""Reading a run: in which order, at what cost, and from where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy.world import FastFs, make_settings

from slurm_rl.chain.graph import build_graph
from slurm_rl.chain.observe import find_head, observe, write_head
from slurm_rl.chain.scheduler import JobState, LinkRequest, QueuedJob
from slurm_rl.chain.view import Spec
from slurm_rl.errors import SchedulerUnavailable
from slurm_rl.storage.commits import publish_commit
from slurm_rl.storage.control import Control, TimelineStart
from slurm_rl.storage.fs import PosixFs
from slurm_rl.storage.intents import Intent, publish_intent
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Slot

SPEC = Spec(run_name="toy", short_id="id", window=3)


class CountingFs(PosixFs):
    """Notes what is read."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def read(self, path: Path) -> bytes:
        self.seen.append(str(path))
        return super().read(path)

    def list(self, path: Path) -> list[str]:
        self.seen.append(str(path))
        return super().list(path)


class Queue:
    """A scheduler that only answers queries."""

    def __init__(self, seen: list[str] | None = None, *, answers: bool = True) -> None:
        self.seen, self.answers = [] if seen is None else seen, answers
        self.jobs: list[QueuedJob] = []

    def query(self) -> list[QueuedJob]:
        self.seen.append("QUERY")
        if not self.answers:
            raise SchedulerUnavailable("no")
        return self.jobs

    def submit(self, request: LinkRequest) -> str:
        raise AssertionError("looking submits nothing")

    def cancel(self, job_ids: list[str]) -> None:
        raise AssertionError("looking cancels nothing")

    def repoint(self, job_id: str, after: str | None) -> None:
        raise AssertionError("looking repoints nothing")

    def requeue(self, job_id: str) -> bool:
        raise AssertionError("looking requeues nothing")


def commit(
    run: RunDir, iteration: int, kind: str, parents: dict[str, str], timeline: int = 0
) -> str:
    content = {"stage": kind, "iteration": iteration, "files": [], "parents": parents}
    slot = Slot(iteration, kind, timeline)
    run.slot_dir(slot).mkdir(parents=True, exist_ok=True)
    assert publish_commit(run, slot, content=content, provenance={"attempt": "a"})
    return json.loads((run.slot_dir(slot) / "COMMIT").read_bytes())["digest"]


def commit_iterations(root: Path, num: int) -> RunDir:
    """A run in which the first `num` iterations are complete."""
    run = RunDir(root / "toy", FastFs())
    run.control_dir.mkdir(parents=True)
    weights, previous = commit(run, 0, "init", {}), ""
    for i in range(num):
        back = {"previous": previous} if i else {}
        previous = commit(run, i, "rollout", {"weights": weights, **back})
        weights = commit(run, i, "train", {"rollout": previous, "checkpoint": weights})
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return commit_iterations(tmp_path, 5)


@pytest.mark.parametrize(
    "hint",
    [None, 0, 3, 5, 6, 40, 10**9, -4, "text", b"", b"{}"],
    ids=str,
)
def test_the_head_is_found_whatever_the_hint_says(run: RunDir, hint: object) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=40))
    if isinstance(hint, bytes):
        (run.root / "head").write_bytes(hint)
    elif hint is not None:
        (run.root / "head").write_text(json.dumps({"iteration": hint}))
    assert find_head(run, graph, Control()) == 5


def test_a_complete_run_has_its_head_behind_the_end(run: RunDir) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=5))
    assert find_head(run, graph, Control()) == 5


@pytest.mark.parametrize(("iteration", "kind"), [(2, "rollout"), (2, "train"), (4, "train")])
def test_a_rewind_moves_the_head_back(run: RunDir, iteration: int, kind: str) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=40))
    write_head(run, 5)
    control = Control(timelines=(TimelineStart(1, iteration, kind),))
    assert find_head(run, graph, control) == iteration


def cost(root: Path, num: int) -> int:
    run = commit_iterations(root, num)
    graph = build_graph(make_settings(root, num_rollout=10**6))
    write_head(run, num)
    fs = CountingFs()
    view = observe(RunDir(run.root, fs), graph, SPEC, Queue(), now=0.0)
    assert view.links[0].link.iteration == num
    return len(fs.seen)


def test_the_cost_does_not_grow_with_the_run(tmp_path: Path) -> None:
    assert cost(tmp_path / "short", 10) == cost(tmp_path / "long", 1000) < 100


def test_without_a_hint_the_cost_grows_as_a_logarithm(tmp_path: Path) -> None:
    run = commit_iterations(tmp_path, 100)
    graph = build_graph(make_settings(tmp_path, num_rollout=10**6))
    fs = CountingFs()
    assert find_head(RunDir(run.root, fs), graph, Control()) == 100
    assert len(fs.seen) < 40


def test_control_intents_queue_commits_in_this_order(run: RunDir) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=40))
    publish_intent(run, run.stage_dir(5, "rollout", 0), Intent(1, "id1", 0.0))
    write_head(run, 5)
    fs = CountingFs()
    observe(RunDir(run.root, fs), graph, SPEC, Queue(fs.seen), now=0.0)
    query = fs.seen.index("QUERY")
    control = [i for i, name in enumerate(fs.seen) if "/control" in name]
    intents = [i for i, name in enumerate(fs.seen) if "submit." in name]
    commits = [i for i, name in enumerate(fs.seen) if name.endswith("COMMIT")]
    assert max(control) < min(intents) <= max(intents) < query < min(commits)
    assert fs.seen.count("QUERY") == 1


def test_a_scheduler_that_does_not_answer_is_no_empty_queue(run: RunDir) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=40))
    assert observe(run, graph, SPEC, Queue(answers=False), now=0.0).queue is None
    assert observe(run, graph, SPEC, Queue(), now=0.0).queue == ()


def test_jobs_of_another_run_of_the_same_name_are_not_ours(run: RunDir) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=40))
    queue = Queue()
    ours = QueuedJob("1", "toy.tick.id12", JobState.PENDING)
    queue.jobs = [ours, QueuedJob("2", "toy.tick.xx12", ours.state)]
    assert observe(run, graph, SPEC, queue, now=0.0).queue == (ours,)


def test_a_window_that_was_committed_while_looking_is_not_the_end(run: RunDir) -> None:
    """A commit lands between finding the window and reading it."""
    graph = build_graph(make_settings(run.root.parent, num_rollout=40))
    spec = Spec(run_name="toy", short_id="id", window=1)

    class Meanwhile(Queue):
        def query(self) -> list[QueuedJob]:
            if not self.seen:
                digests = {
                    kind: json.loads((run.slot_dir(Slot(4, kind, 0)) / "COMMIT").read_bytes())[
                        "digest"
                    ]
                    for kind in ("rollout", "train")
                }
                parents = {"weights": digests["train"], "previous": digests["rollout"]}
                commit(run, 5, "rollout", parents)
            return super().query()

    view = observe(run, graph, spec, Meanwhile(), now=0.0)
    assert [str(seen.link.anchor) for seen in view.links] == ["i0005.train"]


def test_a_commit_of_other_parents_is_a_conflict(run: RunDir) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=40))
    commit(run, 5, "rollout", {"weights": "xxh3:other", "previous": "xxh3:other"})
    view = observe(run, graph, SPEC, Queue(), now=0.0)
    assert "i0005.rollout was made from" in view.conflict
