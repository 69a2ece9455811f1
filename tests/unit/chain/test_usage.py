"""GPU time: every attempt counts once, and reading it does not grow with the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy.world import FastFs, make_settings

from slurm_rl.chain.graph import build_graph
from slurm_rl.chain.usage import read_iteration, read_total, read_usage
from slurm_rl.chain.view import Spec
from slurm_rl.storage.claims import AttemptEnd, try_claim, write_end, write_heartbeat
from slurm_rl.storage.commits import publish_commit
from slurm_rl.storage.control import Control, TimelineStart
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import Claim, Slot

SPEC = Spec("toy", "id", gpus=(("init", 0), ("rollout", 2), ("train", 8)), gpu_hours=1.0)


class CountingFs(FastFs):
    num_reads = 0

    def read(self, path: Path) -> bytes:
        self.num_reads += 1
        return super().read(path)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "toy", CountingFs())
    run.control_dir.mkdir(parents=True)
    return run


def attempt(run: RunDir, slot: Slot, epoch: int, *, said: float = 0.0, beat: float = 0.0) -> None:
    made = Claim(epoch, "id1", f"{epoch:012x}")
    assert try_claim(run, slot, made)
    if beat:
        write_heartbeat(run, slot, made, 3, elapsed_s=beat)
    if said:
        write_end(run, slot, made, AttemptEnd("failed", elapsed_s=said))


def commit(run: RunDir, slot: Slot, gpu_s: float) -> None:
    run.slot_dir(slot).mkdir(parents=True, exist_ok=True)
    content = {"files": [], "parents": {}}
    publish_commit(run, slot, content=content, provenance={"attempt": "a", "gpu_s": gpu_s})


def test_every_attempt_counts_by_its_last_word_or_its_last_heartbeat(run: RunDir) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=4))
    attempt(run, Slot(0, "rollout", 0), 1, beat=30.0)  # killed
    attempt(run, Slot(0, "rollout", 0), 2, beat=30.0, said=40.0)
    attempt(run, Slot(0, "train", 0), 1, said=5.0)
    attempt(run, Slot(0, "init", 0), 1, said=1000.0)  # without a GPU
    assert read_iteration(run, graph, Control(), SPEC, 0) == 2 * (30 + 40) + 8 * 5


def test_shards_each_count(run: RunDir) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=4, shards=2))
    for shard in (0, 1):
        attempt(run, Slot(0, "rollout", 0, shard), 1, said=10.0)
    assert read_iteration(run, graph, Control(), SPEC, 0) == 2 * 20


def test_the_whole_is_what_the_last_complete_iteration_says_and_what_came_since(
    run: RunDir,
) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=9))
    commit(run, Slot(2, "train", 0), 700.0)
    attempt(run, Slot(2, "train", 0), 1, said=99.0)  # in the 700 already
    attempt(run, Slot(3, "rollout", 0), 1, said=10.0)
    attempt(run, Slot(4, "rollout", 0), 1, said=20.0)  # beside it, with lag 1
    assert read_usage(run, graph, Control(), SPEC, head=3) == 700 + 2 * 30
    assert read_total(run, graph, Control(), 2) == 700.0


def test_what_a_rewind_set_aside_was_used_all_the_same(run: RunDir) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=9))
    control = Control(timelines=(TimelineStart(1, 0, "rollout", gpu_s=500.0),))
    attempt(run, Slot(0, "rollout", 0), 1, said=200.0)  # in the 500
    attempt(run, Slot(0, "rollout", 1), 1, said=10.0)
    assert read_usage(run, graph, control, SPEC, head=0) == 500 + 20


def test_without_gpus_nothing_is_read(run: RunDir) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=9))
    attempt(run, Slot(0, "rollout", 0), 1, said=10.0)
    assert isinstance(run.fs, CountingFs)
    run.fs.num_reads = 0
    assert read_usage(run, graph, Control(), Spec("toy", "id"), head=0) == 0.0
    assert run.fs.num_reads == 0


def test_the_cost_does_not_grow_with_the_run(run: RunDir) -> None:
    graph = build_graph(make_settings(run.root.parent, num_rollout=1000))
    costs = []
    assert isinstance(run.fs, CountingFs)
    for head in (3, 900):
        commit(run, Slot(head - 1, "train", 0), 1.0)
        run.fs.num_reads = 0
        read_usage(run, graph, Control(), SPEC, head=head)
        costs.append(run.fs.num_reads)
    assert costs[0] == costs[1]
