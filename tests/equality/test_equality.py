"""The main test of the design: chain ≡ one process ≡ chain in which every job was killed.

Real stages: Megatron-core, the embedded engine, processes of their own, deterministic mode. Equal
means equal content digests: weights, optimizer state, schedule, random state, data order, samples.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from equality.killer import PHASES, Killer

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(Path(sys.executable).with_name("slurm-rl"))
NUM_ITERATIONS = 3
STAGES = ["i0000.init"] + [
    f"i{i:04d}.{kind}" for i in range(NUM_ITERATIONS) for kind in ("rollout", "train")
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def write_config(folder: Path, *, num_iterations: int = NUM_ITERATIONS, lag: int = 0) -> Path:
    """The quickstart, smaller, and quick to notice a death."""
    value = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    value["run"] = {"name": "run", "dir": str(folder)}
    value["num_rollout"] = num_iterations
    value["rollout"] |= {
        "prompt_data": str(ROOT / "configs" / "data" / "quickstart.jsonl"),
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 4,
    }
    value["train"] |= {"global_batch_size": 16, "micro_batch_size": 8}
    value["chain"] = {
        "heartbeat_s": 0.2,
        "lease_s": 1.5,
        "retry_delay_s": 0.1,
        "submit_deadline_s": 2,
        "max_attempts": 9,
        "lag": lag,
    }
    folder.mkdir(exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def run_chain(config: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Submit, wait, and read every commit's digest."""
    argv = [PROGRAM, "submit", str(config), "--wait"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return read_digests(config.parent / "run")


def read_digests(root: Path) -> dict[str, str]:
    found = {}
    for path in sorted((root / "iterations").glob("*/*.t0/COMMIT")):
        content = json.loads(path.read_bytes())
        name = f"i{content['content']['iteration']:04d}.{content['content']['stage']}"
        found[name] = content["digest"]
    return found


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_chain(write_config(tmp_path_factory.mktemp("chain")))


def run_one_process(config: Path, folder: Path) -> dict[str, str]:
    argv = [sys.executable, str(Path(__file__).with_name("single_process.py"))]
    done = subprocess.run(
        [*argv, str(config), str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    digests: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return digests


def test_a_chain_is_one_process(chain: dict[str, str], tmp_path: Path) -> None:
    config = write_config(tmp_path / "one")
    assert sorted(chain) == sorted(STAGES)
    assert run_one_process(config, tmp_path / "run") == chain
    # Something happened: no two stages made the same, weights differ between iterations.
    assert len(set(chain.values())) == len(STAGES)
    weights = set()
    for path in (tmp_path / "run").glob("iterations/*/train.t0/COMMIT"):
        weights.add(json.loads(path.read_bytes())["content"]["weights"]["digest"])
    assert len(weights) == NUM_ITERATIONS


def test_with_lag_1_a_chain_is_one_process_and_stages_overlap(
    chain: dict[str, str], tmp_path: Path
) -> None:
    found = run_chain(write_config(tmp_path / "chain", lag=1))
    assert run_one_process(write_config(tmp_path / "one", lag=1), tmp_path / "run") == found
    # Rollouts 0 and 1 are both of the initial weights; after that nothing is as without lag.
    commits = {
        stage: json.loads(next(tmp_path.glob(f"chain/run/iterations/{i:06d}/{kind}.t0/COMMIT")).read_bytes())
        for i in range(NUM_ITERATIONS)
        for kind in ("rollout", "train")
        for stage in [f"i{i:04d}.{kind}"]
    }  # fmt: skip
    served = [commits[f"i{i:04d}.rollout"]["content"]["weights"]["version"] for i in range(3)]
    assert served == [0, 0, 1]
    assert found["i0002.rollout"] != chain["i0002.rollout"]
    began, ended = (
        [commits[f"i{i:04d}.{kind}"]["provenance"][word] for i in range(3)]
        for kind, word in (("rollout", "started"), ("train", "ended"))
    )
    assert any(began[i + 1] < ended[i] for i in range(2)), "a rollout waited for a train stage"


def test_a_chain_whose_every_job_was_killed_is_the_same(
    chain: dict[str, str], tmp_path: Path
) -> None:
    config = write_config(tmp_path / "killed")
    root = tmp_path / "killed" / "run"
    killer = Killer(root, seed=20)
    killer.assign(STAGES)
    argv = [PROGRAM, "submit", str(config), "--wait"]
    watcher = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    killer.attend(watcher, seconds=400)
    # A job that was to die after its commit may have ended by itself in that moment.
    missed = [killer.wanted[stage] for stage in STAGES if stage not in killer.hits]
    assert missed in ([], ["committed"]), f"not killed: {missed}"
    assert set(killer.hits.values()) == set(PHASES), f"wanted {killer.wanted}, hit {killer.hits}"
    assert read_digests(root) == chain


#: Each breaks one thing that must survive a process, in a copy of the package: the file, what is
#: replaced, by what, and the first stage that must differ (or must refuse to go on).
MUTANTS = {
    "a seed from the pid": (
        "slurm_rl/seeds.py",
        'return "/".join(',
        'import os; seed += os.getpid(); return "/".join(',
        "i0000.init",
    ),
    "a dropped optimizer state": (
        "slurm_rl/train/trainer.py",
        "        self._engine.optimizer_steps = self.progress.optimizer_steps\n",
        "        self._engine.optimizer_steps = self.progress.optimizer_steps\n"
        "        _forget(self._engine.optimizer)\n",
        "i0001.train",
    ),
    "a dropped cursor": (
        "slurm_rl/stages/rollout.py",
        'order.inputs.get("previous")',
        "None",
        "i0001.rollout",
    ),
}
_FORGET = """

def _forget(optimizer: object) -> None:
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in inner.optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value):
                    value.zero_()
"""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name: str, chain: dict[str, str], tmp_path: Path) -> None:
    """A chain of the mutant departs from the right one at the stage that it breaks."""
    file, old, new, first = MUTANTS[name]
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "slurm_rl", copy / "slurm_rl")
    path = copy / file
    text = path.read_text()
    assert old in text, f"{file} has changed; mend the mutant"
    path.write_text(text.replace(old, new, 1) + (_FORGET if "_forget" in new else ""))
    config = write_config(tmp_path / "mutant", num_iterations=2)
    argv = [sys.executable, "-c", "from slurm_rl.cli.main import entry; entry()"]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    done = subprocess.run(
        [*argv, "submit", str(config), "--wait"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "Traceback" not in done.stderr, done.stderr
    found = read_digests(tmp_path / "mutant" / "run")
    differs = [stage for stage in STAGES if stage in found and found[stage] != chain[stage]]
    assert differs and differs[0] == first, f"{differs}, {done.stderr}"
