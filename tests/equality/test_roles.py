"""Every role in one run: critic, moving reference and teacher beside the policy. Killed or not, the
commits are the same; and what each of them must carry on is carried on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from equality.killer import Killer
from equality.test_equality import PROGRAM, read_digests
from toy.roles import STAGES, make_teacher, roles_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

QUICK = {
    "heartbeat_s": 0.2,
    "lease_s": 1.5,
    "retry_delay_s": 0.1,
    "submit_deadline_s": 2,
    "max_attempts": 9,
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher") / "model")


def start(folder: Path, teacher: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(roles_config(folder, teacher, chain=QUICK)))
    argv = [PROGRAM, "submit", str(config), "--wait"]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    watcher = start(folder, teacher)
    _, err = watcher.communicate(timeout=900)
    assert watcher.returncode == 0, err
    return folder / "roles"


def content(root: Path, stage: str) -> dict[str, Any]:
    iteration, kind = stage.split(".")
    path = root / "iterations" / f"{int(iteration[1:]):06d}" / f"{kind}.t0" / "COMMIT"
    found: dict[str, Any] = json.loads(path.read_bytes())["content"]
    return found


def digest_of(root: Path, stage: str) -> str:
    return read_digests(root)[stage]


def test_actor_and_critic_advance_together(undisturbed: Path) -> None:
    """Each commit names what it was made from; no other critic's values can meet the policy."""
    assert sorted(read_digests(undisturbed)) == sorted(STAGES)
    for i in range(2):
        critic, train = (content(undisturbed, f"i{i:04d}.{kind}") for kind in ("critic", "train"))
        rollout = digest_of(undisturbed, f"i{i:04d}.rollout")
        assert train["parents"]["critic"] == digest_of(undisturbed, f"i{i:04d}.critic")
        assert critic["parents"]["rollout"] == train["parents"]["rollout"] == rollout
        reference = digest_of(undisturbed, f"i{i:04d}.reference")
        assert critic["parents"]["reference"] == train["parents"]["reference"] == reference
    before = {0: "i0000.init", 1: "i0000.critic"}
    for i, stage in before.items():
        made_from = content(undisturbed, f"i{i:04d}.critic")["parents"]["checkpoint"]
        assert made_from == digest_of(undisturbed, stage)


def test_a_warm_up_carries_the_policy_and_not_the_critic(undisturbed: Path) -> None:
    first, second = (content(undisturbed, f"i{i:04d}.train") for i in range(2))
    start = content(undisturbed, "i0000.init")
    assert first["weights"]["version"] == 1
    assert first["weights"]["digest"] == start["weights"]["digest"]
    assert first["carried_since"] == 0 and "optimizer_steps" not in first
    assert second["weights"]["digest"] != start["weights"]["digest"]
    # 32 samples in steps of 16, twice.
    assert (second["weights"]["version"], second["optimizer_steps"]) == (2, 4)
    critics = [content(undisturbed, f"i{i:04d}.critic") for i in range(2)]
    assert [critic["optimizer_steps"] for critic in critics] == [4, 8]
    assert len({start["critic"]["digest"], *(c["critic"]["digest"] for c in critics)}) == 3


def test_the_head_is_made_once_and_recorded(undisturbed: Path) -> None:
    head = content(undisturbed, "i0000.init")["critic"]["head"]
    assert head["made"] == "created" and head["seed"] > 0


def test_the_teacher_is_in_the_commits(undisturbed: Path) -> None:
    digest = content(undisturbed, "i0000.init")["teacher"]["digest"]
    for i in range(2):
        assert content(undisturbed, f"i{i:04d}.teacher")["teacher"]["digest"] == digest


def test_the_reference_moves_as_an_average_of_files(undisturbed: Path) -> None:
    """In iteration 0 it is the policy; in 1 the average with a policy that has not moved."""
    digests = [content(undisturbed, f"i{i:04d}.reference")["reference"]["digest"] for i in range(2)]
    assert len(set(digests)) == 1
    names = [entry["path"] for entry in content(undisturbed, "i0001.reference")["files"]]
    assert "reference/model.safetensors" in names and "signals.safetensors" in names


def test_with_every_job_killed_it_is_the_same(
    undisturbed: Path, teacher: Path, tmp_path: Path
) -> None:
    killer = Killer(tmp_path / "roles", seed=4)
    killer.assign(STAGES)
    watcher = start(tmp_path, teacher)
    killer.attend(watcher, seconds=1000)
    missed = [killer.wanted[stage] for stage in STAGES if stage not in killer.hits]
    assert set(missed) <= {"committed"}, f"not killed: {missed}"
    assert read_digests(tmp_path / "roles") == read_digests(undisturbed)


@pytest.mark.parametrize("stage", ["i0001.critic", "i0001.reference", "i0000.teacher"])
def test_each_stage_gives_its_committed_bytes_again(undisturbed: Path, stage: str) -> None:
    iteration, kind = stage[1:].split(".")
    argv = [PROGRAM, "replay", str(undisturbed), "-i", str(int(iteration)), "--stage", kind]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    num = len(content(undisturbed, stage)["files"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"all {num} files are, byte for byte, those that were committed" in done.stdout
