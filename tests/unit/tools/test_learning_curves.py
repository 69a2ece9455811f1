"""The pure parts of tools/learning_curves.py: settings, what is left to run, page and plot."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slurm_rl.chain.graph import build_graph
from slurm_rl.config.load import load_settings
from slurm_rl.config.schema import Settings
from slurm_rl.types import Result

TOOLS = Path(__file__).parents[3] / "tools"


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(TOOLS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(TOOLS))


algorithms = load("learning.algorithms")
curves = load("learning.curves")
stages = load("learning.stages")
tool = load("learning_curves")
ALGORITHMS = {algorithm.name: algorithm for algorithm in algorithms.ALGORITHMS}


def settings_of(name: str, *, seed: int = 1) -> Settings:
    """Loading checks every rule, also that each setting has an effect."""
    folder = Path("/no/such/folder")
    overrides = ALGORITHMS[name].overrides(seed=seed, folder=folder, teacher=folder / "teacher")
    return load_settings(tool.CONFIG, overrides)


def curve(name: str, rewards: list[float]) -> Any:
    return curves.Curve(ALGORITHMS[name].recorded(), rewards, 1.5, "a machine")


def complete() -> Any:
    """Every run, with the target reached by seed k after k updates."""
    return {
        name: {seed: curve(name, [0.1] * seed + [0.95]) for seed in algorithms.SEEDS}
        for name in ALGORITHMS
    }


@pytest.mark.parametrize("name", ALGORITHMS)
def test_settings_are_valid_and_differ_from_the_first_ones(name: str) -> None:
    settings = settings_of(name, seed=7)
    assert settings.seed == 7 and settings.num_rollout == ALGORITHMS[name].budget + 1
    for item in algorithms.SHARED:
        if not any(own.split("=")[0] == item.split("=")[0] for own in ALGORITHMS[name].settings):
            dotted, _, text = item.partition("=")
            section, _, key = dotted.partition(".")
            found: Any = getattr(settings, section)
            for part in key.split("."):
                found = found[part] if isinstance(found, dict) else getattr(found, part)
            assert found == float(text)
    if name != "grpo":
        assert settings != settings_of("grpo", seed=7)


def test_every_estimator_and_loss_is_shown() -> None:
    all_of = {
        field: set(re.findall(r"'(\w+)'", str(type(load_train()).model_fields[field].annotation)))
        for field in ("advantage_estimator", "policy_loss")
    }
    shown = {
        field: {getattr(settings_of(name).train, field) for name in ALGORITHMS} for field in all_of
    }
    assert shown == all_of


def load_train() -> Any:
    return settings_of("grpo").train


def test_the_stages_are_those_of_the_chain() -> None:
    kinds = {
        name: [node.kind for node in build_graph(settings_of(name)).nodes] for name in ALGORITHMS
    }
    assert kinds["ppo_kl_reward"] == ["rollout", "reference", "critic", "train"]
    assert kinds["distillation"] == ["rollout", "teacher", "train"]
    assert kinds["grpo_kl_loss"] == ["rollout", "train"]


def test_what_was_written_is_read_again() -> None:
    known = complete()
    text = curves.render_curves(known)
    assert curves.parse_curves(text) == known
    assert curves.render_curves(curves.parse_curves(text)) == text
    assert '"rewards": [ 0.1, 0.95 ]' in text  # a curve is one line
    gone = curves.render_curves(known | {"gone": {1: curve("grpo", [0.1])}})
    assert gone == text


def test_a_tool_that_was_killed_goes_on_with_the_run_that_had_not_ended() -> None:
    known = complete()
    assert curves.missing_runs(known) == []
    known["rloo"][2] = curve("rloo", [0.1, 0.4])
    del known["pg"][3]
    missing = [(algorithm.name, seed) for algorithm, seed in curves.missing_runs(known)]
    assert missing == [("rloo", 2), ("pg", 3)]
    assert [seed for _, seed in curves.missing_runs(known, ["pg"])] == [3]


def test_a_run_of_other_settings_is_made_again() -> None:
    known = complete()
    old = known["gspo"][1]
    known["gspo"][1] = dataclasses.replace(old, settings=[*old.settings[:-1], "train.eps_clip=1"])
    assert [(a.name, s) for a, s in curves.missing_runs(known)] == [("gspo", 1)]


def test_a_run_that_used_its_budget_up_is_over_and_says_so() -> None:
    budget = ALGORITHMS["grpo"].budget
    known = complete()
    # The first reward is from before any update.
    known["grpo"][1] = curve("grpo", [0.1] * budget)
    assert len(curves.missing_runs(known)) == 1
    known["grpo"][1] = curve("grpo", [0.1] * (budget + 1))
    assert curves.missing_runs(known) == []
    assert "| –, 2, 3 |" in curves.render_table(known)


def test_groups_that_a_filter_dropped_count_with_their_reward() -> None:
    """Two kept groups of mean 0.5, four dropped ones: three all right, one all wrong."""
    result = Result(
        files=[],
        content={"num_groups": 2, "dropped": {"zero_std_1": 3, "zero_std_0": 1}},
        metrics={"rollout/raw_reward": 0.5},
    )
    assert stages.mean_reward(result) == pytest.approx((2 * 0.5 + 3) / 6, abs=1e-6)
    alone = Result(
        files=[], content={"num_groups": 2, "dropped": {}}, metrics={"rollout/raw_reward": 0.25}
    )
    assert stages.mean_reward(alone) == 0.25


def test_the_page_is_that_of_the_results() -> None:
    known = curves.read_curves(tool.RESULTS)
    page = tool.PAGE.read_text()
    assert curves.with_table(page, curves.render_table(known)) == page, (
        "run python tools/learning_curves.py --plot"
    )
    assert curves.missing_runs(known) == []


def test_every_run_of_the_page_reached_the_target_in_its_budget() -> None:
    for name, seeds in json.loads(tool.RESULTS.read_text()).items():
        for found in seeds.values():
            assert found["rewards"][-1] >= algorithms.TARGET, name
            assert len(found["rewards"]) - 1 <= ALGORITHMS[name].budget, name


@pytest.mark.slow
def test_the_same_curves_give_the_same_plot(tmp_path: Path) -> None:
    known = complete()
    del known["pg"]  # a panel without curves
    for name in ("first.svg", "second.svg"):
        curves.draw_curves(known, tmp_path / name)
    first, second = ((tmp_path / name).read_bytes() for name in ("first.svg", "second.svg"))
    assert first == second and first.rstrip().endswith(b"</svg>")
    known["grpo"][1] = curve("grpo", [0.3, 0.95])
    curves.draw_curves(known, tmp_path / "other.svg")
    assert (tmp_path / "other.svg").read_bytes() != first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo", "ppo_kl_reward"])
def test_a_run_makes_the_rewards_of_the_page(name: str) -> None:
    """Not to the last digit: another processor may round otherwise, and draw another token."""
    known = curves.read_curves(tool.RESULTS)[name][1].rewards[:3]
    with contextlib.closing(tool.train(ALGORITHMS[name], seed=1)) as rewards:
        assert list(itertools.islice(rewards, 3)) == pytest.approx(known, abs=0.03)
