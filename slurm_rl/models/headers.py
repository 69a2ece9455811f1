"""What a Hugging Face directory of safetensors holds, by the headers of its files alone.

A header is a length and a JSON table. Everything that is wrong with index, headers or the files'
sizes is one ModelError that names the file. No torch is needed: login nodes read them too.
"""

from __future__ import annotations

import json
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
    files, metadata = {}, {}
    for name in [SINGLE] if text is None else sorted(set(homes.values())):
        header = _read_header(folder / name)
        metadata[name] = header.pop("__metadata__", None) or {}
        files[name] = {t: _stored(folder / name, t, entry) for t, entry in header.items()}
    headers = Headers(files, metadata, text)
    missing = sorted(homes.keys() - headers.shapes.keys())
    if missing:
        raise ModelError(f"{index}: its files do not hold {missing[0]}")
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of safetensors ({error})") from error
    if not names or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{index}: not an index of safetensors (it names no files)")
    return dict(mapping)


def _stored(path: Path, tensor: str, entry: Any) -> Stored:
    if entry["dtype"] not in DTYPES:
        raise ModelError(f"{path}: {tensor} has dtype {entry['dtype']}")
    return Stored(DTYPES[entry["dtype"]], tuple(entry["shape"]))


def _read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, with the file's size checked against it."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{path}: truncated: the header does not fit into {size} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        tables = [entry for name, entry in header.items() if name != "__metadata__"]
        ends = [entry["data_offsets"][1] for entry in tables]
        if any(not isinstance(entry["shape"], list) or "dtype" not in entry for entry in tables):
            raise ValueError("a tensor without type or shape")
    except FileNotFoundError as error:
        raise ModelError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not a safetensors file ({error})") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ModelError(
            f"{path}: {size} bytes, but its header promises {expected}",
            hint="the file is truncated or damaged: copy it again",
        )
    return header
