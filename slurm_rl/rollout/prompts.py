"""Prompts: reading them, the order in which they are visited, and where to go on.

Owns the data cursor. The order of an epoch is a function of (seed, epoch), so the cursor is
two numbers and a fingerprint of the data; nothing else has to be remembered. It refuses to
go on when the data is not what the cursor was made with.

A prompt that is too long is skipped when the cursor meets it, so that no job tokenizes the
whole set first. Positions count every row, skipped ones too.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from slurm_rl.config.schema import Rollout
from slurm_rl.errors import CorruptError, DataError
from slurm_rl.seeds import permutation
from slurm_rl.storage.digest import digest_bytes

log = logging.getLogger(__name__)

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row: `prompt` is a text or a list of chat messages."""

    row: int
    prompt: Any
    label: Any
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """All rows of a prompt file (or of a slice of it), and a digest of their bytes."""

    path: str
    prompts: tuple[Prompt, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Cursor:
    """The next visit: `position` in the order of `epoch`. Example: `Cursor(1, 16, "xxh3:…")`."""

    epoch: int
    position: int
    data_fingerprint: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Visit:
    """A prompt taken into a batch. `group_index` = epoch × rows + position: unique in a run."""

    group_index: int
    prompt: Prompt
    tokens: tuple[int, ...]


def read_prompts(settings: Rollout) -> PromptSet:
    """The rows that `prompt_data` names; `path@[a:b]` takes a Python slice of its rows.

    Raises DataError with the file and line for what cannot be used: no file, no rows, JSON
    that is broken or not an object, a missing key.
    """
    path, wanted = parse_slice(settings.prompt_data)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"rollout.prompt_data: {path}: {error.strerror}", hint="give the path of a jsonl file"
        ) from error
    lines = [(n, line) for n, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    chosen = lines[wanted]
    if not chosen:
        raise DataError(
            f"rollout.prompt_data: {settings.prompt_data} has no prompts"
            f" ({len(lines)} rows in the file)"
        )
    prompts = tuple(
        _parse_row(f"{path}:{number}", line, row=row, settings=settings)
        for row, (number, line) in enumerate(chosen)
    )
    fingerprint = digest_bytes(b"\n".join(line for _, line in chosen))
    return PromptSet(path=path, prompts=prompts, fingerprint=fingerprint)


def parse_slice(text: str) -> tuple[str, slice]:
    """`data.jsonl@[10:20]` as a path and a slice; without one, every row."""
    found = _SLICE.match(text)
    if not found:
        return text, slice(None)
    bounds = [int(found[name]) if found[name] else None for name in ("start", "stop")]
    return found["path"], slice(*bounds)


def start_cursor(data: PromptSet, previous: dict[str, Any] | None) -> Cursor:
    """Where this iteration goes on: at the beginning, or where the rollout before it stopped.

    Raises DataError if the data changed in between: positions would mean other prompts.
    """
    if previous is None:
        return Cursor(0, 0, data.fingerprint)
    try:
        cursor = Cursor(**previous)
    except TypeError as error:
        raise CorruptError(f"the previous rollout's cursor is not one: {previous}") from error
    if cursor.data_fingerprint != data.fingerprint:
        raise DataError(
            f"{data.path}: the prompts are not those of the previous iteration"
            f" ({data.fingerprint}, they were {cursor.data_fingerprint})",
            hint="put the old file back, or start a new run with the new one",
        )
    return cursor


def take_batch(
    data: PromptSet,
    cursor: Cursor,
    *,
    num_prompts: int,
    order: Callable[[int], list[int]],
    tokenize: Callable[[Prompt], list[int]],
    max_tokens: int | None,
) -> tuple[list[Visit], Cursor]:
    """The next `num_prompts` visits from `cursor`, and the cursor after them.

    order:      the rows of an epoch, in the order of visits.
    max_tokens: prompts longer than this are skipped; DataError if a whole epoch is.
    """
    num_rows = len(data.prompts)
    epoch, position = cursor.epoch, cursor.position
    rows = order(epoch)
    visits: list[Visit] = []
    num_skipped = skipped_in_a_row = 0
    while len(visits) < num_prompts:
        prompt = data.prompts[rows[position]]
        tokens = tokenize(prompt)
        if max_tokens is not None and len(tokens) > max_tokens:
            num_skipped, skipped_in_a_row = num_skipped + 1, skipped_in_a_row + 1
            if skipped_in_a_row >= num_rows:
                raise DataError(
                    f"{data.path}: every prompt is longer than"
                    f" rollout.rollout_max_prompt_len = {max_tokens}"
                )
        else:
            visits.append(Visit(epoch * num_rows + position, prompt, tuple(tokens)))
            skipped_in_a_row = 0
        position += 1
        if position == num_rows:
            epoch, position = epoch + 1, 0
            rows = order(epoch)
    if num_skipped:
        log.info("skipped %d prompts longer than %s tokens", num_skipped, max_tokens)
    return visits, Cursor(epoch, position, data.fingerprint)


def epoch_order(num_rows: int, *, seed: int, shuffle: bool) -> Callable[[int], list[int]]:
    """The order of any epoch, as a function of the epoch alone."""
    if shuffle:
        return lambda epoch: permutation(num_rows, seed=seed, epoch=epoch)
    return lambda epoch: list(range(num_rows))


def _encode(tokenizer: Tokenizer, text: str, *, place: str) -> list[int]:
    """Token ids of a prompt, at least one. Raises DataError naming `place`."""
    try:
        tokens = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise DataError(
            f"{place}: the model's tokenizer refuses the prompt ({error})",
            hint="a tokenizer of characters knows only those of init_model.characters",
        ) from error
    if not tokens:
        raise DataError(f"{place}: the prompt has no tokens")
    return tokens


def prompt_tokenizer(tokenizer: Tokenizer, settings: Rollout) -> Callable[[Prompt], list[int]]:
    """How a prompt becomes tokens: raw without special tokens, or through the chat template."""

    def raw(prompt: Prompt) -> list[int]:
        if not isinstance(prompt.prompt, str):
            raise DataError(
                f"{settings.prompt_data}: row {prompt.row}: the prompt is a list of messages",
                hint="set rollout.apply_chat_template: true",
            )
        return encode(prompt.prompt, prompt)

    def chat(prompt: Prompt) -> list[int]:
        messages = prompt.prompt
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        options = {"add_generation_prompt": True} | settings.apply_chat_template_kwargs
        try:
            # As text first: whether `tokenize=True` returns ids or a mapping depends on the
            # version of transformers.
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except ValueError as error:
            raise DataError(
                f"{settings.prompt_data}: row {prompt.row}: the chat template failed: {error}",
                hint="use a model with a chat template, or set rollout.apply_chat_template: false",
            ) from error
        return encode(text, prompt)

    def encode(text: str, prompt: Prompt) -> list[int]:
        return _encode(tokenizer, text, place=f"{settings.prompt_data}: row {prompt.row}")

    return chat if settings.apply_chat_template else raw


def _parse_row(place: str, line: bytes, *, row: int, settings: Rollout) -> Prompt:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: not JSON ({error})", hint="one JSON object a line") from error
    if not isinstance(values, dict):
        raise DataError(f"{place}: a {type(values).__name__}", hint="one JSON object a line")
    prompt = _take_key(values, "input_key", settings.input_key, place=place)
    if not isinstance(prompt, str | list):
        raise DataError(
            f"{place}: {settings.input_key!r} is a {type(prompt).__name__};"
            " a prompt is a text or a list of messages"
        )
    label = metadata = None
    if settings.label_key is not None:
        label = _take_key(values, "label_key", settings.label_key, place=place)
    if settings.metadata_key is not None:
        metadata = values.get(settings.metadata_key)  # rows may lack it
    if metadata is not None and not isinstance(metadata, dict):
        raise DataError(f"{place}: {settings.metadata_key!r} is not an object")
    return Prompt(row, prompt, label, metadata or {})


def _take_key(values: dict[str, Any], field: str, key: str, *, place: str) -> Any:
    if key not in values:
        raise DataError(
            f"{place}: no key {key!r} (rollout.{field}); there are {sorted(values)}",
            hint=f"set rollout.{field} to one of them",
        )
    return values[key]
