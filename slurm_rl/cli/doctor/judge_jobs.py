"""What the tiny jobs told, a line each. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_rl.config.schema import Settings
from slurm_rl.launch.ping import Round
from slurm_rl.launch.probe_node import PATIENCE_S
from slurm_rl.launch.site_jobs import SiteJobs
from slurm_rl.storage.durable import VISIBLE_S
from slurm_rl.storage.probe import Finding, Level, judge_clock

_OTHER_PLACE = "put run.dir on a file system that all nodes share"
#: Readers poll twice a second: less is not felt.
_FELT_S = 1.0


def judge_jobs(
    settings: Settings, jobs: SiteJobs, *, visible_s: float = VISIBLE_S
) -> list[Finding]:
    """Everything that both jobs told, or why they did not. visible_s: how long readers wait."""
    found = [*_judge_first(settings, jobs)]
    if jobs.first.report is None:
        return found
    report = jobs.first.report
    found += _judge_submission(settings, report["submission"])
    found += [_judge_namespaces(str(report["user_namespaces"]), str(report["sandbox"]))]
    found += [_judge_address(settings, str(report["address"]), str(report["host"]))]
    clock = judge_clock(float(report["clock_off_s"]), 0.0)
    found.append(_say(clock.level, f"clock of {report['host']}", clock.found, clock.fix))
    between = f"between this machine and {report['host']}"
    found += _judge_rounds(jobs.login, between, visible_s)
    found += _judge_second(jobs, visible_s)
    return found


def _judge_first(settings: Settings, jobs: SiteJobs) -> Iterator[Finding]:
    """A job of a tick's shape: one core, and no GPU."""
    name, first = "CPU-only jobs", jobs.first
    fix = "submit_from: login, or tick.slurm.partition (or more of tick.slurm) as the site wants it"
    if settings.submit_from == "login":
        fix = "tick.slurm.partition, for the doctor's own jobs; the run needs no ticks"
    if first.report is not None:
        yield _say("ok", name, f"ran on {first.report['host']} (one core, no GPU): ticks can be")
    elif first.refused:
        level: Level = "warn" if settings.submit_from == "login" else "bad"
        yield _say(level, name, f"sbatch: {first.problem}", fix)
    else:
        yield _say("warn", name, first.problem, f"--patience, or {fix}")
    if first.report is None:
        yield _say("warn", "visibility", "unknown: no job ran on another node")


def _judge_submission(settings: Settings, said: dict[str, object]) -> Iterator[Finding]:
    name = "sbatch from a node"
    if said["ok"]:
        yield _say("ok", name, "a job was submitted there and cancelled: ticks can go on")
        if settings.submit_from == "login":
            found = "the site would let jobs submit jobs"
            yield _say("ok", name, found, "submit_from: anywhere needs no `watch` and no cron")
    elif said["error"] == "SubmitDeferred":
        yield _say("warn", name, f"a limit: {said['said']}", "max_submit_jobs")
    elif settings.submit_from == "login":
        yield _say("ok", name, "refused, and submit_from: login does not need it")
    else:
        fix = "submit_from: login, and `slurm-rl watch` or cron on the login node"
        yield _say("bad", name, str(said["said"]), fix)


def _judge_namespaces(problem: str, sandbox: str) -> Finding:
    """sandbox: how a model's code would run on the node, outside of any container."""
    code = f"a model's code runs {sandbox}"
    if not problem:
        return _say("ok", "user namespaces", f"allowed: read-only shells can be; {code}")
    found = f"not allowed ({problem}): shells cannot mount read-only; {code}"
    return _say("warn", "user namespaces", found)


def _judge_address(settings: Settings, address: str, host: str) -> Finding:
    """Where ranks of several nodes would look for each other."""
    if settings.network_interface:
        return _say("ok", "address", f"network_interface = {settings.network_interface} decides")
    if address and not address.startswith("127."):
        return _say("ok", "address", f"{host} is {address}")
    found = f"{host} calls itself {address or 'nothing that resolves'}, which no other node reaches"
    fix = "network_interface (ib0, eth0, …) or hostname_suffix, if a stage has several nodes"
    return _say("warn", "address", found, fix)


def _judge_second(jobs: SiteJobs, visible_s: float) -> Iterator[Finding]:
    second = jobs.second
    if second is None or second.report is None:
        problem = "no second job" if second is None else second.problem
        yield _say("warn", "visibility", f"between two nodes unknown: {problem}", "--patience")
        return
    first = jobs.first.report or {}
    between = f"between {first.get('host')} and {second.report['host']}"
    yield from _judge_rounds(jobs.nodes, between, visible_s)


def _judge_rounds(rounds: tuple[Round, ...], where: str, visible_s: float) -> Iterator[Finding]:
    name = "visibility"
    lost = [entry for entry in rounds if entry.total_s is None]
    if not rounds or lost:
        found = f"{where}: a published file was not seen in {PATIENCE_S:.0f} s"
        yield _say("bad", name, found, _OTHER_PLACE)
        return
    slowest_s = max(entry.total_s or 0.0 for entry in rounds)
    late_s = max(entry.latest_s for entry in rounds)
    found = f"{where}: there and back in {slowest_s:.2f} s at most, names, listings and sizes"
    found += f" {late_s:.2f} s apart"
    if slowest_s > visible_s:
        fix = f"export SLURM_RL_VISIBLE_S={2 * slowest_s:.0f} in setup and on the login node"
        yield _say("bad", name, f"{found}: later than readers wait ({visible_s:.0f} s)", fix)
    elif slowest_s > _FELT_S:
        yield _say("warn", name, f"{found}: each stage starts so much later; readers wait for it")
    else:
        yield _say("ok", name, found)


def _say(level: Level, name: str, found: str, fix: str = "") -> Finding:
    return Finding(level, name, found, fix, area="site")
