"""Looks at the teacher's vocabulary: has it as many tokens as are asked for at each place?

Reads the `config.json` of teacher and policy. That they are the same tokens is the init stage's to
say, which reads the tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as File

from slurm_rl.config.model_preflight import read_json
from slurm_rl.config.problems import Problem
from slurm_rl.config.schema import Settings


def check_likeliest(settings: Settings) -> Iterator[Problem]:
    """More likeliest tokens than both models have."""
    teacher = settings.teacher
    if teacher is None or teacher.top_logprobs_num is None:
        return
    sizes = {
        "teacher": _read_size(File(teacher.hf_checkpoint)),
        "policy": _policy_size(settings),
    }
    known = {name: size for name, size in sizes.items() if size is not None}
    if not known:
        return
    name = min(known, key=known.__getitem__)
    if teacher.top_logprobs_num > known[name]:
        rule = f"is more than the {known[name]} tokens of the {name}'s vocabulary"
        path = ("teacher", "top_logprobs_num")
        yield Problem(path, rule, "lower it: some tens are usual", teacher.top_logprobs_num)


def _policy_size(settings: Settings) -> int | None:
    made = settings.init_model
    if made is not None:
        return _as_size(made.sized_config["vocab_size"])
    return None if settings.hf_checkpoint is None else _read_size(File(settings.hf_checkpoint))


def _read_size(folder: File) -> int | None:
    """Tokens by a model's `config.json`; None where it is not there or does not say."""
    return _as_size(read_json(folder / "config.json").get("vocab_size"))


def _as_size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
