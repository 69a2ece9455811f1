"""From a prompt to tokens: raw without special tokens, or through the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slurm_rl.errors import DataError
from slurm_rl.rollout.data.rows import Prompt

Tokenize = Callable[[Prompt], list[int]]

_SYSTEM_ROLES = ("system", "developer")
#: Where transformers has the tokenizers that no model changes.
_PLAIN = "transformers.tokenization_utils"


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Template:
    """How the prompts of one data set are written out.

    data:  the data set, for errors. place: the setting that turns the template on.
    tools: those of the run, for prompts that bring none.
    """

    data: str
    place: str = "rollout.apply_chat_template"
    is_chat: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    tools: Sequence[dict[str, Any]] = ()


def make_tokenize(tokenizer: Tokenizer, template: Template) -> Tokenize:
    """A function from a prompt to its tokens, at least one. It raises DataError."""

    def raw(prompt: Prompt) -> list[int]:
        text = prompt.prompt
        if not isinstance(text, str):
            raise DataError(
                f"{_place(template, prompt)}: the prompt is a list of messages",
                hint=f"set {template.place}: true",
            )
        return _encode(tokenizer, text, place=_place(template, prompt))

    def chat(prompt: Prompt) -> list[int]:
        place = _place(template, prompt)
        text = _write_out(tokenizer, prompt, template, place=place)
        return _encode(tokenizer, text, place=place)

    return chat if template.is_chat else raw


def _place(template: Template, prompt: Prompt) -> str:
    """Where a prompt was read: its file and line, where it has them."""
    return prompt.place or f"{template.data}: row {prompt.row}"


def to_messages(prompt: Any, *, system_prompt: str | None) -> list[dict[str, Any]]:
    """A prompt as a conversation, which `system_prompt` begins unless it has its own beginning."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt is not None and messages[0]["role"] not in _SYSTEM_ROLES:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _write_out(tokenizer: Tokenizer, prompt: Prompt, template: Template, *, place: str) -> str:
    options = {"add_generation_prompt": True, **template.options}
    tools = prompt.tools if prompt.tools is not None else list(template.tools)
    if tools:
        options["tools"] = tools
    messages = to_messages(prompt.prompt, system_prompt=template.system_prompt)
    try:
        # As text first: whether `tokenize=True` returns ids or a mapping depends on the
        # version of transformers.
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # a template is a program, which fails in its own ways
        raise DataError(
            f"{place}: the chat template failed: {str(error).partition(chr(10))[0]}",
            hint=f"use a model with a chat template, or set {template.place}: false",
        ) from error
    return str(text)


def _to_ids(tokenizer: Any, text: str) -> list[int]:
    """What `tokenizer.encode` says; where that only asks the tokenizers library and does nothing
    more, it is asked here, which takes half the time."""
    own = [getattr(type(tokenizer), name, None) for name in ("encode", "_encode_plus")]
    if all(getattr(f, "__module__", "").startswith(_PLAIN) for f in own):
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        is_set = backend is None or (  # by another call
            backend.truncation or backend.padding or backend.encode_special_tokens
        )
        if not is_set and not tokenizer.split_special_tokens:
            return list(backend.encode(text, add_special_tokens=False).ids)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _encode(tokenizer: Tokenizer, text: str, *, place: str) -> list[int]:
    try:
        tokens = _to_ids(tokenizer, text)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise DataError(
            f"{place}: the model's tokenizer refuses the prompt ({error})",
            hint="a tokenizer of characters knows only those of init_model.characters",
        ) from error
    if not tokens:
        raise DataError(f"{place}: the prompt has no tokens", hint="write it, or take the row out")
    return tokens
