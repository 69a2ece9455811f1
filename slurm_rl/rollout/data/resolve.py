"""From the settings to data: which sources there are, and how each is read.

What a data set or an evaluation does not set for itself, `rollout` sets for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from slurm_rl.config.data_names import parse_data_name
from slurm_rl.config.derive import data_sets
from slurm_rl.config.reward_checks import is_made_with_reward
from slurm_rl.config.rollout_schema import DataSet, EvalSet
from slurm_rl.config.row_rules import plan_keys
from slurm_rl.config.schema import Settings
from slurm_rl.rollout.data.columns import FolderSource, ParquetSource
from slurm_rl.rollout.data.cursor import Cursor, start_cursor
from slurm_rl.rollout.data.jsonl import JsonlSource
from slurm_rl.rollout.data.mixture import to_shares
from slurm_rl.rollout.data.procedural import ProceduralSource
from slurm_rl.rollout.data.rows import Prompt, Source
from slurm_rl.rollout.data.stream import Feed, Stream, plan_limit
from slurm_rl.rollout.data.templates import Template, Tokenize, Tokenizer, make_tokenize
from slurm_rl.seeds import derive_seed
from slurm_rl.storage.digest import digest_value

#: A data set of the rollout, or an evaluation: what may set things for itself.
Own = DataSet | EvalSet


@dataclass(frozen=True, slots=True)
class DataPart:
    """One opened data set. place: where the settings have it."""

    own: Own
    place: str
    source: Source
    share: Fraction = Fraction(1)


@dataclass(frozen=True, slots=True)
class PromptData:
    """All data of a run or of an evaluation, open. Close it, or use it in a `with`."""

    parts: Mapping[str, DataPart]
    fingerprint: str

    def __enter__(self) -> PromptData:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def names(self) -> list[str]:
        """The data sets' names, in the order of the settings."""
        return list(self.parts)

    @property
    def path(self) -> str:
        """Where all of it is, for people."""
        return ", ".join(_path(part.own) for part in self.parts.values())

    @property
    def num_rows(self) -> int:
        return sum(part.source.num_rows for part in self.parts.values())

    def read(self, index: int, row: int) -> Prompt:
        """A row of the data set with number `index`. Raises DataError."""
        return self.parts[self.names[index]].source.read(row)

    def check(self) -> None:
        """Read every row once, in constant memory. Raises DataError for the first bad one.

        For iteration 0: later ones know the data by its fingerprint.
        """
        for part in self.parts.values():
            part.source.check()

    def start(self, previous: Any | None) -> Cursor:
        """Where to go on; `previous`: the cursor of the rollout before. Raises DataError."""
        sizes = {name: part.source.num_rows for name, part in self.parts.items()}
        return start_cursor(previous, sizes=sizes, fingerprint=self.fingerprint, path=self.path)

    def close(self) -> None:
        for part in self.parts.values():
            part.source.close()


def resolve(settings: Settings) -> PromptData:
    """The rollout's data, opened. Raises DataError."""
    rollout = settings.rollout
    chosen = data_sets(settings)
    is_single = isinstance(rollout.prompt_data, str)
    shares = to_shares([data_set.weight for data_set in chosen])
    parts: dict[str, DataPart] = {}
    try:
        for index, (own, share) in enumerate(zip(chosen, shares, strict=True)):
            place = "rollout" if is_single else f"rollout.prompt_data[{index}]"
            source = _open_source(own.name, own, settings, place=place)
            parts[own.name] = DataPart(own, place, source, share)
    except BaseException:
        for part in parts.values():
            part.source.close()
        raise
    return _gather(parts)


def resolve_eval(settings: Settings, name: str) -> PromptData:
    """The data of the evaluation `name`, opened. Raises DataError."""
    own = settings.eval[name]
    place = f"eval.{name}"
    source = _open_source(name, own, settings, place=place)
    return _gather({name: DataPart(own, place, source)})


def open_stream(
    data: PromptData,
    settings: Settings,
    *,
    cursor: Any | None,
    tokenizer: Tokenizer,
    context_len: int | None = None,
) -> Stream:
    """The rollout's visits from `cursor` on, as a commit has it; None: from the beginning.

    context_len: tokens that the model takes, where `rollout_max_context_len` is not set.

    Raises DataError if the data is not what the cursor was made with.
    """
    rollout = settings.rollout
    feeds = [
        Feed(
            name=name,
            source=part.source,
            share=part.share,
            tokenize=prompt_tokenizer(tokenizer, settings, part.own, place=part.place),
            seed=derive_seed(settings.seed, "data", name) if rollout.rollout_shuffle else None,
        )
        for name, part in data.parts.items()
    ]
    own_len = rollout.rollout_max_context_len
    limit = plan_limit(
        max_prompt_len=rollout.rollout_max_prompt_len,
        max_context_len=context_len if own_len is None else own_len,
    )
    return Stream(feeds, data.start(cursor), limit=limit)


def prompt_tokenizer(
    tokenizer: Tokenizer, settings: Settings, own: Own, *, place: str = "rollout"
) -> Tokenize:
    """How a data set's prompts become tokens. `place`: where the settings have `own`.

    Tools of the run are shown to prompts that bring none of their own.
    """
    # Imported here: those tools may be the user's, and what they import may be anything.
    from slurm_rl.rollout.turns.tools import tool_schemas

    template = Template(
        data=_path(own),
        place=_setting("apply_chat_template", own, place),
        is_chat=_value("apply_chat_template", own, settings),
        options=settings.rollout.apply_chat_template_kwargs,
        system_prompt=_value("system_prompt", own, settings),
        tools=tool_schemas(settings),
    )
    return make_tokenize(tokenizer, template)


def _open_source(name: str, own: Own, settings: Settings, *, place: str) -> Source:
    keys = plan_keys(settings, own, name=name, place=place)
    found = parse_data_name(_path(own))
    if found.kind == "procedural":
        options = {"seed": derive_seed(settings.seed, "make", name), **own.options}
        is_rewarded = is_made_with_reward(settings, own)
        return ProceduralSource(
            found.source, found.rows, keys, options=options, is_rewarded=is_rewarded
        )
    if found.kind == "jsonl":
        return JsonlSource(found.source, found.rows, keys)
    if found.kind == "parquet":
        return ParquetSource(found.source, found.rows, keys)
    return FolderSource(found.source, found.rows, keys)


def _gather(parts: Mapping[str, DataPart]) -> PromptData:
    made_of = [[name, part.source.fingerprint, str(part.share)] for name, part in parts.items()]
    return PromptData(parts, digest_value(made_of))


def _path(own: Own) -> str:
    return own.path if isinstance(own, DataSet) else own.prompt_data


def _value(key: str, own: Own, settings: Settings) -> Any:
    value = getattr(own, key)
    return getattr(settings.rollout, key) if value is None else value


def _setting(key: str, own: Own, place: str) -> str:
    return f"{'rollout' if getattr(own, key) is None else place}.{key}"
