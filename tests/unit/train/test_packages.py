"""What Megatron's settings need that is not installed; what it refuses without a word."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from toy.model import SMALLEST

from slurm_rl.config.passthrough import MEGATRON, check_megatron
from slurm_rl.config.problems import Problem
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError
from slurm_rl.stages.check import check_imports
from slurm_rl.train import cpu
from slurm_rl.train.packages import NEEDED, Needed, missing_packages, refusal

with cpu.megatron_imports():
    from slurm_rl.train.model import model_config
    from slurm_rl.train.options import split_megatron

from slurm_rl.models.geometry import parse_model_config


def refused(name: str, value: object) -> list[Problem]:
    return check_megatron({name: value})


@pytest.mark.parametrize("needed", NEEDED, ids=lambda needed: f"{needed.setting}={needed.value}")
def test_every_entry_is_a_value_that_passes_the_login_node(needed: Needed) -> None:
    assert MEGATRON.owner(needed.setting) is None
    assert refused(needed.setting, needed.value) == []


def test_only_what_is_asked_for_and_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there: dict[str, object] = {}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there.get(name))
    asked = {needed.setting: needed.value for needed in NEEDED}
    found = list(missing_packages(asked))
    assert {needed.setting for needed in found} == set(asked)
    assert list(missing_packages({"optimizer": "adam", "moe_enable_deepep": False})) == []
    there |= dict.fromkeys((needed.package for needed in NEEDED), object())
    assert list(missing_packages(asked)) == []


def test_an_optimizer_on_the_host_needs_no_kernels() -> None:
    exact = {"use_precision_aware_optimizer": True}
    if importlib.util.find_spec("transformer_engine") is None:
        assert [needed.package for needed in missing_packages(exact)] == ["transformer_engine"]
    assert list(missing_packages(exact | {"optimizer_cpu_offload": True})) == []


def test_the_stage_says_which_package_and_what_to_do() -> None:
    missing = [
        needed for needed in NEEDED if list(missing_packages({needed.setting: needed.value}))
    ]
    for needed in missing:
        with pytest.raises(ConfigError) as caught:
            split_megatron({"lr": 1.0, needed.setting: needed.value}, above="critic")
        assert caught.value.message == (
            f"critic.megatron.{needed.setting} = {needed.value} needs the package "
            f"{needed.package}, which is not in the environment of the stage"
        )
        assert needed.instead in (caught.value.hint or "")


def test_a_rule_that_megatron_asserts_without_a_word_is_the_reason() -> None:
    options = split_megatron({"lr": 1.0, "fine_grained_activation_offloading": True})
    geometry = parse_model_config(SMALLEST, where="config.json")
    with (
        cpu.megatron_imports(),
        pytest.raises(
            ConfigError, match=r"refuses it: it must be that .*offload_modules"
        ) as caught,
    ):
        model_config(geometry, options, deterministic=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AssertionError("a\n  b"), "refuses it: a b"),
        (AssertionError(), "refuses it: AssertionError"),
        (NotImplementedError(), "refuses it: NotImplementedError"),
    ],
)
def test_there_is_always_a_reason(error: Exception, said: str) -> None:
    assert refusal(error).message.endswith(said)


def test_doctor_looks_for_them_where_the_stage_runs(tmp_path: Path) -> None:
    if importlib.util.find_spec("emerging_optimizers") is not None:
        pytest.skip("emerging_optimizers is installed")
    muon = {"lr": 1e-3, "optimizer": "muon", "use_distributed_optimizer": False}
    settings = Settings.model_validate(
        {
            "run": {"name": "demo", "dir": str(tmp_path)},
            "hf_checkpoint": "/models/m",
            "num_rollout": 3,
            "rollout": {"prompt_data": "/p", "rollout_batch_size": 8, "n_samples_per_prompt": 4},
            "train": {"global_batch_size": 8, "megatron": muon},
        }
    )
    with cpu.megatron_imports():
        found = [finding for finding in check_imports(settings, "train") if finding.level == "bad"]
        assert not [
            finding for finding in check_imports(settings, "rollout") if "opti" in finding.name
        ]
    (finding,) = found
    assert finding.name == "import emerging_optimizers"
    assert finding.found == "megatron.optimizer: muon needs it, and it is not installed"
    assert finding.fix == "install it for train.python, or use adam"
