"""What Slurm's words about itself mean for a run, a line each. Pure.

Rules come from what a real Slurm does; `docs/operations.md` lists the keys that they name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from slurm_rl.chain.graph import build_graph
from slurm_rl.chain.view import MAX_EVALS
from slurm_rl.config.derive import gpu_count, stage_signal_s, stage_slurm, stage_time_s
from slurm_rl.config.pools import job_kinds
from slurm_rl.config.problems import format_path
from slurm_rl.config.schema import Settings
from slurm_rl.config.stages import section_of
from slurm_rl.launch.site import Partition, Qos, Site
from slurm_rl.launch.wall_times import (
    find_too_long,
    format_limit,
    may_lift_limits,
    partitions_of,
)
from slurm_rl.storage.probe import Finding, Level

#: --me, --gpus-per-node and `--signal=B:` with requeue behave as we rely on from there.
_OLDEST = (20, 11)
_NUM_TICKS = 2


def judge_site(settings: Settings, site: Site) -> list[Finding]:
    """Everything that can be said without a job."""
    return [
        *judge_version(site),
        *judge_partitions(settings, site),
        *judge_times(settings, site),
        *judge_gpus(settings, site),
        *judge_preemption(settings, site),
        *judge_waits(settings, site),
        *judge_arrays(settings, site),
        *judge_limits(settings, site),
        *judge_processes(site),
    ]


def judge_version(site: Site) -> Iterator[Finding]:
    version = site.version
    if version is None:
        yield _say("warn", "Slurm", "its version is not told")
    elif version < _OLDEST:
        found = f"{version[0]}.{version[1]:02d} is older than what is tried (20.11)"
        yield _say("warn", "Slurm", found)
    else:
        yield _say("ok", "Slurm", site.word("SLURM_VERSION"))


def judge_partitions(settings: Settings, site: Site) -> Iterator[Finding]:
    """Whether the partitions are there, up, and take jobs of that many nodes."""
    for named, kinds in _kinds_by_partition(settings).items():
        known = {part.name for part in site.partitions}
        for name in [] if not named else named.split(","):
            if name.strip() not in known:
                fix = f"{_key(kinds[0], 'partition')}: one of {', '.join(sorted(known))}"
                yield _say("bad", "partition", f"{name} is not there ({_list(kinds)})", fix)
        parts = partitions_of(named, site.partitions)
        if not named and not parts:
            fix = "set slurm.partition"
            yield _say("bad", "partition", f"there is no default one ({_list(kinds)})", fix)
        for part in parts:
            yield from _judge_partition(settings, site, part, kinds)


def _judge_partition(
    settings: Settings, site: Site, part: Partition, kinds: list[str]
) -> Iterator[Finding]:
    usable = sum(g.num_nodes for g in site.nodes if g.partition == part.name and g.is_usable)
    if part.state != "UP":
        yield _say("warn", "partition", f"{part.name} is {part.state}: jobs wait ({_list(kinds)})")
    elif site.nodes and not usable:
        yield _say("warn", "partition", f"no node of {part.name} is in order now ({_list(kinds)})")
    else:
        found = f"{part.name}: {usable or part.num_nodes} node(s) in order ({_list(kinds)})"
        yield _say("ok", "partition", found)
    for kind in kinds:
        nodes = int(stage_slurm(settings, kind).get("nodes", 1))
        key = _key(kind, "nodes")
        if nodes < part.min_nodes:
            fix = f"{_without_ticks(kind)}{key}: {part.min_nodes}, or another partition"
            found = f"{part.name} takes no job of fewer than {part.min_nodes} nodes ({kind})"
            yield _say("bad", "partition", found, fix)
        if part.max_nodes is not None and nodes > part.max_nodes:
            found = f"{part.name} takes no job of more than {part.max_nodes} nodes ({kind})"
            yield _say("bad", "partition", found, f"lower {key}")
    if part.oversubscribe.upper().startswith("EXCLUSIVE") and "tick" in kinds:
        found = f"{part.name} gives whole nodes only: a tick takes one for seconds"
        yield _say("warn", "partition", found, "tick.slurm.partition, or submit_from: login")


def _without_ticks(kind: str) -> str:
    return "submit_from: login, or " if kind == "tick" else ""


def judge_times(settings: Settings, site: Site) -> Iterator[Finding]:
    """Wall times against what partitions and the quality of service give."""
    named_qos = {str(stage_slurm(settings, kind).get("qos") or "") for kind in job_kinds(settings)}
    problems = find_too_long(settings, site.partitions)
    may_lift = may_lift_limits(named_qos - {""}, site.qos) if site.qos is not None else False
    for problem in problems:
        fate = "sbatch takes it and it pends for ever"
        if site.word("EnforcePartLimits").upper() not in ("NO", ""):
            fate = "sbatch refuses it"
        level: Level = "warn" if may_lift else "bad"
        found = f"{format_path(problem.path)} = {problem.value} {problem.rule}: {fate}"
        yield _say(level, "wall time", found, problem.fix)
    if not problems:
        yield _say("ok", "wall time", _describe_times(settings, site))
    for kind in job_kinds(settings):
        yield from _judge_default_time(settings, site, kind)
        yield from _judge_qos_time(settings, site.qos, kind)


def _describe_times(settings: Settings, site: Site) -> str:
    shown = []
    for named in _kinds_by_partition(settings):
        for part in partitions_of(named, site.partitions):
            limit = part.max_time_s
            shown.append(f"{part.name} {'no limit' if limit is None else format_limit(limit)}")
    return f"within what partitions give ({', '.join(dict.fromkeys(shown)) or 'none known'})"


def _judge_default_time(settings: Settings, site: Site, kind: str) -> Iterator[Finding]:
    """A stage without a wall time gets the partition's default, which may be minutes."""
    if stage_slurm(settings, kind).get("time") is not None:
        return
    parts = partitions_of(stage_slurm(settings, kind).get("partition"), site.partitions)
    for part in parts:
        limit_s = part.default_time_s if part.default_time_s is not None else part.max_time_s
        signal_s = stage_signal_s(settings, kind)
        if limit_s is not None and limit_s <= 2 * signal_s:
            found = f"{kind} has none and gets {part.name}'s {format_limit(limit_s)}, of which the"
            found += f" last {signal_s} s are for stopping"
            yield _say("bad", "wall time", found, f"set {_key(kind, 'time')}")
        elif limit_s is not None:
            found = f"{kind} has none and gets {part.name}'s {format_limit(limit_s)}"
            yield _say("warn", "wall time", found, f"set {_key(kind, 'time')}")


def _judge_qos_time(
    settings: Settings, qos: tuple[Qos, ...] | None, kind: str
) -> Iterator[Finding]:
    name, time_s = stage_slurm(settings, kind).get("qos"), stage_time_s(settings, kind)
    own = next((entry for entry in qos or () if entry.name == name), None)
    if name and qos is not None and own is None:
        known = ", ".join(entry.name for entry in qos)
        yield _say("bad", "qos", f"{name} is not there ({kind})", f"one of {known}")
    if own is not None and own.max_wall_s is not None and (time_s or 0) > own.max_wall_s:
        found = f"{kind} asks for {format_limit(time_s or 0)}, and {name} gives"
        found += f" {format_limit(own.max_wall_s)}"
        yield _say("bad", "wall time", found, f"lower {_key(kind, 'time')}")


def judge_gpus(settings: Settings, site: Site) -> Iterator[Finding]:
    """Whether GPUs can be asked for in this way, and so many on one node."""
    asks = {
        kind: gpu_count(stage_slurm(settings, kind).get("gpus_per_node"))
        for kind in job_kinds(settings)
    }
    select = site.word("SelectType")
    if any(asks.values()):
        if "gpu" not in site.flags("GresTypes"):
            fix = "take gpus_per_node out, or ask what the site calls its GPUs"
            yield _say("bad", "GPUs", "GresTypes names none here", fix)
        elif "cons_tres" not in select and settings.gpu_request != "gres":
            found = f"{select} does not know --gpus-per-node"
            yield _say("bad", "GPUs", found, "gpu_request: gres")
        for kind, wanted in asks.items():
            yield from _judge_gpu_nodes(settings, site, kind, wanted or 0)
    if "linear" in select:
        found = f"{select} gives whole nodes only: a tick takes one for seconds"
        yield _say("warn", "nodes", found, "tick.slurm.partition, or submit_from: login")


def _judge_gpu_nodes(settings: Settings, site: Site, kind: str, wanted: int) -> Iterator[Finding]:
    parts = partitions_of(stage_slurm(settings, kind).get("partition"), site.partitions)
    names = {part.name for part in parts}
    groups = [group for group in site.nodes if group.partition in names]
    most = max((group.gpus for group in groups), default=0)
    if wanted and groups and most < wanted:
        found = f"{kind} asks for {wanted} on a node, and nodes of {_list(sorted(names))} have"
        yield _say("bad", "GPUs", f"{found} {most}", f"lower {_key(kind, 'gpus_per_node')}")


def judge_preemption(settings: Settings, site: Site) -> Iterator[Finding]:
    """What becomes of a job that has to make room, and who is told."""
    is_on = site.word("PreemptType") not in ("", "preempt/none")
    if not is_on:
        yield _say("ok", "preemption", "none (PreemptType)")
    parts = {
        part.name: part
        for named in _kinds_by_partition(settings)
        for part in partitions_of(named, site.partitions)
    }
    for part in parts.values() if is_on else ():
        yield _judge_mode(site, part)
    if is_on and "preempt_send_user_signal" in site.flags("SlurmctldParameters"):
        found = "the job itself is told (preempt_send_user_signal), and its program by it"
        yield _say("ok", "preemption signal", found)
    elif is_on:
        found = "SIGTERM reaches the program alone, which tells its job: default, and enough"
        yield _say("ok", "preemption signal", found)
    word = site.word("JobRequeue") or "not told"
    yield _say("ok", "requeue", f"JobRequeue={word}; each job asks for it itself (--requeue)")


def _judge_mode(site: Site, part: Partition) -> Finding:
    modes = part.modes or tuple(mode.upper() for mode in site.flags("PreemptMode"))
    mode = next((m for m in ("REQUEUE", "CANCEL", "SUSPEND") if m in modes), "OFF")
    name = f"preemption in {part.name}"
    if mode == "REQUEUE":
        found = f"jobs go back to the queue, {part.grace_s} s after they are told (GraceTime)"
        if part.grace_s == 0:
            return _say("ok", name, f"{found}: what a rollout has finished is on disk by then")
        return _say("ok", name, found)
    if mode == "CANCEL":
        found = "jobs are cancelled; a tick, or `watch`, submits the next one"
        return _say("warn", name, found, "another partition or qos, or chain.tick_s: 120")
    if mode == "SUSPEND":
        found = "jobs are suspended with their memory: claims fall silent and are taken over"
        return _say("warn", name, found, "another partition or qos")
    return _say("ok", name, "its jobs are not preempted")


def judge_waits(settings: Settings, site: Site) -> Iterator[Finding]:
    """Times of Slurm's own that a run meets."""
    kill_s, age_s = site.seconds("KillWait"), site.seconds("MinJobAge")
    if kill_s is not None:
        found = f"{kill_s} s from SIGTERM to SIGKILL at scancel and at the time limit, of which a"
        yield _say("ok", "KillWait", f"{found} job is warned by signal_s before")
    if age_s is not None and age_s < settings.chain.submit_deadline_s:
        found = f"ended jobs are shown for {age_s} s only: how they ended is not always known"
        yield _say("warn", "MinJobAge", found, "nothing need be set: commits decide")
    elif age_s is not None:
        yield _say("ok", "MinJobAge", f"ended jobs are shown for {age_s} s")
    expire = [part.partition("=")[2] for part in site.flags("AuthInfo") if "cred_expire" in part]
    wait_s = expire[0] if expire and expire[0].isdigit() else "120"
    yield _say("ok", "requeue wait", f"a job that is put back waits {wait_s} s (cred_expire)")


def judge_arrays(settings: Settings, site: Site) -> Iterator[Finding]:
    size, shards = site.number("MaxArraySize"), settings.rollout.shards
    if size is None:
        return
    # The highest index is one less than MaxArraySize.
    if shards > 1 and shards > size:
        fix = f"rollout.shards: {max(size, 1)} at most"
        yield _say("bad", "arrays", f"MaxArraySize={size}, and rollout.shards = {shards}", fix)
    elif settings.max_array_tasks > size:
        found = f"MaxArraySize={size} is less than max_array_tasks = {settings.max_array_tasks}"
        yield _say("ok", "arrays", f"{found}; enough for {shards} shard(s)")
    else:
        yield _say("ok", "arrays", f"MaxArraySize={size}, for {shards} shard(s)")


def count_queued(settings: Settings) -> int:
    """Jobs and array tasks that a run keeps in the queue at most."""
    graph = build_graph(settings)
    stages = itertools.islice(graph.stages_from(0), settings.chain.window + 1)
    # The setup stages of iteration 0 come once; the fullest window counts.
    tasks = [max(graph.node(kind).num_shards for kind in links[0].kinds) for _, links in stages]
    ticks = _NUM_TICKS if settings.submit_from == "anywhere" else 0
    evals = MAX_EVALS if settings.eval else 0
    return sum(sorted(tasks)[-settings.chain.window :]) + ticks + evals


def judge_limits(settings: Settings, site: Site) -> Iterator[Finding]:
    """How many jobs may be queued, against what the chain keeps there."""
    needs = count_queued(settings)
    names = {
        str(stage_slurm(settings, kind).get("qos") or "normal") for kind in job_kinds(settings)
    }
    told = [entry.max_submit for entry in site.qos or () if entry.name in names]
    told += [limit.max_submit for limit in site.limits]
    limits = [limit for limit in (*told, site.number("MaxJobCount")) if limit is not None]
    if not limits:
        yield _say("ok", "submit limits", f"none told; the run queues {needs} job(s) at most")
        return
    limit = min(limits)
    allowed = settings.max_submit_jobs
    if needs <= limit:
        found = f"{limit} job(s) may be queued, the run needs {needs}"
        yield _say("ok", "submit limits", found)
    elif allowed is not None and allowed <= limit:
        yield _say("ok", "submit limits", f"{limit}, and max_submit_jobs = {allowed} keeps to it")
    else:
        found = f"{limit} job(s) may be queued, the run wants {needs}: it defers and goes on"
        fix = f"max_submit_jobs: {limit}, or lower chain.window or rollout.shards"
        yield _say("warn", "submit limits", found, fix)
    if site.qos is None:
        yield _say("ok", "accounting", "off or silent: nothing here needs it")


def judge_processes(site: Site) -> Iterator[Finding]:
    """Whether Slurm can end everything that a job has started."""
    kind = site.word("ProctrackType")
    if "cgroup" in kind:
        yield _say("ok", "processes", f"{kind}: all of a job's processes end with it")
    else:
        found = f"{kind or 'ProctrackType is not told'}: daemons of a job may outlive it"
        fix = "stages end their own servers; look for leftovers after a kill"
        yield _say("warn", "processes", found, fix)
    plugins = site.word("JobSubmitPlugins")
    if plugins:
        yield _say("ok", "job_submit", f"{plugins}: the site may change or refuse jobs")


def _kinds_by_partition(settings: Settings) -> dict[str, list[str]]:
    """What each stage names as its partition -> the stages; empty for the default one."""
    found: dict[str, list[str]] = {}
    for kind in job_kinds(settings):
        if kind == "tick" and settings.submit_from == "login":
            continue
        found.setdefault(str(stage_slurm(settings, kind).get("partition") or ""), []).append(kind)
    return found


def _key(kind: str, option: str) -> str:
    """The setting by which jobs of a kind ask for an option."""
    return ".".join((*section_of(kind), "slurm", option))


def _list(names: list[str]) -> str:
    return ", ".join(names)


def _say(level: Level, name: str, found: str, fix: str = "") -> Finding:
    return Finding(level, name, found, fix, area="site")
