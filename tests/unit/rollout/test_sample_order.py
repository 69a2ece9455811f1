"""Samples that are made by place, since that is quick: each value is in the field that is meant.

Every field has a value that no other field has, so that no two can be exchanged unseen.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any

from slurm_rl.rollout.data import Visit
from slurm_rl.rollout.data.rows import Prompt
from slurm_rl.rollout.engine import Completion, Request, Sampling, Weights
from slurm_rl.rollout.groups import Finisher, PlannedGroup
from slurm_rl.rollout.journal import parse_samples, render_line
from slurm_rl.rollout.samples import Sample

VALUES: dict[str, Any] = {
    "group_index": 11,
    "sample_index": 12,
    "prompt_tokens": (13, 14),
    "response_tokens": (15, 16),
    "rollout_logprobs": (-0.25, -0.5),
    "loss_mask": (1, 0),
    "prompt": "the prompt",
    "response": "the response",
    "label": "the label",
    "reward": 0.75,
    "status": "truncated",
    "weights_version": 17,
    "seed": 18,
    "metadata": {"is": "metadata"},
    "rewards": {"part": 0.125},
    "token_versions": (19, 20),
    "rollout_index": 21,
    "data_set": "the data set",
}


def compare(sample: Sample, values: dict[str, Any]) -> None:
    assert set(values) == {field.name for field in fields(Sample)}, "add the new field here"
    assert not [pair for pair in combinations(values.values(), 2) if pair[0] == pair[1]]
    assert {name: getattr(sample, name) for name in values} == values


def test_a_journals_line() -> None:
    (back,) = parse_samples(render_line("key", [Sample(**VALUES)])[:-1])
    compare(back, VALUES)


def test_a_reward_that_is_put_in() -> None:
    new = {"reward": 0.375, "rewards": {"other": 2.0}}
    compare(Sample(**VALUES).graded(new["reward"], new["rewards"]), VALUES | new)


def test_an_engines_answer() -> None:
    class Words:
        def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
            return f"words of {tokens}"

    row = Prompt(3, "the prompt", "the label", {"is": "metadata"}, data_set="the data set")
    visit = Visit(11, row, (13, 14))
    group = PlannedGroup(visit, Request(11, (13, 14), (30, 18)), Sampling(8), "key")
    served = Weights(Path("weights"), 17, "xxh3:1", "label")
    found = [
        Completion((40,), (-1.0,), "stop", "label"),
        Completion((15, 16), (-0.25, -0.5), "length", "label"),
    ]
    _, second = Finisher(served, Words()).finish(group, found)
    made = {
        "sample_index": 1,
        "response": "words of (15, 16)",
        "loss_mask": (1, 1),
        "reward": None,
        "rewards": {},
        "token_versions": (),
        "rollout_index": -1,
    }
    compare(second, VALUES | made)
