"""Pools of shards: what each asks Slurm for, and what is wrong between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.chain.graph import build_graph
from slurm_rl.config.changes import check_changes
from slurm_rl.config.checks import check_settings
from slurm_rl.config.derive import num_gpus, stage_fallback, stage_slurm, stage_time_s
from slurm_rl.config.pools import (
    job_kind,
    job_kinds,
    pool_shards,
    settings_of_pool,
    settings_of_shard,
)
from slurm_rl.config.schema import Settings
from slurm_rl.config.shaping import settings_digest
from slurm_rl.errors import ConfigError
from slurm_rl.launch.build import make_spec
from slurm_rl.launch.shape import fits

Load = Callable[..., Settings]
Complaints = Callable[..., list[str]]

SPOT = {
    "shards": 3,
    "replicas": 8,
    "slurm": {
        "partition": "spot",
        "gpus_per_node": "a100:8",
        "site_option": "x",
        "fallback": {"after": "01:00:00", "partition": "main"},
    },
}
FIXED = {"shards": 1, "slurm": {"partition": "h100"}, "sglang": {"tp_size": 4}}
ASKED: dict[str, Any] = {
    "launcher": "slurm",
    "slurm": {"account": "me", "time": "04:00:00"},
    "rollout__slurm": {"gpus_per_node": "h100:4", "cpus_per_task": 8},
    "rollout__pools": {"spot": SPOT, "fixed": FIXED},
    "train__num_ranks": 1,
}


def test_each_pool_asks_for_its_own_over_the_rollouts(load: Load) -> None:
    settings = load(**ASKED)
    shared = {"account": "me", "time": "04:00:00", "cpus_per_task": 8}
    spot = {"partition": "spot", "gpus_per_node": "a100:8", "site_option": "x"}
    assert stage_slurm(settings, "rollout-spot") == shared | spot
    fixed = {"partition": "h100", "gpus_per_node": "h100:4"}
    assert stage_slurm(settings, "rollout-fixed") == shared | fixed
    assert num_gpus(settings, "rollout-spot") == 8 and num_gpus(settings, "rollout-fixed") == 4
    assert stage_time_s(settings, "rollout-spot") == 4 * 3600
    assert stage_fallback(settings, "rollout-fixed") is None
    spec = make_spec(settings, "abc")
    assert spec.fallbacks == (("rollout-spot", 3600.0),)
    assert dict(spec.gpus)["rollout-fixed"] == 4 and "rollout" not in dict(spec.gpus)


def test_shards_are_the_sum_and_dealt_by_name(load: Load) -> None:
    settings = load(**ASKED)
    assert settings.rollout.shards == 4
    assert pool_shards(settings) == {"fixed": range(1), "spot": range(1, 4)}
    assert job_kinds(settings) == ("init", "rollout-fixed", "rollout-spot", "train", "tick")
    kinds = [job_kind(settings, "rollout", shard) for shard in range(4)]
    assert kinds == ["rollout-fixed"] + 3 * ["rollout-spot"]
    assert job_kind(settings, "eval-a", 0) == "eval-a"


@given(st.dictionaries(st.text("abcxyz", min_size=1, max_size=3), st.integers(1, 4), min_size=1))
def test_pools_are_the_same_after_a_trip_through_json(sizes: dict[str, int]) -> None:
    value = {
        "run": {"name": "demo", "dir": "/runs"},
        "hf_checkpoint": "/m",
        "num_rollout": 1,
        "rollout": {
            "prompt_data": "/p",
            "rollout_batch_size": 99,
            "pools": {name: {"shards": size} for name, size in sizes.items()},
        },
        "train": {"global_batch_size": 1},
    }
    settings = Settings.model_validate(value)
    again = Settings.model_validate_json(settings.model_dump_json())
    assert pool_shards(again) == pool_shards(settings)
    dealt = [shard for shards in pool_shards(settings).values() for shard in shards]
    assert dealt == list(range(sum(sizes.values()))), "each shard once, in order"
    node = build_graph(settings).node("rollout")
    assert {name: len(shards) for name, shards in node.pools} == sizes


def test_a_shard_has_the_engines_of_its_pool(load: Load) -> None:
    settings = load(**ASKED, rollout__sglang={"mem_fraction_static": 0.8})
    spot, fixed = (settings_of_shard(settings, "rollout", shard).rollout for shard in (1, 0))
    assert spot.replicas == 8 and spot.sglang == {"mem_fraction_static": 0.8}
    assert fixed.replicas == 1 and fixed.sglang == {"mem_fraction_static": 0.8, "tp_size": 4}
    alone = settings_of_pool(settings, "spot")
    assert stage_slurm(alone, "rollout") == stage_slurm(settings, "rollout-spot")
    assert settings_of_shard(settings, "eval-a", 1) is settings


def test_it_is_the_same_as_jobs_read_it(load: Load) -> None:
    """A run's settings have been through JSON, where all that is unset is null."""
    settings = load(**ASKED)
    again = Settings.model_validate_json(settings.model_dump_json())
    assert check_settings(again) == []
    for shard in range(4):
        there = settings_of_shard(again, "rollout", shard)
        kind = job_kind(again, "rollout", shard)
        assert stage_slurm(there, "rollout") == stage_slurm(settings, kind)
        assert stage_fallback(there, "rollout") == stage_fallback(settings, kind)
        assert stage_slurm(again, kind) == stage_slurm(settings, kind)


def test_where_shards_run_changes_no_number_and_how_they_serve_does(load: Load) -> None:
    plain = load(**{**ASKED, "rollout__pools": None, "rollout__shards": 4})
    spot = {**SPOT, "shards": 2}
    pools = load(**{**ASKED, "rollout__pools": {"spot": spot}})
    assert settings_digest(pools) == settings_digest(plain)
    other = load(**{**ASKED, "rollout__pools": {"spot": {**spot, "sglang": {"tp_size": 1}}}})
    assert settings_digest(other) != settings_digest(plain)


def test_jobs_of_pools_do_each_others_work_only_where_they_fit(load: Load) -> None:
    settings = load(**ASKED)
    assert fits(settings, have="rollout-spot", need="rollout-spot")
    assert not fits(settings, have="rollout-spot", need="rollout-fixed"), "8 of another type"
    assert not fits(settings, have="rollout-fixed", need="rollout-spot")
    any_type = {"shards": 3, "slurm": {**SPOT["slurm"], "gpus_per_node": 4}}
    settings = load(**{**ASKED, "rollout__pools": {"spot": any_type, "fixed": FIXED}})
    assert fits(settings, have="rollout-fixed", need="rollout-spot"), "any four will do"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"rollout__shards": 3}, "rollout.shards = 3 is not the sum of rollout.pools: 4; take it out: it follows from the pools"),
        ({"rollout__pools": {"a": {"shards": 0}}}, "rollout.pools.a.shards = 0 must be above 0; raise it"),
        ({"rollout__pools": {"a": {}}}, "rollout.pools.a.shards is missing; add it"),
        ({"rollout__pools": {"a b": {"shards": 1}}}, 'rollout.pools.a b = "a b" must be letters'),
        ({"rollout__pools": {"a": {"shards": 9}}}, "rollout.shards = 9 is more than rollout_batch_size = 8; lower it: a shard needs a prompt"),
        ({"rollout__pools": {"a": {"shards": 1, "slurm": {"partiton": "x"}}}}, 'rollout.pools.a.slurm.partiton = "x" is not an option of sbatch; did you mean partition?'),
        ({"rollout__pools": {"a": {"shards": 1, "slurm": {"time": "00:01:00"}}}}, 'rollout.pools.a.slurm.time = "00:01:00" is not longer than rollout-a\'s signal_s = 120 s; raise time or lower signal_s'),
        ({"rollout__pools": {"a": {"shards": 1, "slurm": {"fallback": {"after": "10"}}}}}, "rollout.pools.a.slurm.fallback names neither a partition nor a qos; name where to go"),
        ({"rollout__pools": {"a": {"shards": 1, "replicas": 5}}}, "rollout.pools.a.replicas = 5 of 1 GPUs each do not fit on the 4 GPUs of a node; lower it, or ask for more GPUs"),
        ({"rollout__pools": {"a": {"shards": 1, "sglang": {"tp_size": 8}}}}, "rollout.pools.a.sglang needs 8 GPUs (tp × pp × dp), but a node of the job has 4; lower tp_size or dp_size, or ask for more"),
        ({"rollout__pools": {"a": {"shards": 1, "sglang": {"tp_sise": 8}}}}, "rollout.pools.a.sglang.tp_sise"),
        ({"rollout__pools": {"a": {"shards": 1, "sglang": {"tp_size": 0}}}}, "rollout.pools.a.sglang.tp_size = 0 must be at least 1; raise it"),
        ({"rollout__pools": {"a": {"shards": 1}}, "rollout__engine_nodes": 2, "rollout__sglang": {"tp_size": 2}}, "rollout.engine_nodes = 2 is not the 1 node(s) of a rollout job; set rollout.pools.a.slurm.nodes: 2"),
        ({"rollout__engine": "embedded"}, "rollout.pools.spot.replicas has no effect with engine: embedded; take it out, or set engine: sglang"),
        ({"chain__pack": "iteration"}, "rollout.pools cannot be with chain.pack = iteration, where one job runs all stages in turn; use pack: stage"),
        ({"rollout__array_throttle": 3}, "rollout.array_throttle = 3 has no effect on arrays of 3 shard(s); lower it, or take it out"),
        ({"deterministic": True, "rollout__sglang": {"enable_deterministic_inference": True}}, "rollout.pools.fixed.sglang cannot be with deterministic: true: samples must not depend on their shard; set it for all in rollout.sglang, or set deterministic: false"),
    ],
)  # fmt: skip
def test_pools_that_cannot_be(complaints: Complaints, values: dict[str, Any], line: str) -> None:
    found = complaints(**{**ASKED, **values})
    assert [text for text in found if text.startswith(line)], found


BEFORE = {"rollout": {"pools": {"spot": {"shards": 3, "slurm": {"partition": "spot"}}}}}


@pytest.mark.parametrize(
    "path",
    [
        "rollout.pools",
        "rollout.pools.new",
        "rollout.pools.spot",
        "rollout.pools.spot.shards",
        "rollout.pools.new.shards",
    ],
)
def test_which_pools_there_are_is_fixed(path: str) -> None:
    with pytest.raises(ConfigError, match="is fixed when a run is made"):
        check_changes([path], before=BEFORE)


@pytest.mark.parametrize("name", ["slurm.partition", "slurm.fallback.after", "replicas", "sglang"])
def test_what_a_pool_asks_for_may_change(name: str) -> None:
    check_changes([f"rollout.pools.spot.{name}"], before=BEFORE)
