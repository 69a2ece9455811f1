"""What a model cannot do is said before a job runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_rl.config.model_preflight import check_model
from slurm_rl.config.schema import Settings

Load = Callable[..., Settings]
A = {"name": "a", "path": "/d/a.jsonl"}
MADE: dict[str, Any] = {
    "characters": "ab",
    "config": {"model_type": "llama", "max_position_embeddings": 64},
}
LONG = {"prompt_data": "/d/t.jsonl", "rollout_max_response_len": 99}
TAKES = "the model's max_position_embeddings = 64"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of 64 positions and 100 tokens, without a chat template."""
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    config = {"max_position_embeddings": 64, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    return tmp_path


@pytest.fixture(params=["hf_checkpoint", "init_model"])
def both(request: pytest.FixtureRequest, load: Load, folder: Path) -> Callable[..., list[str]]:
    """The lines about either model of 64 positions."""

    def of(**values: Any) -> list[str]:
        model: dict[str, Any] = {"hf_checkpoint": str(folder)}
        if request.param == "init_model":
            model = {"hf_checkpoint": None, "init_model": MADE}
        values.setdefault("rollout__rollout_max_response_len", 32)
        return lines(load(**model, **values))

    return of


def lines(settings: Settings) -> list[str]:
    return [p.render({(): "f"}).removeprefix("f: ") for p in check_model(settings)]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"rollout__rollout_max_prompt_len": 64}, f"rollout.rollout_max_prompt_len = 64 leaves no room for an answer in {TAKES}; lower it"),
        ({"rollout__rollout_max_context_len": 65}, f"rollout.rollout_max_context_len = 65 is more than {TAKES}; lower it"),
        ({"rollout__rollout_stop_token_ids": [1, 100]}, "rollout.rollout_stop_token_ids[1] = 100 is no token: the model's vocab_size is"),
    ],
)  # fmt: skip
def test_what_the_model_cannot_hold_is_refused(
    both: Callable[..., list[str]], values: dict[str, Any], line: str
) -> None:
    (found,) = both(**values)
    assert found.startswith(line)


@pytest.mark.parametrize(
    "values",
    [
        # Answers end where the context does, in the rollout and in evaluations.
        {"rollout__rollout_max_response_len": 64},
        {"rollout__rollout_max_prompt_len": 63},
        {"rollout__prompt_data": [A | {"rollout_max_response_len": 99}]},
        {"rollout__rollout_max_prompt_len": 32, "eval__t": LONG},
        {"rollout__rollout_max_context_len": 64, "rollout__rollout_max_prompt_len": 60},
        {"rollout__rollout_stop_token_ids": [4]},
    ],
)
def test_what_fits_is_accepted(both: Callable[..., list[str]], values: dict[str, Any]) -> None:
    assert both(**values) == []


def test_a_chat_template_must_be_there(load: Load, folder: Path) -> None:
    given: dict[str, Any] = {"hf_checkpoint": str(folder), "rollout__rollout_max_response_len": 9}
    own = {"prompt_data": "/d/t.jsonl", "apply_chat_template": True}
    rule = f"= true needs a chat template, and the tokenizer in {folder} has none; set it to false"
    (line,) = lines(load(**given, rollout__apply_chat_template=True))
    assert line.startswith(f"rollout.apply_chat_template {rule}")
    (line,) = lines(load(**given, eval__t=own))
    assert line.startswith(f"eval.t.apply_chat_template {rule}")
    kwargs = {"chat_template": "{{ messages }}"}
    brought = load(
        **given, rollout__apply_chat_template=True, rollout__apply_chat_template_kwargs=kwargs
    )
    assert lines(brought) == []
    (folder / "chat_template.jinja").write_text("x")
    assert lines(load(**given, rollout__apply_chat_template=True)) == []
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert lines(load(**given, eval__t=own)) == []


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({"characters": ""}, 'init_model.characters = "" is empty; list the'),
        ({"characters": "abca"}, "init_model.characters = \"abca\" has 'a' twice; take one out"),
        ({"config": {"vocab_size": 9}}, "init_model.config.model_type is missing; add it"),
        ({"config": {"model_type": "llama", "vocab_size": 4}}, "init_model.config.vocab_size = 4 is less than the tokenizer's 5"),
    ],
)  # fmt: skip
def test_a_model_that_could_not_be_made_is_refused(
    load: Load, model: dict[str, Any], line: str
) -> None:
    given: dict[str, Any] = {"hf_checkpoint": None, "rollout__rollout_max_response_len": 9}
    (found,) = lines(load(**given, init_model=MADE | model))
    assert found.startswith(line)


def test_the_score_stage_s_model_must_be_there(load: Load, folder: Path) -> None:
    given: dict[str, Any] = {"hf_checkpoint": str(folder), "rollout__rollout_max_response_len": 9}
    given |= {"rollout__rm_type": "judge"}
    assert lines(load(**given, score__server={"hf_checkpoint": str(folder)})) == []
    (line,) = lines(load(**given, score__server={"hf_checkpoint": "/nowhere/rm"}))
    assert line.startswith('score.server.hf_checkpoint = "/nowhere/rm" is not a directory')


def test_a_served_model_s_weights_may_be_of_the_old_form(
    load: Load, folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "rm"
    model.mkdir()
    served: dict[str, Any] = {"rollout__rm_type": "judge"}
    served |= {"score__server": {"hf_checkpoint": str(model)}}
    settings = load(hf_checkpoint=str(folder), **served)
    at, fix = f'score.server.hf_checkpoint = "{model}" has no', "; download the model there, or"
    found = lines(settings)
    assert [line.startswith(at) for line in found] == [True, True]
    assert f"config.json{fix}" in found[0]
    assert f"*.safetensors or *.bin{fix}" in found[1]
    (model / "config.json").write_text("{}")
    for name in ("pytorch_model-00001-of-00002.bin", "model.safetensors"):
        (model / name).touch()
        assert lines(settings) == []
        (model / name).unlink()
    # The trainer reads safetensors alone.
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (line,) = lines(load(hf_checkpoint=str(folder)))
    assert line.startswith(f'hf_checkpoint = "{folder}" has no *.safetensors; download')


ASKING: dict[str, dict[str, Any]] = {
    "critic": {"train__advantage_estimator": "gae", "critic__megatron": {"lr": 1e-6}},
    "reference": {"train__use_kl_loss": True, "train__kl_loss_coef": 0.1},
    "teacher": {},
}


@pytest.mark.parametrize("name", ASKING)
def test_the_models_beside_the_policy_must_be_there(load: Load, folder: Path, name: str) -> None:
    own = ASKING[name] | {f"{name}__hf_checkpoint": str(folder / "other")}
    own["rollout__rollout_max_response_len"] = 32

    def said() -> list[str]:
        return lines(load(hf_checkpoint=str(folder), **own))

    at = f'{name}.hf_checkpoint = "{folder / "other"}" '
    assert said() == [f"{at}is not a directory; download the model there, or mend the path"]
    (folder / "other").mkdir()
    assert [line.startswith(f"{at}has no ") for line in said()] == [True, True]
    for file in ("config.json", "model.safetensors"):
        (folder / "other" / file).touch()
    assert said() == []


def test_nesting_without_end_is_for_others_to_judge(load: Load, folder: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("[" * 200_000)
    assert lines(load(hf_checkpoint=str(folder))) == []
