from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm_rl.config.load import load_config
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError

SMALL: dict[str, Any] = {
    "run": {"name": "demo", "dir": "/runs"},
    "launcher": "local",
    "hf_checkpoint": "/models/m",
    "num_rollout": 3,
    "rollout": {
        "prompt_data": "/data/p.jsonl",
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 4,
        "rm_type": "gsm8k",
    },
    "train": {"global_batch_size": 16, "megatron": {"lr": 1.0e-6}},
}


def change_small(**values: Any) -> dict[str, Any]:
    """SMALL with dotted names set (`rollout__shards=2`); None takes a key out."""
    data = copy.deepcopy(SMALL)
    for name, value in values.items():
        *sections, last = name.split("__")
        target = data
        for section in sections:
            target = target.setdefault(section, {})
        if value is None:
            target.pop(last, None)
        else:
            target[last] = value
    return data


@pytest.fixture
def changed() -> Callable[..., dict[str, Any]]:
    return change_small


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_config(data: Any, name: str = "a.yaml") -> Path:
        file = tmp_path / name
        file.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
        return file

    return write_config


@pytest.fixture
def load(write: Callable[..., Path]) -> Callable[..., Settings]:
    def load_changed(*sets: str, **values: Any) -> Settings:
        return load_config(write(change_small(**values)), sets).settings

    return load_changed


@pytest.fixture
def complaints(load: Callable[..., Settings]) -> Callable[..., list[str]]:
    """The lines of the error, each without its file and line."""

    def of(*sets: str, **values: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(*sets, **values)
        return [line.split(": ", 1)[1] for line in str(caught.value).split("\n")]

    return of
