"""Settings that were changed while a run was under way: what holds from an iteration on. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

from slurm_rl.errors import ConfigError

#: What a run is made of: other values would be another run.
FIXED = (
    "run",
    "hf_checkpoint",
    "init_model",
    "seed",
    "deterministic",
    "launcher",
    "code",
    "chain.pack",
    "chain.lag",
    "critic.hf_checkpoint",
    "critic.warmup_iterations",
    "reference.hf_checkpoint",
    "reference.update_interval",
    "reference.ema",
    "teacher.hf_checkpoint",
    "teacher.top_logprobs_num",
    "train.sft_iterations",
    "rollout.shards",
    "rollout.pools",
)
#: What a pool may ask of Slurm for can change; which shards it has cannot.
_POOL_OPTION = re.compile(r"rollout\.pools\.[^.]+\.(?!shards\b).+")


def apply_changes(settings: Mapping[str, Any], changes: Iterable[Mapping[str, Any]]) -> Any:
    """`settings` (as `run.json` holds them) with each `{"a.b": value}` put in, in order.

    >>> apply_changes({"chain": {"window": 3}}, [{"chain.window": 5}])
    {'chain': {'window': 5}}
    """
    changed = copy.deepcopy(dict(settings))
    for values in changes:
        for path, value in values.items():
            *parents, last = path.split(".")
            target = changed
            for name in parents:
                if not isinstance(target.get(name), dict):
                    target[name] = {}  # a section that was not set
                target = target[name]
            target[last] = value
    return changed


def check_changes(paths: Iterable[str], *, before: Mapping[str, Any]) -> None:
    """ConfigError for a setting that a run cannot change."""
    for path in paths:
        fixed = next((name for name in FIXED if f"{path}.".startswith(f"{name}.")), None)
        if fixed is not None and not _POOL_OPTION.fullmatch(path):
            value = _find(before, path)
            raise ConfigError(
                f"{path} = {value!r} is fixed when a run is made",
                hint="start another run with the other value (run.name)",
            )


def _find(settings: Mapping[str, Any], path: str) -> Any:
    value: Any = settings
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
