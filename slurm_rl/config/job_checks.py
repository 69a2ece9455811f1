"""Rules about what is asked of Slurm. Pure; whether a site accepts it is not known here.

Owns the list of sbatch's option names, for finding slips of the pen, and of those that
we write ourselves. An option that is not in the list passes through: sites add their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from slurm_rl.config.derive import (
    AUTO,
    gpu_count,
    parse_wall_time,
    slurm_sections,
    stage_signal_s,
    stage_slurm,
    stage_time_s,
)
from slurm_rl.config.pools import job_kinds, largest_array
from slurm_rl.config.problems import Path, Problem, format_value, nearest
from slurm_rl.config.roles import num_ranks, role
from slurm_rl.config.rollout_schema import Score
from slurm_rl.config.schema import Settings
from slurm_rl.config.sections import Slurm
from slurm_rl.config.stages import (
    eval_kinds,
    is_megatron_stage,
    needs_score,
    section_kinds,
    section_of,
    stage_kinds,
)

#: sbatch's long options (man sbatch, 22.05 to 24.11), less those that are ours.
SBATCH_OPTIONS = frozenset(
    "account acctg_freq batch bb bbf cluster_constraint clusters comment constraint container"
    " container_id contiguous core_spec cores_per_socket cpu_freq cpus_per_gpu cpus_per_task"
    " deadline delay_boot distribution exclude exclusive extra extra_node_info get_user_env gid"
    " gpu_bind gpu_freq gpus gpus_per_node gpus_per_socket gpus_per_task gres gres_flags hint"
    " ignore_pbs kill_on_invalid_dep licenses mail_type mail_user mcs_label mem mem_bind"
    " mem_per_cpu mem_per_gpu mincpus network nice no_kill no_requeue nodefile nodelist nodes"
    " ntasks ntasks_per_core ntasks_per_gpu ntasks_per_node ntasks_per_socket oom_kill_step"
    " overcommit oversubscribe partition power prefer priority profile propagate qos quiet"
    " reboot requeue reservation resv_ports segment sockets_per_node spread_job stepmgr switches"
    " thread_spec threads_per_core time time_min tmp tres_bind tres_per_task uid use_min_nodes"
    " verbose wait_all_nodes wckey x11".split()
)
_OWNED = {
    **dict.fromkeys("job_name output error input open_mode".split(), "names the job and its log"),
    **dict.fromkeys("array dependency begin".split(), "is how the chain is made"),
    "signal": "is ours: set signal_s",
    **dict.fromkeys("export export_file chdir wrap parsable test_only wait".split(), "is ours"),
}
_TIME_FIX = 'write it as "HH:MM:SS" or "D-HH"'
_GPUS = re.compile(r"(?:[A-Za-z][\w.-]*:)?\d+")


def check_jobs(settings: Settings) -> Iterator[Problem]:
    """Options, wall times and job shapes of every stage."""
    sections: list[tuple[Path, Slurm]] = [(("slurm",), settings.slurm)]
    sections += [
        ((*section_of(kind), "slurm"), settings.stage(kind).slurm)
        for kind in section_kinds(settings)
    ]
    sections += [
        (("rollout", "pools", name, "slurm"), pool.slurm)
        for name, pool in settings.rollout.pools.items()
    ]
    problems = [p for at, section in sections for p in _check_options(at, section)]
    yield from problems
    if problems:
        return
    for kind in job_kinds(settings):
        yield from _check_wall_time(settings, kind)
    if settings.chain.pack == "iteration":
        yield from _check_same_shape(settings)
        rule = "cannot be with chain.pack = iteration, where one job runs all stages in turn"
        if settings.rollout.pools:
            yield Problem(("rollout", "pools"), rule, "use pack: stage")
        elif settings.rollout.shards > 1:
            yield Problem(("rollout", "shards"), rule, "use pack: stage", settings.rollout.shards)
    yield from _check_throttle(settings)
    yield from _check_ranks(settings)
    yield from _check_score(settings)
    yield from _check_evals(settings)


def _check_options(at: Path, section: Slurm) -> Iterator[Problem]:
    for name, value in (section.model_extra or {}).items():
        found = _check_extra((*at, name), value)
        if found is not None:
            yield found
    for name in ("time", "time_max", "time_min"):
        value = getattr(section, name)
        is_auto = name == "time" and value == AUTO
        if value is not None and not is_auto and _parses(value) is False:
            yield Problem((*at, name), "is not a wall time", _TIME_FIX, value)
    fallback = section.fallback
    if fallback is not None and not _parses(fallback.after):
        yield Problem((*at, "fallback", "after"), "is not a wall time", _TIME_FIX, fallback.after)
    if fallback is not None and fallback.partition is None and fallback.qos is None:
        rule = "names neither a partition nor a qos"
        yield Problem((*at, "fallback"), rule, "name where to go")
    gpus = section.gpus_per_node
    if isinstance(gpus, str) and not _GPUS.fullmatch(gpus):
        rule = "must be a number, or a type and a number"
        yield Problem((*at, "gpus_per_node"), rule, 'write it as 8 or "a100:4"', gpus)
    elif isinstance(gpus, int) and gpus < 0:
        yield Problem((*at, "gpus_per_node"), "must be at least 0", "raise it", gpus)


def _check_extra(path: Path, value: Any) -> Problem | None:
    """An option that the schema does not name: ours, a slip of the pen, or the site's own."""
    name = str(path[-1])
    if name in _OWNED:
        return Problem(path, _OWNED[name], "take the line out", value)
    if value is not None and not isinstance(value, (str, int, float, bool)):
        return Problem(path, "must be text, a number or true/false", "change it", value)
    if name in SBATCH_OPTIONS:
        return None
    plain = name.strip("-").replace("-", "_")
    if plain in SBATCH_OPTIONS or plain in Slurm.model_fields:
        return Problem(path, "is written with underscores", f"write {plain}", value)
    close = nearest(name, {*SBATCH_OPTIONS, *Slurm.model_fields})
    if close is not None and _is_slip(name, close):
        return Problem(path, "is not an option of sbatch", f"did you mean {close}?", value)
    return None


def _is_slip(name: str, option: str) -> bool:
    """Whether two letters at most were dropped, added, swapped or changed."""
    if abs(len(name) - len(option)) > 2 or len(option) < 4:
        return False
    previous = list(range(len(option) + 1))
    for i, a in enumerate(name, 1):
        row = [i]
        for j, b in enumerate(option, 1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (a != b)))
        previous = row
    return previous[-1] <= 2


def _parses(text: str) -> bool:
    try:
        parse_wall_time(text)
    except ValueError:
        return False
    return True


def _check_wall_time(settings: Settings, kind: str) -> Iterator[Problem]:
    options = stage_slurm(settings, kind)
    path = _owner_of(settings, kind, "time")
    time, signal_s = options.get("time"), stage_signal_s(settings, kind)
    seconds = stage_time_s(settings, kind)
    if seconds is None:
        if time == AUTO:
            fix = "set slurm.time_max to the partition's limit (`slurm-rl doctor` prints it)"
            yield Problem(path, "has no time_max to stay within", fix, time)
        return
    if seconds <= signal_s:
        rule = f"is not longer than {kind}'s signal_s = {signal_s} s"
        yield Problem(path, rule, "raise time or lower signal_s", time)
    shortest = options.get("time_min")
    shortest_s = None if shortest is None else parse_wall_time(shortest)
    if shortest_s is not None and shortest_s > seconds:
        rule = f"is longer than time = {time}"
        yield Problem(_owner_of(settings, kind, "time_min"), rule, "lower it", shortest)


def _owner_of(settings: Settings, kind: str, name: str) -> Path:
    """Where a stage's option was set: in its own section, one that it stands in for, or at the
    top."""
    sections = slurm_sections(settings, kind)
    if kind == "tick":
        return (*sections[0][0], name)
    owners = (at for at, section in sections if getattr(section, name) is not None)
    return (*next(owners, sections[-1][0]), name)


def _check_throttle(settings: Settings) -> Iterator[Problem]:
    throttle, largest = settings.rollout.array_throttle, largest_array(settings)
    path: Path = ("rollout", "array_throttle")
    if throttle is None:
        return
    if settings.launcher == "local":
        rule = "has no effect with launcher: local, where there are no arrays"
        yield Problem(path, rule, "take it out", throttle)
    elif throttle >= largest:
        rule = f"has no effect on arrays of {largest} shard(s)"
        yield Problem(path, rule, "lower it, or take it out", throttle)


def _check_score(settings: Settings) -> Iterator[Problem]:
    """What the score stage may set, where there is none."""
    if needs_score(settings):
        return
    for name in sorted(settings.score.model_fields_set - {"enabled", "server"}):
        value = getattr(settings.score, name)
        if value != getattr(Score(), name):
            rule = "has no effect: there is no score stage"
            fix = "set score.enabled: true, or on_down: defer for a service"
            yield Problem(("score", name), rule, fix)


def _check_evals(settings: Settings) -> Iterator[Problem]:
    for name, rule in settings.eval.items():
        if rule.interval is not None and rule.interval > settings.num_rollout:
            yield Problem(
                ("eval", name, "interval"),
                f"is more than num_rollout = {settings.num_rollout}: no version is a multiple",
                "lower it, or take it out: the last version is evaluated anyway",
                rule.interval,
            )


def _check_same_shape(settings: Settings) -> Iterator[Problem]:
    """With `pack: iteration` one job runs all stages: they must ask for the same."""
    kinds = [kind for kind in stage_kinds(settings) if kind != "tick"]
    kinds = [kind for kind in kinds if kind not in eval_kinds(settings)]  # they have their own jobs
    shapes = {kind: stage_slurm(settings, kind) for kind in kinds}
    first = kinds[0]
    for kind in kinds[1:]:
        for name in sorted({*shapes[first], *shapes[kind]}):
            ours, theirs = shapes[kind].get(name), shapes[first].get(name)
            if ours != theirs:
                rule = (
                    f"is {format_value(ours)} for {kind} and {format_value(theirs)} for {first},"
                    " but chain.pack: iteration runs both in one job"
                )
                fix = f"set slurm.{name} at the top for all, or chain.pack: stage"
                yield Problem((kind, "slurm", name), rule, fix)


#: Options that ask for tasks or GPUs in another way than nodes × gpus_per_node.
_SIZES = ("gres", "gpus", "gpus_per_task", "gpus_per_socket", "ntasks", "ntasks_per_node")


def _asks_for_more(name: str, value: Any) -> bool:
    """Whether an option may mean more than one rank."""
    if value is None or (name == "gres" and "gpu" not in str(value)):
        return False
    return value not in (1, "1")


def _check_ranks(settings: Settings) -> Iterator[Problem]:
    for kind in stage_kinds(settings):
        if is_megatron_stage(settings, kind):
            yield from _check_role_ranks(settings, kind)


def _check_role_ranks(settings: Settings, kind: str) -> Iterator[Problem]:
    options = stage_slurm(settings, kind)
    nodes = options.get("nodes")
    ranks, own = num_ranks(settings, kind), role(settings, kind).num_ranks
    path = (kind, "num_ranks")
    if settings.launcher == "slurm" and own is None:
        unclear = [name for name in _SIZES if _asks_for_more(name, options.get(name))]
        if unclear and not options.get("gpus_per_node"):
            rule = f"is needed: {kind}.slurm.{unclear[0]} does not say how many ranks there are"
            yield Problem(path, rule, "set it, or ask with nodes and gpus_per_node")
    if settings.launcher == "local" or own is None or nodes is None:
        return
    gpus = gpu_count(options.get("gpus_per_node"))
    if gpus and ranks != nodes * gpus:
        rule = f"is not the {nodes} × {gpus} GPUs that the {kind} job asks for"
        yield Problem(path, rule, "take it out, or change nodes or gpus_per_node", ranks)
    elif ranks % nodes:
        yield Problem(path, f"does not spread evenly over {nodes} nodes", "change it", ranks)
