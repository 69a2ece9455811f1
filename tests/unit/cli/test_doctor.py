"""What the doctor makes of what it was told: tables of sites, jobs, quotas and purge policies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.chain.scheduler import JobState, QueuedJob
from slurm_rl.cli.doctor.examine import Report
from slurm_rl.cli.doctor.judge_jobs import judge_jobs
from slurm_rl.cli.doctor.judge_run import expected_s, judge_purge, judge_quota, kept_iterations
from slurm_rl.cli.doctor.judge_site import count_queued, judge_site
from slurm_rl.config.schema import Settings
from slurm_rl.errors import SchedulerError, SchedulerUnavailable, UserError
from slurm_rl.launch.ping import Round, Sighting
from slurm_rl.launch.quota import Quota, parse_quota
from slurm_rl.launch.site import (
    Limits,
    NodeGroup,
    Partition,
    Qos,
    Site,
    parse_config,
    parse_partitions,
)
from slurm_rl.launch.site_jobs import JobAnswer, SiteJobs, await_report
from slurm_rl.launch.stage_check import fold_ranks, shorten
from slurm_rl.storage.probe import Finding

GOLDEN = Path(__file__).parents[2] / "golden"
DAY_S = 86400


def make_settings(**changes: Any) -> Settings:
    """A small configuration; `section__key=value` changes a value."""
    value: dict[str, Any] = {
        "run": {"name": "demo", "dir": "/runs"},
        "init_model": {"characters": "ab", "config": {"model_type": "qwen3"}},
        "num_rollout": 20,
        "slurm": {"time": "01:00:00"},
        "rollout": {"prompt_data": "/d", "rollout_batch_size": 64, "rm_type": "exact_match"},
        "train": {"global_batch_size": 8, "megatron": {"lr": 1e-6}},
    }
    for name, change in changes.items():
        *sections, last = name.split("__")
        target = value
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = change
    return Settings.model_validate(value)


def golden_site(version: str, **changes: Any) -> Site:
    config = parse_config((GOLDEN / f"scontrol-config-{version}.txt").read_text())
    parts = parse_partitions((GOLDEN / f"scontrol-partitions-{version}.txt").read_text())
    return replace(Site(config, parts), **changes)


def with_config(site: Site, **changes: str) -> Site:
    return replace(site, config={**site.config, **{k.lower(): v for k, v in changes.items()}})


def troubles(found: list[Finding]) -> dict[str, str]:
    """Name -> level of all that is not well."""
    return {finding.name: finding.level for finding in found if finding.level != "ok"}


def line_of(found: list[Finding], name: str) -> str:
    return "\n".join(finding.line for finding in found if finding.name == name)


REAL = golden_site("22.05", nodes=(NodeGroup("low", "idle", 2, 4, 0),))


# -- the site ---------------------------------------------------------------------------------


def test_the_real_site_has_nothing_bad() -> None:
    found = judge_site(make_settings(), REAL)
    assert troubles(found) == {"processes": "warn"}
    assert "5 s after they are told" in line_of(found, "preemption in low")


@pytest.mark.parametrize(
    ("changes", "name", "level", "word"),
    [
        ({"slurm__partition": "nowhere"}, "partition", "bad", "high, low"),
        ({"slurm__time": "1-00:00:01"}, "wall time", "bad", "pends for ever"),
        ({"train__slurm": {"gpus_per_node": 2}}, "GPUs", "bad", "have 0"),
        ({"rollout__shards": 64, "chain__window": 20, "max_array_tasks": 40}, "", "", ""),
    ],
)
def test_settings_against_the_real_site(
    changes: dict[str, Any], name: str, level: str, word: str
) -> None:
    found = judge_site(make_settings(**changes), REAL)
    if name:
        assert troubles(found)[name] == level
        assert word in line_of(found, name)
    else:
        assert troubles(found) == {"processes": "warn"}


@pytest.mark.parametrize(
    ("site", "name", "level", "word"),
    [
        (with_config(REAL, PreemptType="preempt/none"), "preemption", "", "none"),
        (with_config(REAL, SLURM_VERSION="19.05.2"), "Slurm", "warn", "older"),
        (with_config(REAL, SLURM_VERSION="(null)"), "Slurm", "warn", "not told"),
        (with_config(REAL, MinJobAge="2 sec"), "MinJobAge", "warn", "2 s only"),
        (with_config(REAL, SelectType="select/linear"), "nodes", "warn", "whole nodes"),
        (with_config(REAL, ProctrackType="proctrack/cgroup"), "processes", "", "all of a job"),
        (with_config(REAL, MaxArraySize="0"), "arrays", "bad", "MaxArraySize=0"),
        (with_config(REAL, MaxJobCount="3"), "submit limits", "warn", "max_submit_jobs: 3"),
        (replace(REAL, limits=(Limits(4, "abc"),)), "submit limits", "warn", "max_submit_jobs: 4"),
        (replace(REAL, qos=(Qos("normal", (), 2),)), "submit limits", "warn", "max_submit_jobs: 2"),
        (replace(REAL, nodes=(NodeGroup("low", "down*", 2, 4, 0),)), "partition", "warn", "no node"),
        (replace(REAL, partitions=(Partition("low", is_default=True, state="DOWN"),)),
         "partition", "warn", "low is DOWN"),
        (replace(REAL, partitions=(Partition("low", is_default=True, min_nodes=2),)),
         "partition", "bad", "submit_from: login"),
        (replace(REAL, partitions=(Partition("low"),)), "partition", "bad", "no default one"),
        (replace(REAL, partitions=(Partition("low", is_default=True, oversubscribe="EXCLUSIVE"),)),
         "partition", "warn", "whole nodes"),
        (replace(REAL, partitions=(Partition("low", is_default=True, modes=("CANCEL",)),)),
         "preemption in low", "warn", "cancelled"),
        (replace(REAL, partitions=(Partition("low", is_default=True, modes=("GANG", "SUSPEND")),)),
         "preemption in low", "warn", "suspended"),
        (with_config(REAL, SlurmctldParameters="a,preempt_send_user_signal"),
         "preemption signal", "", "the job itself is told"),
        (REAL, "preemption signal", "", "the program alone"),
        (REAL, "requeue wait", "", "waits 5 s"),
        (with_config(REAL, AuthInfo="(null)"), "requeue wait", "", "waits 120 s"),
    ],
)  # fmt: skip
def test_what_a_site_means(site: Site, name: str, level: str, word: str) -> None:
    found = judge_site(make_settings(rollout__shards=2), site)
    assert troubles(found).get(name, "") == level, line_of(found, name)
    assert word in line_of(found, name)


def test_an_older_site_where_much_is_different() -> None:
    site = golden_site("20.11", nodes=(NodeGroup("gpu", "mixed", 32, 64, 4),))
    settings = make_settings(
        slurm__time="3-00", train__slurm={"gpus_per_node": 4}, tick={"slurm": {"partition": "long"}}
    )
    found = judge_site(settings, site)
    assert "sbatch refuses it" in line_of(found, "wall time")
    assert "gpu_request: gres" in line_of(found, "GPUs")
    assert "long takes no job of fewer than 2 nodes" in line_of(found, "partition")
    assert "suspended" in line_of(found, "preemption in gpu")
    assert "lua" in line_of(found, "job_submit")
    gres = judge_site(make_settings(gpu_request="gres", train__slurm={"gpus_per_node": 4}), site)
    assert "GPUs" not in troubles(gres)


def test_where_no_ticks_are_their_partition_does_not_matter() -> None:
    site = replace(REAL, partitions=(*REAL.partitions, Partition("whole", min_nodes=4)))
    tick = {"slurm": {"partition": "whole"}}
    assert troubles(judge_site(make_settings(tick=tick), site))["partition"] == "bad"
    login = make_settings(tick=tick, submit_from="login")
    assert "partition" not in troubles(judge_site(login, site))


def test_a_stage_without_a_wall_time_is_told_what_it_gets() -> None:
    found = judge_site(make_settings(slurm={}), REAL)
    assert troubles(found)["wall time"] == "warn"
    assert "gets low's 00:10:00" in line_of(found, "wall time")
    minutes = replace(REAL, partitions=(Partition("low", is_default=True, default_time_s=60),))
    assert troubles(judge_site(make_settings(slurm={}), minutes))["wall time"] == "bad"


def test_a_quality_of_service_that_is_not_there_or_gives_less() -> None:
    site = replace(REAL, qos=(Qos("short", (), None, 600), Qos("normal")))
    missing = judge_site(make_settings(slurm__qos="fast"), site)
    assert troubles(missing)["qos"] == "bad" and "short, normal" in line_of(missing, "qos")
    short = judge_site(make_settings(slurm__qos="short"), site)
    assert troubles(short)["wall time"] == "bad"


def test_shards_in_pools_are_as_many_jobs_as_in_one_array() -> None:
    """The pools of a stage take one place in the window."""
    pools = {"fixed": {"shards": 2}, "spot": {"shards": 6}}
    for window in (1, 2, 3, 5):
        settings = make_settings(chain__window=window, rollout__pools=pools)
        plain = make_settings(chain__window=window, rollout__shards=8)
        assert count_queued(settings) == count_queued(plain)


@given(
    window=st.integers(1, 6),
    shards=st.integers(1, 16),
    lag=st.sampled_from([0, 1]),
    limit=st.integers(1, 120),
)
def test_the_submit_limit_warns_exactly_when_the_window_does_not_fit(
    window: int, shards: int, lag: int, limit: int
) -> None:
    settings = make_settings(chain__window=window, rollout__shards=shards, chain__lag=lag)
    needs = count_queued(settings)
    assert 2 + window <= needs <= 2 + window * shards
    found = judge_site(settings, with_config(REAL, MaxJobCount=str(limit)))
    assert ("submit limits" in troubles(found)) is (needs > limit)
    kept = settings.model_copy(update={"max_submit_jobs": limit})
    assert "submit limits" not in troubles(
        judge_site(kept, with_config(REAL, MaxJobCount=str(limit)))
    )


@pytest.mark.parametrize("version", ["20.11", "22.05", "24.11"])
def test_every_trouble_is_one_line_and_names_what_to_set(version: str) -> None:
    settings = make_settings(slurm__time="300-00", train__slurm={"gpus_per_node": 9, "nodes": 999})
    site = golden_site(version, nodes=(NodeGroup("gpu", "down", 1, 1, 1),), limits=(Limits(1),))
    for finding in judge_site(settings, site):
        assert "\n" not in finding.line
        assert finding.level != "bad" or finding.fix, finding.line


# -- the jobs ---------------------------------------------------------------------------------

QUICK = Round(0.02, Sighting(0, 0, 0), Sighting(0, 0, 0))
REPORT: dict[str, Any] = {
    "host": "node1",
    "clock_off_s": 0.0,
    "user_namespaces": "",
    "sandbox": "isolated: no network",
    "address": "10.0.0.1",
    "submission": {"ok": True, "seen": True},
}
GOOD = SiteJobs(JobAnswer(REPORT), JobAnswer({**REPORT, "host": "node2"}), (QUICK,), (QUICK,))


def first(**changes: Any) -> SiteJobs:
    return replace(GOOD, first=JobAnswer({**REPORT, **changes}))


def test_good_jobs_are_good() -> None:
    found = judge_jobs(make_settings(), GOOD, visible_s=45.0)
    assert troubles(found) == {} and len(found) == 7


@pytest.mark.parametrize(
    ("jobs", "settings", "expected"),
    [
        (SiteJobs(JobAnswer(problem="no", refused=True)), {},
         {"CPU-only jobs": "bad", "visibility": "warn"}),
        (SiteJobs(JobAnswer(problem="no", refused=True)), {"submit_from": "login"},
         {"CPU-only jobs": "warn", "visibility": "warn"}),
        (SiteJobs(JobAnswer(problem="it did not start")), {},
         {"CPU-only jobs": "warn", "visibility": "warn"}),
        (first(submission={"ok": False, "error": "SubmitRefused", "said": "denied"}), {},
         {"sbatch from a node": "bad"}),
        (first(submission={"ok": False, "error": "SubmitRefused", "said": "denied"}),
         {"submit_from": "login"}, {}),
        (first(submission={"ok": False, "error": "SubmitDeferred", "said": "limit"}), {},
         {"sbatch from a node": "warn"}),
        (first(user_namespaces="unshare: denied"), {}, {"user namespaces": "warn"}),
        (first(address="127.0.1.1"), {}, {"address": "warn"}),
        (first(address="127.0.1.1"), {"network_interface": "ib0"}, {}),
        (first(clock_off_s=-700.0), {}, {"clock of node1": "warn"}),
        (replace(GOOD, login=(QUICK, Round(None))), {}, {"visibility": "bad"}),
        (replace(GOOD, login=()), {}, {"visibility": "bad"}),
        (replace(GOOD, nodes=(Round(3.0, Sighting(0, 0, 2.5), Sighting(0, 0, 0)),)), {},
         {"visibility": "warn"}),
        (replace(GOOD, nodes=(Round(50.0, Sighting(0, 0, 0), Sighting(0, 0, 0)),)), {},
         {"visibility": "bad"}),
        (replace(GOOD, second=JobAnswer(problem="pends (Resources)")), {}, {"visibility": "warn"}),
    ],
)  # fmt: skip
def test_what_the_jobs_told(
    jobs: SiteJobs, settings: dict[str, Any], expected: dict[str, str]
) -> None:
    found = judge_jobs(make_settings(**settings), jobs, visible_s=45.0)
    assert troubles(found) == expected
    assert all(f.fix for f in found if f.level == "bad")


def queued(state: JobState, reason: str = "") -> QueuedJob:
    return QueuedJob("7", "demo.doctor.x", state, reason)


def test_a_job_that_pends_too_long_is_told_with_slurms_reason(tmp_path: Path) -> None:
    answer = await_report(
        lambda: None,
        lambda: queued(JobState.PENDING, "QOSMinGRES"),
        patience_s=0.1,
        log=tmp_path / "log",
    )
    assert answer.report is None and "QOSMinGRES" in answer.problem


def test_a_job_that_runs_for_ever_is_told_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("first\nTraceback: no module\n\n")
    answer = await_report(
        lambda: None,
        lambda: queued(JobState.RUNNING),
        patience_s=9,
        log=tmp_path / "log",
        run_s=0.1,
    )
    assert "Traceback: no module" in answer.problem


def test_a_silent_scheduler_ends_nothing_and_a_report_counts(tmp_path: Path) -> None:
    tries = iter([None, {"host": "n"}])

    def look() -> QueuedJob:
        raise SchedulerUnavailable("no answer")

    answer = await_report(lambda: next(tries), look, patience_s=30, log=tmp_path / "log")
    assert answer.report == {"host": "n"}


# -- the ranks of a stage's check ---------------------------------------------------------------


def write_rank(folder: Path, rank: int, *findings: Finding, at: str = "") -> None:
    value = {
        "rank": rank,
        "host": f"node{rank}",
        "at": at,
        "findings": [finding.as_json() for finding in findings],
    }
    (folder / f"findings-{rank}.json").write_text(json.dumps(value))


def stage(level: Any, name: str, found: str) -> Finding:
    return Finding(level, name, found, area="stage")


def test_ranks_that_agree_are_one_line_and_those_that_do_not_are_named(tmp_path: Path) -> None:
    good = stage("ok", "imports", "2.0 in 1 s")
    write_rank(tmp_path, 0, good, stage("ok", "GPUs", "8"))
    write_rank(tmp_path, 1, stage("ok", "imports", "2.0 in 9 s"), stage("bad", "GPUs", "7"))
    found = fold_ranks(tmp_path, num_expected=2, status="0")
    assert [finding.level for finding in found] == ["ok", "ok", "bad"]
    assert "all 2 ranks" in line_of(found, "imports")
    assert "1@node1" in line_of(found, "GPUs").splitlines()[-1]


def test_a_rank_that_hangs_and_one_that_never_spoke_are_bad(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, stage("ok", "imports", "x"), at="all-reduce")
    (tmp_path / "rank-1.log").write_text("ImportError: libcuda.so\n")
    found = fold_ranks(tmp_path, num_expected=2, status="None")
    assert troubles(found) == {"ranks": "bad", "all-reduce": "bad"}
    assert "libcuda.so" in line_of(found, "ranks") and "node0" in line_of(found, "all-reduce")


@pytest.mark.parametrize(
    ("time", "expected"),
    [("04:00:00", "00:05:00"), ("00:03:00", "00:03:00"), (None, "00:05:00"), ("auto", "00:05:00")],
)
def test_the_check_asks_for_five_minutes_at_most_and_changes_nothing_else(
    time: str | None, expected: str
) -> None:
    own = {"nodes": 2, "gpus_per_node": 8, "time_min": "01:00:00"}
    settings = make_settings(slurm={"time": time, "partition": "p"}, train__slurm=own)
    short = shorten(settings, "train")
    assert short.train.slurm.time == expected and short.train.slurm.time_min is None
    changed = {"time", "time_min", "signal_s"}
    before, after = (x.train.slurm.model_dump(exclude=changed) for x in (settings, short))
    assert before == after and short.rollout == settings.rollout
    assert Settings.model_validate_json(short.model_dump_json()) == short


# -- quota and purge ----------------------------------------------------------------------------

LFS = """\
/scratch/a-long-name
               1000000  2000000 3000000       -    500*  400  600  6d
"""
LINUX = """\
Disk quotas for user me (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
server:/home  900* 800 1000 1700000000 12 0 0 0
/dev/sda1  1 0 0 0 2 0 0 0
"""


def test_quotas_of_both_tools() -> None:
    found = parse_quota(LFS, names=("/scratch/a-long-name",))
    assert found == Quota(1000000 * 1024, 3000000 * 1024, 500, 600)
    assert parse_quota(LINUX, names=("/home", "server:/home")) == Quota(921600, 1024000, 12, None)
    assert parse_quota(LINUX, names=("/dev/sda1",)) == Quota(1024, None, 2, None)
    assert parse_quota("Disk quotas for user me (uid 1000): none\n", names=("/",)) is None


@pytest.mark.parametrize(
    ("quota", "needs", "expected"),
    [
        (Quota(10, 100, 1, None), 5, {}),
        (Quota(10, 100, 1, None), 91, {"quota of bytes": "warn"}),
        (Quota(95, 100, 1, 10), None, {"quota of bytes": "warn"}),
        (Quota(100, 100, 10, 10), None, {"quota of bytes": "bad", "quota of files": "bad"}),
        (None, 5, {}),
    ],
)
def test_quota_against_what_the_run_needs(
    quota: Quota | None, needs: int | None, expected: dict[str, str]
) -> None:
    assert troubles(list(judge_quota(quota, "quota", needs_bytes=needs))) == expected


@pytest.mark.parametrize(
    ("changes", "pace_s", "level", "word"),
    [
        ({}, DAY_S, "ok", "no policy"),
        ({"purge_days": 30}, DAY_S, "ok", "about 20.0 days"),
        ({"purge_days": 10}, DAY_S, "warn", "everything is kept"),
        ({"purge_days": 10, "retention__keep_last": 4}, DAY_S, "warn", "early commits"),
        ({"purge_days": 10, "retention__keep_last": 15}, DAY_S, "warn", "longer than that"),
        ({"purge_days": 1}, None, "warn", "at most 1.7 days"),  # 20 × two stages of an hour
        ({"purge_days": 1, "slurm": {}}, None, "ok", "not known"),
        ({"purge_days": 1, "launcher": "local"}, None, "ok", "not known"),
    ],
)
def test_the_purge_policy_against_the_run(
    changes: dict[str, Any], pace_s: float | None, level: str, word: str
) -> None:
    finding = judge_purge(make_settings(**changes), iteration_s=pace_s)
    assert finding.level == level and word in finding.found
    assert finding.fix or level == "ok"


def test_durations_and_what_is_kept() -> None:
    assert expected_s(make_settings(), iteration_s=None) == 20 * 2 * 3600
    assert kept_iterations(make_settings()) == 20
    assert kept_iterations(make_settings(retention__keep_last=3)) == 4
    both = make_settings(retention__keep_last=2, retention__keep_every=6)
    assert kept_iterations(both) == 2 + 1 + 3


# -- how it ends --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("areas", "error"),
    [
        ([], None),
        (["site"], SchedulerError),
        (["files", "site"], UserError),
        (["stage"], UserError),
    ],
)
def test_the_exit_code_says_whose_matter_it_is(
    areas: list[str], error: type[Exception] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(as_json=True)
    report.add([Finding("bad", f"thing-{area}", "x", "y", area) for area in areas])
    report.add([Finding("warn", "other", "x")])
    if error is None:
        report.close(Path("a.yaml"))
    else:
        with pytest.raises(error, match="thing-"):
            report.close(Path("a.yaml"))
    facts = json.loads(capsys.readouterr().out)
    assert (facts["bad"], facts["warn"]) == (len(areas), 1)
    assert len(facts["findings"]) == len(areas) + 1
