"""Models that no job could use are refused before one is submitted, by their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy.model import SMALLEST, write_model

from slurm_rl.config.schema import Settings
from slurm_rl.config.shape_preflight import check_shapes

Load = Callable[..., Settings]
KL = {"train__use_kl_loss": True, "train__kl_loss_coef": 0.1}
CRITIC = {"train__advantage_estimator": "gae", "critic__megatron": {"lr": 1e-6}}
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def lines(settings: Settings) -> list[str]:
    return [p.render({(): "f"}).removeprefix("f: ") for p in check_shapes(settings)]


def rewrite(folder: Path, **changes: Any) -> None:
    """Another `config.json` beside the same weights."""
    (folder / "config.json").write_text(json.dumps(SMALLEST | changes))


def test_a_model_that_fits_is_fine(load: Load, folder: Path) -> None:
    other = {f"{name}__hf_checkpoint": str(folder) for name in ("critic", "reference", "teacher")}
    megatron = {"lr": 1e-6, TENSOR: 2}
    settings = load(
        hf_checkpoint=str(folder),
        train__megatron=megatron,
        train__num_ranks=2,
        teacher__backend="megatron",
        **other | KL | CRITIC,
    )
    assert lines(settings) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, "config.json: model_type 'gpt2' is not supported; supported are"),
        ({"hidden_size": "4"}, "config.json: hidden_size = '4' is no whole number of at least 1;"),
        ({"hidden_act": "gelu"}, "config.json: hidden_act = 'gelu' is not supported; only"),
        (
            {"num_hidden_layers": 3},
            ": tensor model.layers.2.input_layernorm.weight is missing (one",
        ),
        ({"num_hidden_layers": 1}, ": tensor model.layers.1.input_layernorm.weight is not part of"),
        ({"vocab_size": 9}, ": tensor model.embed_tokens.weight has shape [8, 4], but config.json"),
    ],
)
def test_a_config_that_the_trainer_would_refuse(
    load: Load, folder: Path, changes: dict[str, Any], said: str
) -> None:
    rewrite(folder, **changes)
    (line,) = lines(load(hf_checkpoint=str(folder)))
    at = "hf_checkpoint cannot be trained: "
    assert line.startswith(f"{at}{folder}") and said in line


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "config.json").write_text('{"a": '), "config.json: not JSON"),
        (
            lambda folder: (folder / "config.json").write_text("[" * 200_000),
            "config.json: not JSON",
        ),
        (lambda folder: cut(folder / "model.safetensors", 40), "model.safetensors: truncated: the"),
        (lambda folder: cut(folder / "model.safetensors", -1), "bytes, but its header promises"),
        (lambda folder: (folder / "model.safetensors").unlink(), "there is no such file"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "not an index"),
    ],
)
def test_files_that_are_not_whole(
    load: Load, folder: Path, spoil: Callable[[Path], object], said: str
) -> None:
    spoil(folder)
    (line,) = lines(load(hf_checkpoint=str(folder)))
    assert line.startswith(f"hf_checkpoint cannot be trained: {folder}/") and said in line


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def test_each_role_is_laid_out_by_its_own_options(load: Load, folder: Path) -> None:
    def said(**values: Any) -> list[str]:
        return [line.split(";")[0] for line in lines(load(hf_checkpoint=str(folder), **values))]

    four = {TENSOR: 4}
    rule = f"{TENSOR} = 4 does not divide the model's num_attention_heads = 2"
    found = said(train__megatron={"lr": 1e-6} | four, train__num_ranks=4)
    assert found[0] == f"train.megatron.{rule}"
    found = said(**CRITIC | {"critic__megatron": {"lr": 1e-6} | four, "critic__num_ranks": 4})
    assert found[0] == f"critic.megatron.{rule}"
    stage = KL | {"reference__stage": True, "reference__megatron": four, "reference__num_ranks": 4}
    assert said(**stage)[0] == f"reference.megatron.{rule}"
    # A reference of another shape, which the policy's layout does not fit.
    deep = write_model(folder.parent / "deep", num_hidden_layers=3)
    laid = {"train__megatron": {"lr": 1e-6, PIPELINE: 2}, "train__num_ranks": 2}
    found = said(**laid | KL | {"reference__hf_checkpoint": str(deep)})
    assert found == [
        f"train.megatron.{PIPELINE} = 2 does not divide the model's num_hidden_layers = 3"
    ]


def test_a_model_that_is_made_is_judged_if_it_says_its_sizes(load: Load) -> None:
    def said(**changes: Any) -> list[str]:
        config = {k: v for k, v in (SMALLEST | changes).items() if v is not None}
        model = {"characters": "ab", "config": config | {"vocab_size": 5}}
        return lines(load(hf_checkpoint=None, init_model=model))

    assert said() == []
    assert said(hidden_size=None, num_attention_heads=3) == []
    (line,) = said(num_attention_heads=3)
    assert line.startswith(
        "init_model.config cannot be trained: its model: num_attention_heads = 3"
    )


def test_a_teacher_that_sglang_serves_may_be_of_any_family(load: Load, folder: Path) -> None:
    other = write_model(folder.parent / "teacher")
    rewrite(other, model_type="gpt2")
    values = {"hf_checkpoint": str(folder), "teacher__hf_checkpoint": str(other)}
    assert lines(load(**values, rollout__engine="sglang", teacher__backend="sglang")) == []
    (line,) = lines(load(**values, teacher__backend="megatron"))
    assert line.startswith("teacher.hf_checkpoint cannot be run: ") and "'gpt2'" in line
