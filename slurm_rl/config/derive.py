"""What follows from the settings: each derived value has one function here, and no copy.

Pure: reads no files and no environment. A stage's own `slurm`, `env` and `container` meet
the top-level ones here, so that `Settings` says the same after a trip through JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from slurm_rl.config.schema import Container, Fallback, Settings
from slurm_rl.storage.digest import digest_value

STAGE_KINDS = ("init", "rollout", "train", "tick")

#: `slurm.time`: learn it from the run.
AUTO = "auto"
DEFAULT_SIGNAL_S = 120
DEFAULT_TICK_SIGNAL_S = 60

#: What makes a job large. A tick is one core without a GPU, whatever the stages ask for.
SHAPE_OPTIONS = frozenset(
    "nodes ntasks ntasks_per_node ntasks_per_gpu cpus_per_task cpus_per_gpu gpus gpus_per_node"
    " gpus_per_task gpus_per_socket gres mem mem_per_cpu mem_per_gpu exclusive time time_min"
    " contiguous switches cores_per_socket sockets_per_node threads_per_core".split()
)
_TICK_SHAPE: dict[str, Any] = {
    "nodes": 1,
    "ntasks_per_node": 1,
    "cpus_per_task": 1,
    "time": "00:10:00",
}

#: Settings of a stage that say where and how it runs, not which numbers come out.
_NOT_SHAPING = {"slurm", "container", "python", "env", "deadline_s"}
_NOT_SHAPING_ROLLOUT = _NOT_SHAPING | {
    "shards",
    "prompt_data",  # the cursor carries the data's own fingerprint
    "concurrency",
    "sglang_python",
    "sglang_env",
    "server_start_timeout_s",
    "request_timeout_s",
}
_NOT_SHAPING_TRAIN = _NOT_SHAPING | {"num_ranks", "check_first_ratio", "save_steps"}

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")


def stage_slurm(settings: Settings, kind: str) -> dict[str, Any]:
    """The sbatch options of a stage: its own over the top-level ones, unset ones left out.

    Keys keep their underscores, extra ones and their values are as the user wrote them.
    `signal_s`, `time_max` and `fallback` are ours and not among them. A tick takes the shape of
    no stage.
    """
    shared = _options(settings.slurm)
    if kind == "tick":
        shared = {k: v for k, v in shared.items() if k not in SHAPE_OPTIONS} | _TICK_SHAPE
    return shared | _options(settings.stage(kind).slurm)


def stage_signal_s(settings: Settings, kind: str) -> int:
    """Seconds before its time limit at which a stage's job is told to stop."""
    own = settings.stage(kind).slurm.signal_s
    if kind == "tick":  # it has nothing to save, and its job is short
        return own or DEFAULT_TICK_SIGNAL_S
    return own or settings.slurm.signal_s or DEFAULT_SIGNAL_S


def stage_time_s(settings: Settings, kind: str) -> int | None:
    """Wall time of a stage's job in seconds; None if it has no limit or the site's default."""
    time = stage_slurm(settings, kind).get("time")
    if time == AUTO:
        time = settings.stage(kind).slurm.time_max or settings.slurm.time_max
    return None if time is None else parse_wall_time(time)


def stage_fallback(settings: Settings, kind: str) -> Fallback | None:
    """Where a stage goes that waits too long: its own, or the top-level one."""
    return settings.stage(kind).slurm.fallback or settings.slurm.fallback


def stage_env(settings: Settings, kind: str) -> dict[str, str]:
    """Environment of a stage's program: its own over the top-level one."""
    merged = {**settings.env, **settings.stage(kind).env}
    return {name: str(value) for name, value in merged.items()}


def stage_container(settings: Settings, kind: str) -> Container:
    """The container of a stage: its own, as a whole, or the top-level one."""
    own = settings.stage(kind).container
    return settings.container if own is None else own


def containers_of(settings: Settings) -> Iterator[tuple[tuple[str, ...], Container]]:
    """Each container that the settings hold, with its place: `("train", "container")`."""
    yield ("container",), settings.container
    for kind in STAGE_KINDS:
        own = settings.stage(kind).container
        if own is not None:
            yield (kind, "container"), own


def stage_python(settings: Settings, kind: str) -> str | None:
    """Interpreter of a stage's program; None: the one that the supervisor runs in."""
    container = stage_container(settings, kind)
    if container.runtime != "none":
        return container.python
    return settings.stage(kind).python or settings.host_python


def gpu_count(request: int | str | None) -> int | None:
    """GPUs on a node from `8`, `"8"` or `"a100:4"`; None if unset, ValueError if neither."""
    if request is None or isinstance(request, int):
        return request
    return int(request.rsplit(":", 1)[-1])


def num_ranks(settings: Settings) -> int:
    """Processes of the train job: `num_ranks`, or nodes × gpus_per_node under Slurm, or 1."""
    if settings.train.num_ranks is not None:
        return settings.train.num_ranks
    options = stage_slurm(settings, "train")
    gpus = gpu_count(options.get("gpus_per_node"))
    if settings.launcher == "local" or not gpus:
        return 1
    return int(options.get("nodes", 1)) * gpus


def num_gpus(settings: Settings, kind: str) -> int:
    """GPUs of a stage's whole job: nodes × gpus_per_node, or `gpus`."""
    options = stage_slurm(settings, kind)
    whole = gpu_count(options.get("gpus"))
    return whole or int(options.get("nodes", 1)) * (gpu_count(options.get("gpus_per_node")) or 0)


def model_parallel_size(settings: Settings) -> int:
    """Ranks that hold one copy of the model: tensor × pipeline × context."""
    product = 1
    for axis in ("tensor", "pipeline"):
        product *= settings.train.megatron.get(f"{axis}_model_parallel_size", 1)
    return int(product * settings.train.megatron.get("context_parallel_size", 1))


def data_parallel_size(settings: Settings) -> int:
    """Copies of the model in the train job."""
    return num_ranks(settings) // model_parallel_size(settings)


def parse_wall_time(text: str) -> int | None:
    """Seconds of a wall time in any of Slurm's forms; None if it means no limit.

    minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
    days-hours:minutes:seconds. ValueError for anything else.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a wall time")
    days = match["days"]
    parts = [int(part) for part in (match["a"], match["b"], match["c"]) if part is not None]
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds or None
    if len(parts) == 3:
        return (parts[0] * 60 + parts[1]) * 60 + parts[2] or None
    minutes, seconds = [*parts, 0][:2]
    return minutes * 60 + seconds or None


def parse_instant(text: str) -> float:
    """Seconds since the epoch of an ISO time, local unless it says otherwise. ValueError."""
    return datetime.fromisoformat(text).timestamp()


def shaping_settings(settings: Settings) -> dict[str, Any]:
    """The settings that shape numbers, free of what belongs to a machine or a directory.

    Two runs with equal ones make equal numbers from equal inputs. Files are left out: the
    model, the data and the user's code have digests of their own. `num_rollout` is left
    out so that a run may be extended.
    """
    rollout = settings.rollout.model_dump(exclude=_NOT_SHAPING_ROLLOUT)
    rollout["sglang"] = _without_folders(rollout["sglang"])
    train = settings.train.model_dump(exclude=_NOT_SHAPING_TRAIN)
    train["megatron"] = _without_folders(train["megatron"])
    model = settings.init_model
    return {
        "seed": settings.seed,
        "deterministic": settings.deterministic,
        "lag": settings.chain.lag,
        "init_model": None if model is None else model.model_dump(),
        "rollout": rollout,
        "train": {**train, "num_ranks": num_ranks(settings)},
    }


def settings_digest(settings: Settings) -> str:
    """Digest of `shaping_settings`."""
    return digest_value(shaping_settings(settings))


def _options(section: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = section.model_dump(exclude={"signal_s", "fallback", "time_max"})
    return {key: value for key, value in dumped.items() if value is not None}


def _without_folders(value: Any) -> Any:
    """`value` with each absolute path in it cut down to its last name."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if isinstance(value, str) and value.startswith("/"):
        return value.rstrip("/").rsplit("/", 1)[-1]
    return value
