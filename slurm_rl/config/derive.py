"""What follows from the settings: each derived value has one function here, and no copy.

Pure: reads no files and no environment. A stage's own `slurm`, `env` and `container` meet
the top-level ones here, so that `Settings` says the same after a trip through JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal

from slurm_rl.config.rollout_schema import DataSet, Overrides
from slurm_rl.config.schema import POOL_PREFIX, Settings
from slurm_rl.config.sections import Container, Fallback, Slurm
from slurm_rl.config.stages import section_kinds, section_of, stands_in

#: Begins the name of a data set that is made, not read: `reasoning_gym:chain_sum`.
PROCEDURAL = "reasoning_gym:"

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

#: Options that size a job of many nodes or GPUs. A score stage without a server needs none of it;
#: how long it works, with how many cores and how much memory, is as for the others.
_LARGE = (SHAPE_OPTIONS - frozenset("cpus_per_task mem mem_per_cpu time time_min".split())) | {
    "gpu_bind",
    "gpu_freq",
}

_SCORE_SHAPE: dict[str, Any] = {"nodes": 1, "ntasks_per_node": 1}

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")


def _is_light(settings: Settings, kind: str) -> bool:
    """Whether it is a score stage with a job of its own, in which nothing needs a GPU."""
    return kind == "score" and settings.score.server is None and settings.chain.pack == "stage"


def slurm_sections(settings: Settings, kind: str) -> list[tuple[tuple[str, ...], Slurm]]:
    """Where a stage's job options come from, with their places: the first to set one wins."""
    if kind.startswith(POOL_PREFIX):
        own = settings.rollout.pools[kind.removeprefix(POOL_PREFIX)].slurm
    else:
        own = settings.stage(kind).slurm
    sections = [((*section_of(kind), "slurm"), own)]
    other = stands_in(settings, kind)
    if other is not None and not _is_light(settings, kind):
        sections.append(((other, "slurm"), settings.stage(other).slurm))
    return [*sections, (("slurm",), settings.slurm)]


def stage_slurm(settings: Settings, kind: str) -> dict[str, Any]:
    """The sbatch options of a stage: its own over the top-level ones, unset ones left out.

    Keys keep their underscores, extra ones and their values are as the user wrote them.
    `signal_s`, `time_max` and `fallback` are ours and not among them. A tick takes the shape of
    no stage. An evaluation asks for what the rollout does; so does a score stage that serves a
    model, while one without asks for no GPU; critic and reference ask for what the train stage does
    (`stands_in`). Where one job runs all stages they ask for the same.
    """
    (_, own), *others = slurm_sections(settings, kind)
    shared: dict[str, Any] = {}
    for _, section in reversed(others):
        shared |= _options(section)
    if kind == "tick":
        shared = {k: v for k, v in shared.items() if k not in SHAPE_OPTIONS} | _TICK_SHAPE
    elif _is_light(settings, kind):
        shared = {k: v for k, v in shared.items() if k not in _LARGE} | _SCORE_SHAPE
    return shared | _options(own)


def stage_signal_s(settings: Settings, kind: str) -> int:
    """Seconds before its time limit at which a stage's job is told to stop."""
    if kind == "tick":  # it has nothing to save, and its job is short
        return settings.tick.slurm.signal_s or DEFAULT_TICK_SIGNAL_S
    return asked_signal_s(settings, kind) or DEFAULT_SIGNAL_S


def asked_signal_s(settings: Settings, kind: str) -> int | None:
    """The same, if the settings say so."""
    found = (section.signal_s for _, section in slurm_sections(settings, kind))
    return next(filter(None, found), None)


def stage_time_s(settings: Settings, kind: str) -> int | None:
    """Wall time of a stage's job in seconds; None if it has no limit or the site's default."""
    time = stage_slurm(settings, kind).get("time")
    if time == AUTO:
        longest = (section.time_max for _, section in slurm_sections(settings, kind))
        time = next(filter(None, longest), None)
    return None if time is None else parse_wall_time(time)


def stage_fallback(settings: Settings, kind: str) -> Fallback | None:
    """Where a stage goes that waits too long: its own, or the top-level one."""
    found = (section.fallback for _, section in slurm_sections(settings, kind))
    return next(filter(None, found), None)


def stage_env(settings: Settings, kind: str) -> dict[str, str]:
    """Environment of a stage's program: its own over the top-level one."""
    other = stands_in(settings, kind)
    between = {} if other is None else settings.stage(other).env
    merged = {**settings.env, **between, **settings.stage(kind).env}
    return {name: str(value) for name, value in merged.items()}


def stage_container(settings: Settings, kind: str) -> Container:
    """The container of a stage: its own, as a whole, or the top-level one."""
    own, other = settings.stage(kind).container, stands_in(settings, kind)
    if own is None and settings.stage(kind).python is None and other is not None:
        own = settings.stage(other).container
    return settings.container if own is None else own


def containers_of(settings: Settings) -> Iterator[tuple[tuple[str, ...], Container]]:
    """Each container that the settings hold, with its place: `("train", "container")`."""
    yield ("container",), settings.container
    for kind in section_kinds(settings):
        own = settings.stage(kind).container
        if own is not None:
            yield (*section_of(kind), "container"), own


def stage_python(settings: Settings, kind: str) -> str | None:
    """Interpreter of a stage's program; None: the one that the supervisor runs in."""
    container = stage_container(settings, kind)
    if container.runtime != "none":
        return container.python
    other = stands_in(settings, kind)
    between = None if other is None else settings.stage(other).python
    return settings.stage(kind).python or between or settings.host_python


def gpu_count(request: int | str | None) -> int | None:
    """GPUs on a node from `8`, `"8"` or `"a100:4"`; None if unset, ValueError if neither."""
    if request is None or isinstance(request, int):
        return request
    return int(request.rsplit(":", 1)[-1])


def gpu_type(request: int | str | None) -> str:
    """The type of GPU in `"a100:4"`; empty if any will do."""
    return request.rpartition(":")[0] if isinstance(request, str) else ""


def num_gpus(settings: Settings, kind: str) -> int:
    """GPUs of a stage's whole job: nodes × gpus_per_node, or `gpus`."""
    options = stage_slurm(settings, kind)
    whole = gpu_count(options.get("gpus"))
    return whole or int(options.get("nodes", 1)) * (gpu_count(options.get("gpus_per_node")) or 0)


def admission(settings: Settings) -> Literal["cursor", "arrival"]:
    """Which finished groups fill a batch: those that come first in the data, or in time."""
    if settings.rollout.admission is not None:
        return settings.rollout.admission
    return "cursor" if settings.deterministic else "arrival"


def data_sets(settings: Settings) -> list[DataSet]:
    """The data sets of the rollout; a single one is called `data`."""
    data = settings.rollout.prompt_data
    if isinstance(data, str):
        return [DataSet(name="data", path=data, options=settings.rollout.data_options)]
    return list(data)


def data_overrides(settings: Settings) -> dict[str, Overrides]:
    """Data set -> what it sets for itself."""
    return {data_set.name: data_set for data_set in data_sets(settings)}


def is_graded_later(settings: Settings) -> bool:
    """Whether the rollout grades nothing, since the score stage does."""
    return settings.score.enabled or settings.score.server is not None


def model_folders(settings: Settings) -> dict[tuple[str, ...], str]:
    """Model directories that the settings name, by their place: the policy's first."""
    others = ("critic", "reference", "teacher")
    sections = {kind: getattr(settings, kind) for kind in others}
    named: dict[tuple[str, ...], str | None] = {("hf_checkpoint",): settings.hf_checkpoint}
    for kind, section in sections.items():
        if section is not None:
            named[(kind, "hf_checkpoint")] = section.hf_checkpoint
    return {path: folder for path, folder in named.items() if folder is not None}


def data_paths(settings: Settings) -> list[str]:
    """Files and folders that the rollout and the evaluations read prompts from."""
    named = [data_set.path for data_set in data_sets(settings)]
    named += [evaluation.prompt_data for evaluation in settings.eval.values()]
    return [path.partition("@[")[0] for path in named if not path.startswith(PROCEDURAL)]


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


def _options(section: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = section.model_dump(exclude={"signal_s", "fallback", "time_max"})
    return {key: value for key, value in dumped.items() if value is not None}
