"""Content digests. One algorithm everywhere: XXH3 with 128 bits, written `xxh3:<hex>`.

It finds accidents, not adversaries; it is faster than any disk that holds a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from slurm_rl.types import FileEntry, canonical_json

_PREFIX = "xxh3:"
_BLOCK_BYTES = 4 << 20


def digest_bytes(data: bytes) -> str:
    """Digest of `data`."""
    return _PREFIX + xxhash.xxh3_128_hexdigest(data)


def digest_blocks(blocks: Iterable[bytes]) -> str:
    """Digest of bytes that come in pieces, wherever they were cut."""
    state = xxhash.xxh3_128()
    for block in blocks:
        state.update(block)
    return _PREFIX + state.hexdigest()


def digest_value(value: Any) -> str:
    """Digest of a JSON value, whatever the order of its keys."""
    return digest_bytes(canonical_json(value))


def digest_file(path: Path) -> str:
    """Digest of a file's bytes, read in blocks."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            state.update(block)
    return _PREFIX + state.hexdigest()


def digest_entries(entries: Iterable[FileEntry]) -> str:
    """One digest for a set of files: their paths and digests, in path order."""
    return digest_value(sorted([entry.path, entry.digest] for entry in entries))
