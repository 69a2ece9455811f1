"""What a Hugging Face directory of safetensors holds, by the headers of its files alone.

A header is a length and a JSON table. Everything that is wrong with index, headers or the files'
sizes is one ModelError that names the file. No torch is needed: login nodes read them too.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rl.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: safetensors' names of the types that weights may have -> torch's.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
#: A header larger than this is damage, not a model.
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: torch's name of its type, and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Headers:
    """Of all files: name -> tensors, name -> metadata; and the index's text if there is one."""

    files: Mapping[str, Mapping[str, Stored]]
    metadata: Mapping[str, Mapping[str, str]]
    index_text: str | None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors of all files."""
        return {name: t.shape for table in self.files.values() for name, t in table.items()}


def read_headers(folder: Path) -> Headers:
    """The files that the index in `folder` names, or the single one.

    Raises ModelError if a file is missing, truncated or not safetensors, or if a tensor that
    the index names is missing.
    """
    index = folder / INDEX
    text = _read_text(index)
    homes = {} if text is None else _weight_map(index, text)
    files: dict[str, dict[str, Stored]] = {}
    metadata: dict[str, dict[str, str]] = {}
    for name in [SINGLE] if text is None else sorted(set(homes.values())):
        files[name], metadata[name] = _read_header(folder / name)
    headers = Headers(files, metadata, text)
    for tensor, name in homes.items():
        if tensor not in files[name]:
            raise ModelError(f"{index}: {name} does not hold {tensor}")
    return headers


def _read_text(index: Path) -> str | None:
    try:
        return index.read_text()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{index}: cannot be read ({error})") from error


def _weight_map(index: Path, text: str) -> dict[str, str]:
    try:
        mapping = json.loads(text)["weight_map"]
        names = set(mapping.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index}: not an index of safetensors ({error})") from error
    if not names or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{index}: not an index of safetensors (it names no files)")
    return dict(mapping)


def _read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Tensors and metadata of a file, with its size checked against them."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{path}: truncated: the header does not fit into {size} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        metadata = dict(header.pop("__metadata__", None) or {})
        stored = {name: _stored(name, entry) for name, entry in header.items()}
        end = _end_of(header, stored)
    except FileNotFoundError as error:
        raise ModelError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: not a safetensors file ({error})") from error
    if size != 8 + length + end:
        raise ModelError(
            f"{path}: {size} bytes, but its header promises {8 + length + end}",
            hint="the file is truncated or damaged: copy it again",
        )
    return stored, metadata


def _stored(tensor: str, entry: Any) -> Stored:
    """Raises ValueError, KeyError or TypeError for what is no entry of a header."""
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{tensor} has dtype {dtype}, and {', '.join(DTYPES)} are known")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{tensor} has shape {shape}")
    return Stored(DTYPES[dtype], tuple(shape))


def _end_of(header: dict[str, Any], stored: dict[str, Stored]) -> int:
    """Bytes of all tensors, which lie one after the other. Raises ValueError if they do not."""
    spans = sorted((*header[name]["data_offsets"], name) for name in stored)
    end = 0
    for start, stop, name in spans:
        size = math.prod(stored[name].shape) * _BYTES[stored[name].dtype]
        if (start, stop) != (end, end + size):
            raise ValueError(f"{name} lies from {start} to {stop}, where {end} to {end + size} is")
        end = stop
    return end
