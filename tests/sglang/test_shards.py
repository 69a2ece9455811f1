"""Two shards with a real SGLang server each, one of which is killed half way.

Each shard is a process of its own, as a Slurm array task starts it. The one that is killed loses its
server too; the other does what it left; its next attempt finds all of it in the journals and starts
no server. The samples are those of one undisturbed shard.
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from toy.stage_jobs import NUM_PROMPTS, NUM_SAMPLES, Stage, finish, make_settings, read_batch

from slurm_rl.config.schema import Settings
from slurm_rl.storage.commits import assemble
from slurm_rl.types import JOURNAL_NAME, Commit

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(580)]


def wait_for_lines(folder: Path, num: int, *processes: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        journal = folder / JOURNAL_NAME
        if journal.exists() and journal.read_bytes().count(b"\n") >= num:
            return
        assert all(process.poll() is None for process in processes), folder
        time.sleep(0.02)
    raise AssertionError(f"{folder}: no {num} groups in time")


@pytest.fixture
def settings(tmp_path: Path, sglang_python: str) -> Settings:
    return make_settings(tmp_path, sglang_python)


def test_one_of_two_shards_is_killed_half_way(settings, all_weights, tmp_path) -> None:  # type: ignore[no-untyped-def]
    alone = Stage(tmp_path / "alone", settings, all_weights[0].path, num_shards=1)
    whole, process = alone.start(0, attempt=1)
    expected = finish(whole, process)

    stage = Stage(tmp_path / "run", settings, all_weights[0].path, num_shards=2)
    (first, victim), (second, other) = (stage.start(k, attempt=1) for k in range(2))
    wait_for_lines(first, 3, victim, other)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert (first / JOURNAL_NAME).read_bytes().count(b"\n") < NUM_PROMPTS // 2, "killed too late"
    results = [None, finish(second, other)]

    again, process = stage.start(0, attempt=2, earlier=[first])
    results[0] = finish(again, process)
    assert not (again / "sglang.log").exists(), "it started a server though nothing was left"

    commits = [
        Commit(
            {**result.content, "files": [dataclasses.asdict(e) for e in result.files]},
            {"attempt": folder.name, "metrics": result.metrics},
            f"xxh3:{k}",
        )
        for k, (result, folder) in enumerate(zip(results, (again, second), strict=True))
    ]
    content, _ = assemble(commits)
    assert content["num_groups"] == NUM_PROMPTS
    assert content["cursor"] == expected.content["cursor"]

    found, wanted = read_batch(again, second), read_batch(whole)
    pairs = list(zip(found.group_index.tolist(), found.sample_index.tolist(), strict=True))
    assert pairs == [(g, k) for g in range(NUM_PROMPTS) for k in range(NUM_SAMPLES)]
    for name in ("tokens", "prompt_lengths", "response_lengths", "rewards", "truncated"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
    assert np.allclose(found.rollout_logprobs, wanted.rollout_logprobs, atol=1e-5)
    assert len(set(found.response_lengths.tolist())) > 1
