"""Which experts each token of a sample was sent to, as the engine says it, for the trainer.

Owns the form that travels with a sample (`text`: JSON can hold it, and two are equal when the ids
are), its check against the model, and what stands where an engine never looked. Knows no engine.

    routed   uint8[T, L, K]   T tokens of a sample, all L layers of the model, K experts of each

Layers without experts hold zeros. The row of a token that no later log-prob of a trained token
depends on may name any K experts: 0, 1, …, K - 1.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_rl.config.model_size import dense_layers, num_experts
from slurm_rl.errors import EngineError, ModelError

#: Ids are stored as uint8.
MOST_EXPERTS = 256
_HINT = "take out rollout.use_rollout_routing_replay to train without the engine's routing"


@dataclass(frozen=True, slots=True)
class Experts:
    """A model's mixture of experts. layers: all of the model; dense: those without experts."""

    layers: int
    per_token: int
    num: int
    dense: frozenset[int]


def read_experts(folder: Path) -> Experts:
    """Of the model in a Hugging Face directory. ModelError if it has none, or too many."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
        return find_experts(config)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path}: says nothing of experts ({error})", hint=_HINT) from error


def find_experts(config: Mapping[str, Any]) -> Experts:
    """As `read_experts`, of a config; ValueError or KeyError."""
    num, layers = num_experts(config), int(config["num_hidden_layers"])
    if not 0 < num <= MOST_EXPERTS:
        raise ValueError(f"{num} experts, where 1 to {MOST_EXPERTS} can be replayed")
    per_token = int(config["num_experts_per_tok"])
    if not 0 < per_token <= num:
        raise ValueError(f"num_experts_per_tok = {per_token} of {num} experts")
    return Experts(layers, per_token, num, frozenset(dense_layers(config, layers)))


def write_routed(routed: NDArray[np.uint8]) -> str:
    """The form that travels: `L.K.` and the ids as base64."""
    _, layers, per_token = routed.shape
    return f"{layers}.{per_token}." + base64.b64encode(routed.tobytes()).decode()


def read_routed(text: str) -> NDArray[np.uint8]:
    """The ids of `write_routed`. ValueError for a text that is none of its."""
    layers, per_token, data = text.split(".")
    ids = np.frombuffer(base64.b64decode(data, validate=True), np.uint8)
    return ids.reshape(-1, int(layers), int(per_token))


def fill(num_tokens: int, layers: int, per_token: int) -> NDArray[np.uint8]:
    """Rows of tokens that nothing depends on."""
    row = np.arange(per_token, dtype=np.uint8)
    return np.broadcast_to(row, (num_tokens, layers, per_token)).copy()


def join_routed(
    parts: Sequence[tuple[NDArray[np.uint8] | None, int, bool]],
) -> NDArray[np.uint8] | None:
    """The ids of all parts, each of (ids, tokens, whether any is trained on); None if none has any.

    A part without ids gets any. ValueError if it is trained on, or if parts do not fit each other.
    """
    forms = sorted({ids.shape[1:] for ids, _, _ in parts if ids is not None})
    if not forms:
        return None
    if len(forms) > 1:
        raise ValueError(f"layers and experts are {list(forms[0])} and {list(forms[1])}")
    joined = []
    for ids, num, is_trained in parts:
        if ids is None and is_trained:
            raise ValueError("some samples have none, and are trained on")
        if ids is not None and len(ids) != num:
            raise ValueError(f"{len(ids)} rows for {num} tokens")
        joined.append(fill(num, *forms[0]) if ids is None else ids)
    return np.concatenate(joined)


def parse_routed(given: Any, experts: Experts, *, num_tokens: int, what: str) -> str:
    """An engine's answer, base64 of int32[num_tokens - 1, L, K], checked; with the last row.

    EngineError says of what sample (`what`) and what was expected.
    """
    shape = (num_tokens - 1, experts.layers, experts.per_token)
    if not isinstance(given, str):
        got = "nothing" if given is None else f"a {type(given).__name__}"
        raise EngineError(
            f"{what}: no routed experts: int32{[*shape]} expected, {got} got", hint=_HINT
        )
    try:
        data = base64.b64decode(given, validate=True)
    except (ValueError, binascii.Error) as error:
        raise EngineError(
            f"{what}: its routed experts are not base64 ({error})", hint=_HINT
        ) from error
    size = 4 * shape[0] * shape[1] * shape[2]
    if len(data) != size:
        raise EngineError(
            f"{what}: routed experts of {len(data)} bytes, where int32{[*shape]} has {size}",
            hint=_HINT,
        )
    return check_routed(np.frombuffer(data, np.dtype("<i4")).reshape(shape), experts, what=what)


def check_routed(ids: NDArray[Any], experts: Experts, *, what: str) -> str:
    """Ids of all tokens but the last, checked, in the form that travels, with the last row."""
    if ids.size and not (ids.min() >= 0 and ids.max() < experts.num):
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise EngineError(
            f"{what}: the expert {wrong} among its routed experts, of {experts.num}", hint=_HINT
        )
    ordered = np.sort(ids, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
    dense = sorted(experts.dense)
    twice[:, dense] = False
    if twice.any():
        token, layer = (int(x) for x in np.argwhere(twice)[0])
        raise EngineError(
            f"{what}: token {token} is sent twice to one expert in layer {layer}:"
            f" {ids[token, layer].tolist()}",
            hint=_HINT,
        )
    last = fill(1, experts.layers, experts.per_token)
    whole = np.concatenate([ids.astype(np.uint8), last])
    whole[:, dense] = 0
    return write_routed(whole)


def cover(text: str, *, known: int, num_tokens: int) -> str:
    """The ids of the first `known` tokens, and any for the rest of `num_tokens`."""
    routed = read_routed(text)
    is_dense = ~routed.any(axis=(0, 2)) if routed.shape[2] > 1 else np.zeros(routed.shape[1], bool)
    rest = fill(num_tokens - known, *routed.shape[1:])
    rest[:, is_dense] = 0
    return write_routed(np.concatenate([routed[:known], rest]))


def replace_start(text: str, other: str, *, num: int) -> str:
    """The ids of a sample, its first `num` tokens' those of `other`."""
    return write_routed(np.concatenate([read_routed(other)[:num], read_routed(text)[num:]]))


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    least = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:least]) != np.asarray(other[:least]))
    return int(differ[0]) if len(differ) else least
