"""Tiny models in fp32, and the settings with which SGLang serves them on a CPU."""

import os
from pathlib import Path

import pytest
from toy.sglang_cpu import CPU_ARGUMENTS, CPU_ENVIRONMENT

from slurm_rl.config.schema import InitModel
from slurm_rl.rollout.engine import Weights
from slurm_rl.rollout.sglang import SglangOptions
from slurm_rl.stages.init import make_model
from slurm_rl.storage.digest import digest_entries
from slurm_rl.storage.durable import list_files, seal_files

MODEL = InitModel(
    characters="abcdefghijklmnopqrstuvwxyz=",
    config={
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "dtype": "float32",
    },
)
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter that has SGLang; its absence is a failure, not a reason to skip."""
    default = REPOSITORY / ".venv-sglang" / "bin" / "python"
    path = Path(os.environ.get("SLURM_RL_SGLANG_PYTHON", default))
    if not path.exists():
        pytest.fail(
            f"{path}: no interpreter with SGLang; run tools/install_sglang_cpu.sh .venv-sglang"
            " (make test does), or set SLURM_RL_SGLANG_PYTHON"
        )
    return str(path)


def make_weights(path: Path, *, version: int) -> Weights:
    path.mkdir()
    make_model(MODEL, path, seed=version)
    digest = digest_entries(seal_files(path, list_files(path)))
    return Weights(path, version, digest, f"run/v{version}/{digest}")


@pytest.fixture(scope="session")
def all_weights(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """Versions 0 and 1."""
    root = tmp_path_factory.mktemp("weights")
    return [make_weights(root / f"v{version}", version=version) for version in range(2)]


@pytest.fixture(scope="session")
def make_options(sglang_python: str):  # type: ignore[no-untyped-def]
    def make(log_path: Path, **changes: object) -> SglangOptions:
        values = {
            "arguments": CPU_ARGUMENTS,
            "environment": {**os.environ, **CPU_ENVIRONMENT},
            "log_path": log_path,
            "python": sglang_python,
            "deterministic": True,
            "concurrency": 8,
            "start_timeout_s": 280,
        }
        return SglangOptions(**(values | changes))  # type: ignore[arg-type]

    return make
