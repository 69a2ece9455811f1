"""Whether committed files are what was committed: the one comparison that everybody makes.

`verify` re-reads whole runs with it, a stage reads its inputs through it. What this node may merely
see late is waited for; what is then missing, short or different is damage. A file that cannot be
read at all (EIO) may be whole: that is not called damage.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slurm_rl.errors import CorruptError, StorageError
from slurm_rl.storage.digest import digest_file
from slurm_rl.storage.durable import VISIBLE_S, wait_for_size
from slurm_rl.storage.fs import POSIX, Fs
from slurm_rl.types import FileEntry, Input

_HINT = "`slurm-rl verify RUN` lists all damage; restore the file, or go back before it"


def describe_damage(
    path: Path, entry: FileEntry, *, patience_s: float = 0.0, fs: Fs = POSIX
) -> str:
    """How the file at `path` is not what `entry` says, in words; empty if it is.

    patience_s: how long a size that is not (yet) the committed one is waited for. Raises OSError
    if the file is there and cannot be read.
    """
    size = wait_for_size(path, entry.size_bytes, patience_s=patience_s, fs=fs)
    if size < 0:
        return f"{path}: No such file, but it was committed"
    if size != entry.size_bytes:
        return f"{path}: {size} bytes, but {entry.size_bytes} were committed"
    digest = digest_file(path)
    if digest != entry.digest:
        return f"{path}: digest {digest}, but {entry.digest} was committed"
    return ""


def check_inputs(
    source: Input,
    names: Iterable[str],
    *,
    share: tuple[int, int] = (0, 1),
    patience_s: float = VISIBLE_S,
    fs: Fs = POSIX,
) -> None:
    """Read the files `names` of a stage's input and compare each with its commit.

    Each of `size` ranks (`share` is rank and size) reads every size-th file, so that together they
    read each one once. Raises CorruptError naming the first that is not what was committed, and
    StorageError for one that cannot be read.
    """
    entries = {e["path"]: FileEntry(**e) for e in source.content.get("files", [])}
    rank, size = share
    for name in sorted(names)[rank::size]:
        path = Path(source.files[name])
        try:
            damage = describe_damage(path, entries[name], patience_s=patience_s, fs=fs)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror or error}", hint=_HINT) from error
        if damage:
            raise CorruptError(damage, hint=_HINT)
