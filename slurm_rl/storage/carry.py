"""Files that one commit takes over from another, unchanged, by hard links.

Each commit stands by itself: retention may delete either's files, and the other's stay. Where the
file system has no hard links the files are copied, and compared.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from slurm_rl.errors import CorruptError
from slurm_rl.storage.durable import make_directory, seal_files
from slurm_rl.storage.fs import POSIX, Fs
from slurm_rl.types import FileEntry, Input

#: Where there can be no hard link: between file systems, not at all, too many of one file.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)


def carry_files(
    source: Input,
    names: Iterable[str],
    folder: Path,
    *,
    renamed: tuple[str, str] = ("", ""),
    fs: Fs = POSIX,
) -> list[FileEntry]:
    """Put the input's files `names` below `folder`, durably; returns their entries.

    renamed: a leading folder of the names, and what it is called here.

    A link takes over size and digest with the file; a copy is digested and compared. A crash midway
    leaves files that nothing names. Raises CorruptError for a file that is not what was committed.
    """
    entries = {entry["path"]: FileEntry(**entry) for entry in source.content["files"]}
    carried, copied = [], []
    for name in sorted(names):
        entry = replace(entries[name], path=name.replace(*renamed, 1))
        carried.append(entry)
        place, target = Path(source.files[name]), folder / entry.path
        make_directory(target.parent, below=folder, fs=fs)
        if place.is_symlink():  # what init found elsewhere, and digested
            target.symlink_to(place.resolve())
        elif not _link(place, target, fs=fs):
            shutil.copyfile(place, target)
            copied.append(entry)
        size = target.stat().st_size
        if size != entry.size_bytes:
            raise CorruptError(f"{place}: {size} bytes, but {entry.size_bytes} were committed")
    found = seal_files(folder, [entry.path for entry in copied], fs=fs)
    for entry, new in zip(copied, found, strict=True):
        if new != entry:
            raise CorruptError(
                f"{source.path}: {entry.path} has digest {new.digest}, but {entry.digest} was "
                "committed"
            )
    for parent in sorted({(folder / entry.path).parent for entry in carried}):
        fs.fsync_dir(parent)
    return carried


def _link(place: Path, target: Path, *, fs: Fs) -> bool:
    try:
        fs.link(place, target)
    except OSError as error:
        if error.errno == errno.EEXIST and target.samefile(place):
            return True  # the reply to the first try was lost
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True
