"""A Hugging Face directory of safetensors: what is where, reading slices, writing it again.

What is wrong with files is one ModelError that names the file. Writing keeps the source's layout
(which tensor in which file), dtypes and format mark, so that unchanged weights give the same
bytes (metadata other than `format` is dropped). Without a source, or in order to have files of
another size, `plan_layout` cuts one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slurm_rl.errors import ModelError
from slurm_rl.models.headers import INDEX, SINGLE, read_headers

#: What files are cut at unless somebody says otherwise.
FILE_SIZE_BYTES = 5_000_000_000
#: Names of the ways to store weights: never taken along, since they would be stale.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """Which file holds which tensor, in what dtype and shape; `header` is each file's
    metadata; `index_text` the index file's text (None for a single file)."""

    files: dict[str, tuple[str, ...]]
    dtypes: dict[str, torch.dtype]
    shapes: dict[str, tuple[int, ...]]
    headers: dict[str, dict[str, str]]
    index_text: str | None


def read_layout(folder: Path) -> WeightsLayout:
    """The layout of the weights in `folder`, from their headers alone; ModelError as they say."""
    found = read_headers(folder)
    stored = {name: tensor for table in found.files.values() for name, tensor in table.items()}
    return WeightsLayout(
        files={name: tuple(sorted(table)) for name, table in found.files.items()},
        dtypes={name: getattr(torch, tensor.dtype) for name, tensor in stored.items()},
        shapes=found.shapes,
        # safetensors writes metadata in no fixed order: with one key there is only one.
        headers={
            name: {key: metadata[key] for key in ("format",) if key in metadata}
            for name, metadata in found.metadata.items()
        },
        index_text=found.index_text,
    )


def plan_layout(
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    *,
    file_size_bytes: int = FILE_SIZE_BYTES,
) -> WeightsLayout:
    """A layout of tensors in the order given: one file, or several of at most `file_size_bytes`
    with an index. A tensor that is larger has a file to itself."""
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    cut: list[list[str]] = [[]]
    room = file_size_bytes
    for name, size in sizes.items():
        if size > room and cut[-1]:
            cut.append([])
            room = file_size_bytes
        cut[-1].append(name)
        room -= size
    names = [SINGLE]
    if len(cut) > 1:
        names = [f"model-{i + 1:05d}-of-{len(cut):05d}.safetensors" for i in range(len(cut))]
    home = {tensor: name for name, members in zip(names, cut, strict=True) for tensor in members}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": home}
    return WeightsLayout(
        files={name: tuple(sorted(members)) for name, members in zip(names, cut, strict=True)},
        dtypes=dict(dtypes),
        shapes=dict(shapes),
        headers={name: {"format": "pt"} for name in names},
        index_text=json.dumps(index, indent=2, sort_keys=True) + "\n" if len(cut) > 1 else None,
    )


class WeightsReader:
    """Opens the files of a layout and reads slices; a context manager."""

    def __init__(self, folder: Path, layout: WeightsLayout) -> None:
        self._folder = folder
        self._layout = layout
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._home = {t: name for name, tensors in layout.files.items() for t in tensors}

    def __enter__(self) -> WeightsReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def read(self, name: str, axis: int | None, start: int, stop: int) -> torch.Tensor:
        """Tensor `name`, or its rows (axis 0) or columns (axis 1) start:stop."""
        if name not in self._home:
            raise ModelError(f"{self._folder}: tensor {name} is missing")
        handle = self._handle(self._home[name])
        if axis is None:
            tensor: torch.Tensor = handle.get_tensor(name)
            return tensor
        part = handle.get_slice(name)
        return part[start:stop] if axis == 0 else part[:, start:stop]

    def _handle(self, name: str) -> Any:
        if name not in self._open:
            opened = safe_open(str(self._folder / name), framework="pt")
            self._open[name] = self._stack.enter_context(opened)
        return self._open[name]


def read_companions(folder: Path) -> dict[str, bytes]:
    """What lies in a Hugging Face directory beside its weights: name -> bytes."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != INDEX and path.suffix not in _WEIGHT_SUFFIXES
    }


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, layout: WeightsLayout
) -> Iterator[str]:
    """Write the layout's files into `folder` as their tensors come; yields finished names.

    Each tensor is cast to the layout's dtype. A file is written when its last tensor has
    come, so that no more than the unfinished files are held in memory. A crash midway
    leaves files that nothing names yet. AssertionError if a tensor is missing at the end.
    """
    home = {t: name for name, members in layout.files.items() for t in members}
    pending: dict[str, dict[str, torch.Tensor]] = {name: {} for name in layout.files}
    for tensor, value in tensors:
        name = home[tensor]
        pending[name][tensor] = value.detach().to("cpu", layout.dtypes[tensor]).contiguous()
        if len(pending[name]) == len(layout.files[name]):
            save_file(pending.pop(name), folder / name, metadata=layout.headers[name] or None)
            yield name
    assert not pending, f"tensors are missing from {sorted(pending)}"
    if layout.index_text is not None:
        (folder / INDEX).write_text(layout.index_text)
        yield INDEX
