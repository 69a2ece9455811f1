"""Values of the user's as plain JSON: a copy that nobody else holds, or which entry is none.

Nothing is turned into something else, but for what reads back as the same in JSON anyway: a tuple
is a list, a subclass of a text or a number its value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: Deeper values are refused: what writes and reads JSON has limits of its own.
_DEEPEST = 100


class NotPlain(Exception):
    """`where` (as `metadata['x'][3]`) holds something that JSON cannot: `why` says what."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where} {why}")
        self.where, self.why = where, why


def copy_plain(value: Any, *, name: str) -> Any:
    """A copy of `value`, which is called `name`. Raises NotPlain."""
    return _copy(value, name, 0)


def copy_object(value: Any, *, name: str) -> dict[str, Any]:
    """The same for what must be an object. Raises NotPlain."""
    if not isinstance(value, Mapping):
        raise NotPlain(name, f"is of type {type(value).__name__}, not an object")
    copied: dict[str, Any] = _copy(value, name, 0)
    return copied


def _copy(value: Any, where: str, depth: int) -> Any:
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return _copy_text(value, where)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NotPlain(where, f"is {float(value)}, which JSON does not have")
        return float(value)
    if depth == _DEEPEST:
        raise NotPlain(f"{where[:60]}…", f"is more than {_DEEPEST} levels deep")
    if isinstance(value, (list, tuple)):
        return [_copy(entry, f"{where}[{i}]", depth + 1) for i, entry in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            _copy_key(key, where): _copy(entry, f"{where}[{key!r}]", depth + 1)
            for key, entry in list(value.items())
        }
    raise NotPlain(where, f"is of type {type(value).__name__}, for which JSON has no form")


def _copy_key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise NotPlain(
            where, f"has a name of type {type(key).__name__}, where JSON has texts alone"
        )
    return _copy_text(key, where)


def _copy_text(value: str, where: str) -> str:
    text = str.__str__(value) if type(value) is not str else value
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise NotPlain(where, "holds a text that is no Unicode (half a pair)") from None
    return text
