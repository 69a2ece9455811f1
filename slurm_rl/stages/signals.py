"""The file between the stages that score a rollout and those that train on it.

`signals.safetensors` holds what a stage computed for each response token of a rollout, in the
rollout's order, and whose tokens they are. The commit names the rollout by its digest (a parent):
numbers never meet another rollout's samples.

    group_index, sample_index, response_lengths   int64[B]   the samples, in the rollout's order
    proximal, reference, teacher, values          float32[R] as far as the stage computed them
    top_ids int64[R, K], top_logprobs float32[R, K]          a teacher's likeliest tokens

Legend: B samples, R response tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from slurm_rl.errors import CorruptError
from slurm_rl.rollout.samples import SampleBatch
from slurm_rl.storage.damage import check_inputs
from slurm_rl.storage.durable import seal_files
from slurm_rl.types import FileEntry, Input, Order

if TYPE_CHECKING:
    import torch

    from slurm_rl.train.returns import Signals

SIGNALS_NAME = "signals.safetensors"
#: Which stages may have computed what.
MAKERS: Mapping[str, tuple[str, ...]] = {
    "reference": ("proximal", "reference"),
    "teacher": ("teacher", "top_ids", "top_logprobs"),
    "critic": ("values",),
}
_KEYS = ("group_index", "sample_index", "response_lengths")


def write_signals(
    folder: Path, samples: SampleBatch, signals: Mapping[str, torch.Tensor]
) -> list[FileEntry]:
    """Write the file into `folder`, durably; returns its entry. A crash leaves an unnamed file."""
    import torch
    from safetensors.torch import save_file

    keys = {name: torch.from_numpy(values) for name, values in _keys_of(samples).items()}
    tensors = {**keys, **{name: values.contiguous() for name, values in signals.items()}}
    save_file(tensors, folder / SIGNALS_NAME)
    return seal_files(folder, [SIGNALS_NAME])


def read_signals(order: Order, samples: SampleBatch) -> Signals:
    """What the stages before computed for `samples`: all of the rollout's, or those that are left.

    Raises CorruptError if a stage worked on another rollout, or on other samples.
    """
    from slurm_rl.train.returns import Signals

    found: dict[str, torch.Tensor] = {}
    for role in MAKERS:
        source = order.inputs.get(role)
        if source is not None and source.kind == role and SIGNALS_NAME in source.files:
            _check_rollout(source, order)
            found |= _read(source, samples)
    return Signals(**found)


def _check_rollout(source: Input, order: Order) -> None:
    made_from = source.content.get("parents", {}).get("rollout")
    if made_from != order.input("rollout").digest:
        raise CorruptError(
            f"{order.kind} {order.iteration}: the {source.kind} stage scored another rollout "
            f"({made_from}) than the one that is trained on"
        )


def _read(source: Input, samples: SampleBatch) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    check_inputs(source, [SIGNALS_NAME])
    path = source.files[SIGNALS_NAME]
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CorruptError(f"{path}: not a whole safetensors file ({error})") from error
    names = [name for name in MAKERS[source.kind] if name in tensors]
    if not names or any(key not in tensors for key in _KEYS):
        raise CorruptError(f"{path}: holds none of {', '.join(MAKERS[source.kind])}")
    keys = {name: tensors[name].numpy() for name in _KEYS}
    total = int(keys["response_lengths"].sum())
    for name in names:
        if len(tensors[name]) != total:
            raise CorruptError(f"{path}: {name} has {len(tensors[name])} tokens, not {total}")
    places = _find_places(keys, samples, path)
    return {name: tensors[name] if places is None else tensors[name][places] for name in names}


def _find_places(keys: dict[str, Any], samples: SampleBatch, path: str) -> NDArray[Any] | None:
    """Where the response tokens of `samples` are; None: in their place, all of them."""
    own = _keys_of(samples)
    if all(np.array_equal(keys[name], own[name]) for name in _KEYS):
        return None
    ends = np.cumsum(keys["response_lengths"])
    pairs = zip(keys["group_index"].tolist(), keys["sample_index"].tolist(), strict=True)
    place = {pair: row for row, pair in enumerate(pairs)}
    parts = [np.zeros(0, np.int64)]
    for group, sample, length in zip(*(own[name].tolist() for name in _KEYS), strict=True):
        row = place.get((group, sample))
        if row is None or int(keys["response_lengths"][row]) != length:
            raise CorruptError(f"{path}: sample {sample} of group {group} is not in it as it is")
        parts.append(np.arange(ends[row] - length, ends[row]))
    return np.concatenate(parts)


def _keys_of(samples: SampleBatch) -> dict[str, NDArray[np.int64]]:
    return {name: getattr(samples, name).astype(np.int64) for name in _KEYS}
