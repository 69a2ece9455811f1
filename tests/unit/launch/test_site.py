"""What Slurm says of itself: golden outputs of 20.11, 22.05 and 24.11, and wall times.

`scontrol-*-22.05.txt` came from a real Slurm; the others follow what those versions print.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.config.problems import Problem, format_path
from slurm_rl.config.schema import Settings
from slurm_rl.errors import SchedulerUnavailable
from slurm_rl.launch.site import (
    Limits,
    NodeGroup,
    Partition,
    Qos,
    Site,
    parse_associations,
    parse_config,
    parse_gpus,
    parse_limit_s,
    parse_nodes,
    parse_partitions,
    parse_qos,
    parse_seconds,
    read_partitions,
    split_pairs,
)
from slurm_rl.launch.wall_times import (
    check_wall_times,
    find_too_long,
    format_limit,
    may_lift_limits,
)

GOLDEN = Path(__file__).parents[2] / "golden"
DAY_S = 86400


def golden(name: str) -> str:
    return (GOLDEN / name).read_text()


def make_settings(**changes: Any) -> Settings:
    """A small configuration; `train__time="1-00"` sets an option of a stage's `slurm`."""
    value: dict[str, Any] = {
        "run": {"name": "demo", "dir": "/runs"},
        "hf_checkpoint": "/m",
        "num_rollout": 2,
        "slurm": {},
        "rollout": {"prompt_data": "/d", "rollout_batch_size": 8, "rm_type": "exact_match"},
        "train": {"global_batch_size": 8, "megatron": {"lr": 1e-6}},
    }
    for name, change in changes.items():
        stage, _, key = name.partition("__")
        if not key:
            value["slurm"][stage] = change
        else:
            value.setdefault(stage, {}).setdefault("slurm", {})[key] = change
    return Settings.model_validate(value)


# -- the configuration ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "number", "kill_s", "age_s", "array", "flags", "requeue"),
    [
        ("20.11", (20, 11), 30, 60, 100, (), 0),
        ("22.05", (22, 5), 5, 300, 1001, (), 1),
        ("24.11", (24, 11), 30, 300, 40001,
         ("enable_configless", "preempt_send_user_signal", "cloud_dns"), 1),
    ],
)  # fmt: skip
def test_the_configuration_of_each_version(
    version: str,
    number: tuple[int, int],
    kill_s: int,
    age_s: int,
    array: int,
    flags: tuple[str, ...],
    requeue: int,
) -> None:
    site = Site(parse_config(golden(f"scontrol-config-{version}.txt")), ())
    assert site.version == number
    assert site.seconds("KillWait") == kill_s, "a plugin's key of the same name does not count"
    assert site.seconds("MinJobAge") == age_s
    assert site.number("MaxArraySize") == array
    assert site.flags("SlurmctldParameters") == flags
    assert site.number("JobRequeue") == requeue


def test_what_is_not_set_is_empty_and_what_is_unknown_too() -> None:
    site = Site(parse_config(golden("scontrol-config-22.05.txt")), ())
    assert site.word("JobSubmitPlugins") == "" and site.word("NoSuchKey") == ""
    assert site.seconds("NoSuchKey") is None and site.number("SelectType") is None
    assert site.word("AuthInfo").endswith("cred_expire=5"), "a value may hold ="


@given(st.text())
def test_parsers_take_any_text(text: str) -> None:
    parse_config(text)
    parse_nodes(text)
    parse_qos(text)
    parse_associations(text)
    parse_gpus(text)
    parse_seconds(text)
    list(split_pairs(text))
    assert all(part.name is not None for part in parse_partitions(text))


# -- partitions -------------------------------------------------------------------------------


def test_the_partitions_of_a_real_slurm() -> None:
    low, high = parse_partitions(golden("scontrol-partitions-22.05.txt"))
    assert (low.name, low.is_default, high.is_default) == ("low", True, False)
    assert (low.max_time_s, low.default_time_s, low.grace_s) == (DAY_S, 600, 5)
    assert (low.modes, high.modes) == (("REQUEUE",), ("OFF",))
    assert (low.num_nodes, low.max_nodes, low.min_nodes, low.state) == (2, None, 0, "UP")


def test_partitions_in_several_lines_each() -> None:
    gpu, long = parse_partitions(golden("scontrol-partitions-20.11.txt"))
    assert (gpu.qos, long.qos) == ("gpu part", ""), "a value may hold a space"
    assert (gpu.max_time_s, gpu.grace_s, gpu.max_nodes) == (2 * DAY_S, 120, 8)
    assert gpu.modes == ("GANG", "SUSPEND")
    assert (long.max_time_s, long.default_time_s, long.min_nodes) == (None, None, 2)
    assert (long.state, long.oversubscribe) == ("DOWN", "EXCLUSIVE")


def test_a_later_version_adds_keys_and_changes_nothing() -> None:
    (batch,) = parse_partitions(golden("scontrol-partitions-24.11.txt"))
    assert (batch.max_time_s, batch.num_nodes, batch.qos) == (DAY_S, 508, "batch")


@given(st.integers(min_value=1, max_value=400 * DAY_S))
def test_a_limit_is_read_as_it_is_written(seconds: int) -> None:
    assert parse_limit_s(format_limit(seconds)) == seconds


@pytest.mark.parametrize("text", ["UNLIMITED", "INFINITE", "NONE", "", "what", "1-2-3"])
def test_no_limit_and_no_sense_are_both_none(text: str) -> None:
    assert parse_limit_s(text) is None


# -- nodes and accounting ---------------------------------------------------------------------


def test_nodes_their_state_and_their_gpus() -> None:
    text = (
        "low|idle|2|4|(null)\n"
        "gpu|mixed|30|64|gpu:a100:4(S:0-1)\n"
        "gpu|drained*|1|64+|gpu:a100:4,gpu:t4:1\n"
        "gpu|down~|1|64|gpu:8\n"
        "slurm_load_partitions: Unable to contact slurm controller\n"
    )
    groups = parse_nodes(text)
    assert [group.gpus for group in groups] == [0, 4, 5, 8]
    assert [group.is_usable for group in groups] == [True, True, False, False]
    assert groups[1] == NodeGroup("gpu", "mixed", 30, 64, 4)


@pytest.mark.parametrize(
    ("gres", "expected"),
    [
        ("(null)", 0), ("gpu:2", 2), ("gpu:a100:8", 8), ("gpu:a100:8(S:0,3)", 8),
        ("gpu:a:1,gpu:b:2(S:1),nvme:4", 3), ("craynetwork:4", 0), ("gpu=4", 4), ("shard:8,gpu:1", 1),
    ],
)  # fmt: skip
def test_gpus_of_a_node(gres: str, expected: int) -> None:
    assert parse_gpus(gres) == expected


def test_accounting() -> None:
    qos = parse_qos("normal||100|\nlong|PartitionTimeLimit,OverPartQOS||7-00:00:00\nrubbish\n")
    assert qos == (
        Qos("normal", (), 100, None),
        Qos("long", ("PartitionTimeLimit", "OverPartQOS"), None, 7 * DAY_S),
    )
    assert parse_associations("abc||normal,long|20|\nxyz|gpu|normal|50|30\n|||5\n") == (
        Limits(20, "abc"),
        Limits(30, "xyz"),
    )


# -- wall times -------------------------------------------------------------------------------

PARTITIONS = (
    Partition("day", is_default=True, max_time_s=DAY_S),
    Partition("hour", max_time_s=3600),
    Partition("free"),
)


def complaints(settings: Settings) -> list[str]:
    found: list[Problem] = find_too_long(settings, PARTITIONS)
    return [format_path(problem.path) for problem in found]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"time": "1-00:00:00"}, []),
        ({"time": "1-00:00:01"}, ["slurm.time"]),
        ({"time": "UNLIMITED"}, []),
        ({}, []),
        ({"train__time": "25:00:00"}, ["train.slurm.time"]),
        ({"time": "02:00:00", "rollout__partition": "hour"}, ["slurm.time"]),
        ({"time": "2-00", "partition": "free"}, []),
        ({"time": "2-00", "partition": "hour,day"}, ["slurm.time"]),
        ({"time": "02:00:00", "partition": "hour,day"}, []),
        ({"time": "2-00", "partition": "hour, free"}, []),
        ({"time": "2-00", "partition": "nowhere"}, []),
        ({"tick__partition": "hour", "tick__time": "01:00:01"}, ["tick.slurm.time"]),
        ({"time": "auto", "time_max": "2-00"}, ["slurm.time_max"]),
        ({"time": "auto", "time_max": "12:00:00"}, []),
        ({"time": "10:00:00", "train__fallback": {"after": "60", "partition": "hour"}},
         ["slurm.time"]),
        ({"time": "10:00:00", "train__fallback": {"after": "60", "qos": "x"}}, []),
    ],
)  # fmt: skip
def test_a_job_longer_than_all_of_its_partitions_is_found(
    changes: dict[str, Any], where: list[str]
) -> None:
    assert complaints(make_settings(**changes)) == where


@given(
    time_s=st.integers(min_value=60, max_value=10 * DAY_S),
    limits=st.lists(st.none() | st.integers(min_value=60, max_value=10 * DAY_S), min_size=1),
)
def test_refused_if_and_only_if_no_partition_gives_it(
    time_s: int, limits: list[int | None]
) -> None:
    parts = [Partition(f"p{i}", max_time_s=limit) for i, limit in enumerate(limits)]
    names = ",".join(part.name for part in parts)
    settings = make_settings(train__time=format_limit(time_s), train__partition=names)
    can_run = any(limit is None or time_s <= limit for limit in limits)
    assert bool(find_too_long(settings, parts)) is not can_run


def test_the_complaint_names_partition_limit_and_key() -> None:
    (problem,) = find_too_long(make_settings(train__time="2-00"), PARTITIONS)
    line = problem.render({(): "a.yaml"})
    assert line == (
        'a.yaml: train.slurm.time = "2-00" is longer than partition day lets a job run'
        " (MaxTime 1-00:00:00); lower train.slurm.time or choose another partition"
    )


@pytest.mark.parametrize(
    ("named", "qos", "expected"),
    [
        (set(), None, False),
        ({"long"}, None, True),  # accounting is silent: it may be so
        ({"long"}, (Qos("long", ("PartitionTimeLimit",)),), True),
        ({"normal"}, (Qos("long", ("PartitionTimeLimit",)), Qos("normal")), False),
        (set(), (Qos("long", ("PartitionTimeLimit",)),), True),  # it may be the default one
        (set(), (Qos("normal"),), False),
    ],
)
def test_a_quality_of_service_may_lift_the_limit(
    named: set[str], qos: tuple[Qos, ...] | None, expected: bool
) -> None:
    assert may_lift_limits(named, qos) is expected


def write_program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all of PATH but for the shell's own."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    return tmp_path


def test_preflight_refuses_and_asks_once(programs: Path) -> None:
    calls = programs / "calls"
    text = "PartitionName=day Default=YES MaxTime=1-00:00:00"
    write_program(programs, "scontrol", f'echo "$@" >>{calls}; echo "{text}"')
    write_program(programs, "sacctmgr", f"echo sacctmgr >>{calls}; exit 1")
    assert not check_wall_times(make_settings(time="1-00"))
    assert calls.read_text() == "show partition -o\n"
    assert len(check_wall_times(make_settings(time="1-01"))) == 1
    assert len(check_wall_times(make_settings(time="1-01", qos="long"))) == 0


def test_preflight_lets_a_lifting_quality_of_service_through(programs: Path) -> None:
    write_program(programs, "scontrol", 'echo "PartitionName=d Default=YES MaxTime=60"')
    write_program(programs, "sacctmgr", 'echo "long|PartitionTimeLimit||"; echo "normal|||"')
    assert not check_wall_times(make_settings(time="1-01", qos="long"))
    assert check_wall_times(make_settings(time="1-01", qos="normal"))


@pytest.mark.parametrize("text", ["exit 1", "echo rubbish", None])
def test_preflight_says_nothing_where_slurm_does_not_answer(
    programs: Path, text: str | None
) -> None:
    if text is not None:
        write_program(programs, "scontrol", text)
    assert check_wall_times(make_settings(time="300-00")) == []


def test_a_local_run_asks_nobody(programs: Path) -> None:
    write_program(programs, "scontrol", f"touch {programs}/asked; exit 1")
    local = make_settings(time="300-00").model_copy(update={"launcher": "local"})
    assert check_wall_times(local) == []
    assert not (programs / "asked").exists()


def test_a_silent_controller_is_an_error_of_its_own(programs: Path) -> None:
    write_program(programs, "scontrol", "exec sleep 30")
    with pytest.raises(SchedulerUnavailable, match="did not answer in 0 s"):
        read_partitions(timeout_s=0.2)
