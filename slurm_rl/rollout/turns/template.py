"""What is new in a conversation, as tokens: the chat template applied to added messages alone.

The model's own words are never encoded again. Text -> tokens is not the inverse of tokens ->
text: a model that said `ab` as two tokens would find it as one after a trip through text, and
the update would then move probabilities of tokens that were never drawn, with log-probs that
belong to others. So a conversation grows by appending; only what others say is encoded.

To get the text of added messages alone, a conversation is rendered whose answer is a marker:
what follows the marker is how the template closes an answer, then the new messages, then how it
opens the next answer. That the rest of the conversation does not matter to it is checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slurm_rl.errors import DataError

Message = Mapping[str, Any]

_MARKER = "answer-7f3b9d"
_EXCHANGE = ({"role": "user", "content": "one"}, {"role": "assistant", "content": "two"})
_BASE = ({"role": "user", "content": "one"}, {"role": "assistant", "content": _MARKER})


class ChatTemplate:
    """The model's template, or none: texts are then encoded as they are.

    options: `rollout.apply_chat_template_kwargs`. tools: schemas that the template shows.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        enabled: bool,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._enabled = enabled
        self._options = dict(options or {}) | ({"tools": list(tools)} if tools else {})
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))

    def encode_prompt(self, messages: str | Sequence[Message]) -> tuple[int, ...]:
        """A conversation that begins, up to where the model speaks; at least one token."""
        if isinstance(messages, str) and self._enabled:
            messages = [{"role": "user", "content": messages}]
        text = self._render(messages, opened=True) if self._enabled else _plain(messages)
        tokens = self._encode(text)
        if not tokens:
            raise DataError("a conversation begins with a prompt that has no tokens")
        return tokens

    def encode_added(self, messages: str | Sequence[Message], *, last: int) -> tuple[int, ...]:
        """What follows an answer when `messages` are added, up to where the model speaks again.

        last: the answer's last token. Where it is an end token, the template's is left out.
        Raises DataError if the template fails, or changes what came before.
        """
        if not self._enabled:
            return self._encode(_plain(messages))
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        closing = self._after_marker(_BASE, opened=False)
        added = self._after_marker((*_BASE, *messages), opened=True)
        elsewhere = self._after_marker((*_EXCHANGE, *_BASE, *messages), opened=True)
        if not added.startswith(closing) or added != elsewhere:
            raise DataError(
                "the chat template renders added messages differently after other messages"
                f" ({_shorten(added)}, {_shorten(elsewhere)}, after {_shorten(closing)})",
                hint="give a template that only appends, as"
                " rollout.apply_chat_template_kwargs.chat_template",
            )
        tokens = self._encode(added)
        return tokens[1:] if self._is_closed(self._encode(closing), tokens, last) else tokens

    def _is_closed(self, closing: tuple[int, ...], tokens: tuple[int, ...], last: int) -> bool:
        """Whether the answer has its end token already, the template's or another of its kind."""
        if not closing or closing[0] != tokens[0]:
            return False
        return closing[0] == last or {closing[0], last} <= self._special

    def _after_marker(self, messages: Sequence[Message], *, opened: bool) -> str:
        parts = self._render(messages, opened=opened).split(_MARKER)
        if len(parts) != 2:
            raise DataError(
                f"the chat template shows an answer {len(parts) - 1} times, not once",
                hint="it cannot be used for several turns",
            )
        return parts[1]

    def _render(self, messages: str | Sequence[Message], *, opened: bool) -> str:
        options = self._options | {"add_generation_prompt": opened}
        conversation = [dict(message) for message in messages]  # type: ignore[arg-type]
        try:
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        except Exception as error:  # the template is a program of the model's or the user's
            roles = ", ".join(str(message.get("role")) for message in conversation)
            raise DataError(
                f"the chat template failed on the roles {roles}: {type(error).__name__}: {error}",
                hint="use a model whose template takes them, or give one as"
                " rollout.apply_chat_template_kwargs.chat_template",
            ) from error
        return str(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # the tokenizers library raises plain Exception
            raise DataError(
                f"the model's tokenizer refuses {_shorten(text)} ({error})",
                hint="a tokenizer of characters knows only those of init_model.characters",
            ) from error


def _plain(messages: str | Sequence[Message]) -> str:
    if isinstance(messages, str):
        return messages
    return "".join(str(message.get("content", "")) for message in messages)


def _shorten(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else shown[:77] + "…"
