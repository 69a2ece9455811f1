"""The snapshot of the user's own code: what the run imports, whatever the user edits later."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from slurm_rl.errors import ConfigError, CorruptError
from slurm_rl.storage.digest import digest_entries, digest_file
from slurm_rl.storage.durable import list_files, seal_files
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import FileEntry

_SKIPPED = {"__pycache__", ".git", ".venv", ".mypy_cache", ".pytest_cache", "node_modules"}
_MAX_BYTES = 64 << 20


def snapshot_code(run: RunDir, folders: list[Path]) -> str:
    """Copy `folders` (each under its own name) to `code/<digest>/`; the digest, or "" for none.

    The snapshot is named by its content, so that doing it again changes nothing; a crash leaves
    a `.tmp-` folder that nobody reads.
    """
    if not folders:
        return ""
    files, digest = _find_files(folders)
    target = run.code_dir(digest)
    if target.exists():
        return digest
    temporary = target.with_name(f".tmp-{target.name}-{secrets.token_hex(4)}")
    for name, source in files.items():
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, temporary / name)  # with its mode: what was private stays so
    seal_files(temporary, files)
    try:
        run.fs.rename(temporary, target)
    except OSError:
        if not target.exists():
            raise
        shutil.rmtree(temporary)  # somebody else made the same snapshot
    run.fs.fsync_dir(target.parent)
    return digest


def digest_code(folders: list[Path]) -> str:
    """What `snapshot_code` would return; nothing is written."""
    return _find_files(folders)[1] if folders else ""


def _find_files(folders: list[Path]) -> tuple[dict[str, Path], str]:
    """The files of a snapshot by their names in it, and its digest."""
    names = [folder.name for folder in folders]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"code: two folders are called {twice!r}", hint="rename one of them")
    files = {name: source for folder in folders for name, source in _walk(folder)}
    size = sum(source.stat().st_size for source in files.values())
    if size > _MAX_BYTES:
        raise ConfigError(
            f"code: {size} bytes are more than {_MAX_BYTES}", hint="name folders of code only"
        )
    entries = [FileEntry(n, s.stat().st_size, digest_file(s)) for n, s in sorted(files.items())]
    return files, digest_entries(entries)


def check_snapshot(run: RunDir, digest: str) -> None:
    """CorruptError unless the snapshot holds what it was taken of."""
    folder = run.code_dir(digest)
    names = [n for n in list_files(folder) if not _SKIPPED & set(Path(n).parts)]
    entries = [
        FileEntry(n, (folder / n).stat().st_size, digest_file(folder / n)) for n in sorted(names)
    ]
    if digest_entries(entries) != digest:
        raise CorruptError(
            f"{folder}: the run's snapshot of your code was changed or is gone",
            hint="put it back, or adopt other code with `slurm-rl set RUN code=FOLDER`",
        )


def _walk(folder: Path) -> list[tuple[str, Path]]:
    if not folder.is_dir():
        raise ConfigError(f"code: {folder} is not a folder", hint="name a folder of Python code")
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for name in sorted(names):
            path = Path(parent) / name
            # Dot files and *.env hold secrets, not code.
            if path.is_file() and not name.startswith(".") and not name.endswith((".pyc", ".env")):
                found.append((str(Path(folder.name) / path.relative_to(folder)), path))
    return found
