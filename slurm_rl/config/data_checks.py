"""Rules about data: names of data sets, what they may set, and what could have no effect. Pure.

Which file is there, and whether its rows have the keys, is for data_preflight.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slurm_rl.config.data_names import find_fault, parse_data_name
from slurm_rl.config.derive import stage_env
from slurm_rl.config.problems import Path, Problem
from slurm_rl.config.rollout_schema import KEY_FIELDS, Overrides, Rollout
from slurm_rl.config.schema import EVAL_PREFIX, Settings

Problems = Iterator[Problem]

#: Data sets of reasoning-gym 0.1.25 that walk over Python sets: their prompts depend on the process
#: that makes them, unless its hash seed is fixed. Found by comparing 40 rows of each there is.
UNSTABLE = (
    "intermediate_integration",
    "isomorphic_strings",
    "knight_swap",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
_HASH_SEED = "PYTHONHASHSEED"
#: What only a chat template looks at.
_TEMPLATE_ONLY = ("tool_key", "system_prompt", "apply_chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class DataUse:
    """A data set where the settings have it: of the rollout, or of an evaluation.

    at: the place of its name. own_at: the place of what it sets for itself; None: there is none.
    kind: the stage that reads it.
    """

    at: Path
    text: str
    own: Overrides
    own_at: Path | None
    options_at: Path
    options: dict[str, object]
    kind: str = "rollout"

    @property
    def is_procedural(self) -> bool:
        return parse_data_name(self.text).kind == "procedural"

    def has_template(self, rollout: Rollout) -> bool:
        own = self.own.apply_chat_template
        return rollout.apply_chat_template if own is None else own


def data_uses(settings: Settings) -> list[DataUse]:
    """Every data set that the settings name, in their order."""
    at: Path = ("rollout", "prompt_data")
    data, options = settings.rollout.prompt_data, settings.rollout.data_options
    if isinstance(data, str):
        uses = [DataUse(at, data, Overrides(), None, ("rollout", "data_options"), options)]
    else:
        uses = [
            DataUse((*at, i, "path"), own.path, own, (*at, i), (*at, i, "options"), own.options)
            for i, own in enumerate(data)
        ]
    for name, own in settings.eval.items():
        here: Path = ("eval", name)
        kind = f"{EVAL_PREFIX}{name}"
        uses.append(
            DataUse(
                (*here, "prompt_data"),
                own.prompt_data,
                own,
                here,
                (*here, "options"),
                own.options,
                kind,
            )
        )
    return uses


def check_data(settings: Settings) -> Problems:
    """Names, overrides, and settings of data that cannot take effect."""
    uses = data_uses(settings)
    yield from _check_mixture(settings.rollout)
    for use in uses:
        fault = find_fault(use.text)
        if fault is not None:
            yield Problem(use.at, *fault, use.text)
            continue
        yield from _check_options(use)
        yield from _check_own(use, settings.rollout)
        yield from _check_hash_seed(use, settings)
    yield from _check_shared(uses, settings.rollout)


def _check_mixture(rollout: Rollout) -> Problems:
    data, at = rollout.prompt_data, ("rollout", "prompt_data")
    if isinstance(data, str):
        return
    if rollout.data_options:
        rule, fix = "is for a single data set", "give each data set its own options"
        yield Problem(("rollout", "data_options"), rule, fix)
    if not data:
        yield Problem(at, "is empty", "name a data set")
    if len(data) == 1 and data[0].weight != 1:
        rule = "has no effect: there is one data set"
        yield Problem((*at, 0, "weight"), rule, "take it out", data[0].weight)
    names = [own.name for own in data]
    for i, name in enumerate(names):
        if name in names[:i]:
            yield Problem((*at, i, "name"), "is there twice", "rename one of them", name)
    for i, own in enumerate(data):
        if own.rollout_temperature == 0:
            rule = "must be above 0: log-probs are taken at it"
            fix = "raise it; 0 is for evaluations"
            yield Problem((*at, i, "rollout_temperature"), rule, fix, 0)


def _check_options(use: DataUse) -> Problems:
    if use.options and not use.is_procedural:
        rule = "has no effect: the rows are read, not made"
        yield Problem(use.options_at, rule, "take it out, or name reasoning_gym:NAME")


def _check_own(use: DataUse, rollout: Rollout) -> Problems:
    if use.own_at is None:
        return
    own, at = use.own, use.own_at
    if own.rm_type is not None and own.custom_rm_path is not None:
        rule = "is given beside rm_type"
        yield Problem((*at, "custom_rm_path"), rule, "keep one of the two", own.custom_rm_path)
    if own.rollout_top_k is not None and own.rollout_top_k != -1 and own.rollout_top_k < 1:
        rule = "must be at least 1, or -1 for all tokens"
        yield Problem((*at, "rollout_top_k"), rule, "change it", own.rollout_top_k)
    for name in KEY_FIELDS:
        if use.is_procedural and getattr(own, name) is not None:
            rule = "has no effect: the rows are made, not read"
            yield Problem((*at, name), rule, "take it out", getattr(own, name))
    for name in _TEMPLATE_ONLY:
        value = getattr(own, name, None)
        if value is not None and not use.has_template(rollout):
            rule = "has no effect without apply_chat_template"
            yield Problem((*at, name), rule, "set apply_chat_template: true")


def _check_hash_seed(use: DataUse, settings: Settings) -> Problems:
    name = parse_data_name(use.text)
    if name.kind != "procedural" or name.source not in UNSTABLE:
        return
    if stage_env(settings, use.kind).get(_HASH_SEED, "random") == "random":
        rule = f"makes other prompts in each process unless {_HASH_SEED} is set"
        yield Problem(use.at, rule, f"add {_HASH_SEED}: 0 to env", use.text)


def _check_shared(uses: list[DataUse], rollout: Rollout) -> Problems:
    """Settings of `rollout` that no data set would look at."""
    if not uses:
        return
    for name in KEY_FIELDS:
        value = getattr(rollout, name)
        is_set = value != Rollout.model_fields[name].default
        if is_set and all(use.is_procedural for use in uses):
            rule = "has no effect: the rows are made, not read"
            yield Problem(("rollout", name), rule, "take it out", value)
    for name in _TEMPLATE_ONLY:
        value = getattr(rollout, name)
        if value not in (None, {}) and not any(use.has_template(rollout) for use in uses):
            rule = "has no effect without apply_chat_template"
            yield Problem(("rollout", name), rule, "set apply_chat_template: true")
