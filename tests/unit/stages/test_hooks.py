"""The user's own parts of the algorithm: what they do wrong is one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_rl.algorithms.losses import PolicyLoss
from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, DataError, RewardError
from slurm_rl.stages.hooks import check_arguments, guard, read_hooks
from slurm_rl.train import cpu

with cpu.megatron_imports():
    from slurm_rl.train.objective import PolicyTokens

BASE: dict[str, Any] = {
    "run": {"name": "demo", "dir": "/runs"},
    "hf_checkpoint": "/models/m",
    "num_rollout": 3,
    "rollout": {"prompt_data": "/p", "rollout_batch_size": 8, "n_samples_per_prompt": 4},
}
TEXT = """
from slurm_rl.algorithms.losses import PolicyLoss
NUMBER = 3

def good(tokens, train):
    zeros = tokens.logprobs_N.detach() * 0
    return PolicyLoss(-tokens.logprobs_N, zeros + 1, zeros)

def plain(tokens, train):
    return -tokens.logprobs_N

def short(tokens, train):
    made = good(tokens, train)
    return made._replace(ratio_N=made.ratio_N[1:])

def detached(tokens, train):
    made = good(tokens, train)
    return made._replace(loss_N=made.loss_N.detach())

def scalar(tokens, train):
    return good(tokens, train)._replace(clipped_N=0.0)

def broken(tokens, train):
    return tokens.nothing

def full(tokens, train):
    raise MemoryError("no more")

def one(tokens):
    pass

def weights(mask, lengths, group_index, train):
    return mask / 0 if mask is None else mask
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "ownparts").mkdir()
    file = tmp_path / "ownparts" / "parts.py"
    file.write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    yield file
    for name in ("ownparts", "ownparts.parts"):
        sys.modules.pop(name, None)


def settings_with(**paths: str) -> Settings:
    train = {f"custom_{part}_path": f"ownparts.parts.{name}" for part, name in paths.items()}
    return Settings.model_validate(BASE | {"train": train})


def tokens(number: int = 3) -> PolicyTokens:
    parts = [torch.zeros(number, requires_grad=i == 0) for i in range(4)]
    return PolicyTokens(*parts, torch.zeros(number, dtype=torch.int64), 1)


def call_loss(name: str) -> Any:
    settings = settings_with(loss=name)
    hooks = read_hooks(settings)
    assert hooks.loss is not None
    return hooks.loss(tokens(), settings.train)


def test_each_part_is_found_by_its_own_setting(mine: Path) -> None:
    hooks = read_hooks(settings_with(loss="good", reducer="weights"))
    assert hooks.loss is not None and hooks.reducer is not None
    assert hooks.advantage is None and hooks.correction is None
    mask = torch.ones(2)
    assert hooks.reducer(mask, mask, mask, None) is mask


def test_what_is_right_goes_through_with_its_gradient(mine: Path) -> None:
    made = call_loss("good")
    assert isinstance(made, PolicyLoss) and made.loss_N.requires_grad
    settings = settings_with(loss="good")
    loss = read_hooks(settings).loss
    assert loss is not None
    with torch.no_grad():
        loss(tokens(), settings.train)  # of a pass that only measures


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plain", "returned Tensor, not PolicyLoss(loss_N, ratio_N, clipped_N)"),
        ("short", "returned ratio_N = a tensor of [2], not float[3]"),
        ("scalar", "returned clipped_N = 0.0, not float[3]"),
        ("detached", "returned a loss_N without a gradient: was it detached?"),
    ],
)
def test_a_loss_in_a_wrong_form_is_one_line(mine: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call_loss(name)
    assert caught.value.message.startswith(f"train.custom_loss_path: {name} ({mine}:")
    assert caught.value.message.endswith(said)


def test_what_the_users_code_raises_is_one_line_with_its_place(mine: Path) -> None:
    with pytest.raises(RewardError) as caught:
        call_loss("broken")
    line = 1 + TEXT.split("\n").index("    return tokens.nothing")
    assert "train.custom_loss_path: broken (" in caught.value.message
    assert "raised AttributeError" in caught.value.message
    assert caught.value.message.endswith(f" at {mine}:{line}")
    assert isinstance(caught.value.__cause__, AttributeError)


def test_what_is_about_the_machine_stays_as_it_is(mine: Path) -> None:
    with pytest.raises(MemoryError):
        call_loss("full")

    def reads() -> None:
        raise DataError("ours")

    with pytest.raises(DataError, match="ours"):
        guard(reads, field="x")()


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        (
            "one",
            ConfigError,
            r"one \(.*parts.py:.*\) cannot be called with 2 arguments \(tokens, t",
        ),
        ("NUMBER", RewardError, "has no function 'NUMBER', but a int of that name"),
        ("absent", RewardError, "has no function 'absent'"),
    ],
)
def test_what_cannot_be_called_is_refused_before_the_step(
    mine: Path, name: str, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        read_hooks(settings_with(loss=name))


@pytest.mark.parametrize("function", [max, dict, lambda *parts: parts, print])
def test_what_may_take_them_is_taken(function: Callable[..., Any]) -> None:
    check_arguments(function, ("a", "b"), field="train.custom_loss_path")
