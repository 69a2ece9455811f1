"""`slurm-rl replay` on a real run: Megatron-core and the embedded engine, in deterministic mode."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(Path(sys.executable).with_name("slurm-rl"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def write_config(folder: Path, *, shards: int = 1) -> Path:
    """The quickstart, of two iterations, and smaller."""
    value = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    value["run"] = {"name": "run", "dir": str(folder)}
    value["num_rollout"] = 2
    value["rollout"] |= {
        "prompt_data": str(ROOT / "configs" / "data" / "quickstart.jsonl"),
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 4,
        "shards": shards,
    }
    value["train"] |= {"global_batch_size": 16, "micro_batch_size": 8}
    value["chain"] = {"heartbeat_s": 0.2, "lease_s": 1.5, "submit_deadline_s": 2}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def call(*argv: str, code: int = 0) -> str:
    done = subprocess.run([PROGRAM, *argv], capture_output=True, text=True, timeout=400)
    assert done.returncode == code, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module", params=[1, 2], ids=["one shard", "two shards"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is complete."""
    folder = tmp_path_factory.mktemp("replay")
    call("submit", str(write_config(folder, shards=request.param)), "--wait")
    return folder / "run"


def snapshot(run: Path) -> dict[str, bytes]:
    """Every file of the run but what notes who looked at it."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and "leases" not in path.parts and path.name != "head"
    }


def commit_of(run: Path, place: str) -> dict[str, Any]:
    return dict(json.loads((run / "iterations" / place / "COMMIT").read_bytes()))


def test_a_train_stage_gives_its_committed_bytes_again(run: Path, tmp_path: Path) -> None:
    before, output = snapshot(run), tmp_path / "kept"
    told = call("replay", str(run), "--train-only", "-i", "1", "--output", str(output))
    names = [entry["path"] for entry in commit_of(run, "000001/train.t0")["content"]["files"]]
    assert f"all {len(names)} files are, byte for byte, those that were committed" in told
    assert re.search(r"train/loss +(\S+) +\1 +0\n", told)
    assert snapshot(run) == before
    ours = output / "train" / "a0001-replay"
    (theirs,) = (run / "iterations/000001/train.t0").glob("a0001-*")
    for name in names:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


def test_a_rollout_stage_gives_its_committed_samples_again(run: Path, tmp_path: Path) -> None:
    before, output = snapshot(run), tmp_path / "kept"
    told = call("replay", str(run), "--rollout-only", "-i", "1", "--output", str(output))
    assert "32 samples are equal: all of them" in told
    assert snapshot(run) == before
    # It was done again, and not taken from the run's journals.
    journals = list(output.rglob("journal.jsonl"))
    assert sum(len(path.read_bytes().splitlines()) for path in journals) == 8
    committed = sorted(run.glob("iterations/000001/rollout.t0/**/samples.safetensors"))
    again = sorted(output.rglob("samples.safetensors"))
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in committed]


def test_samples_from_elsewhere_are_trained_on(run: Path, tmp_path: Path) -> None:
    """What was exported gives the same bytes again; of other rewards something else comes out."""
    export = tmp_path / "samples.jsonl"
    call("samples", str(run), "-i", "1", "--export", str(export))
    replay = ("replay", str(run), "--train-only", "-i", "1", "--samples")
    assert "byte for byte" in call(*replay, str(export))
    committed = sorted(run.glob("iterations/000001/rollout.t0/**/samples.safetensors"))
    if len(committed) == 1:
        assert "byte for byte" in call(*replay, str(committed[0]))
    rows = [json.loads(line) for line in export.read_text().splitlines()]
    for row in rows:
        row["reward"] = float(row["index"] == 0)
        row["weight_versions"] = ["7"]
        del row["token_versions"]
    export.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = call(*replay, str(export))
    assert "files differ from the committed" in told and "it was trained on other samples" in told
    assert re.search(r"rollout/raw_reward +\S+ +0\.25 ", told)
    del rows[3]["loss_mask"], rows[3]["tokens"]
    export.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = call(*replay, str(export), code=2)
    assert "sample 3: tokens is missing" in told and "Traceback" not in told


def test_what_cannot_be_replayed_is_one_line(run: Path, tmp_path: Path) -> None:
    where = str(run)
    assert "say which one" in call("replay", where, "-i", "1", code=2)
    told = call("replay", where, "-i", "1", "--rollout-only", "--samples", "a.jsonl", code=2)
    assert "give --train-only with it" in told
    told = call("replay", where, "-i", "1", "--train-only", "--output", f"{where}/x", code=2)
    assert "it lies in the run" in told and not (run / "x").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    told = call(
        "replay", where, "-i", "1", "--train-only", "--output", str(tmp_path / "full"), code=2
    )
    assert "not an empty folder" in told
    assert "is not one of 0 to 1" in call("replay", where, "-i", "2", "--train-only", code=2)
    none = str(tmp_path / "none.safetensors")
    told = call("replay", where, "-i", "1", "--train-only", "--samples", none, code=2)
    assert "No such file" in told


def test_damaged_inputs_are_found_as_the_stage_finds_them(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    path = next(copy.glob("iterations/000001/rollout.t0/**/samples.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    told = call("replay", str(copy), "--train-only", "-i", "1", code=5)
    assert "digest" in told and "its logs are in" in told
