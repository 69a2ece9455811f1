"""Tries on a folder what the design relies on, and says what it found. Owns no part of a run.

Everything goes through an `Fs`, so that tests can hand in one that breaks a promise. All it writes
lies in the folder that it is given; the caller removes that. What one machine sees is all that is
tried here: whether another node sees it too takes a job there (`launch/probe_node.py`).
"""

from __future__ import annotations

import errno
import fcntl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from slurm_rl.errors import StorageError
from slurm_rl.storage.durable import publish, read_published, write_file
from slurm_rl.storage.fs import POSIX, Fs

Level = Literal["ok", "warn", "bad"]
_RENAMES = 40
#: A commit takes about a dozen fsyncs.
_SLOW_FSYNC_S = 1.0
_CLOCK_WARN_S = 60.0
#: Gone after a reboot, or not of this machine's disks at all.
_VOLATILE = ("tmpfs", "ramfs", "overlay", "squashfs")
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", *_VOLATILE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a doctor's report.

    found: what was seen and what it means here. fix: what to set or do; empty if nothing.
    area:  whose matter it is: `files`, `site` or `stage`.

    Example: `Finding("warn", "hard links", "missing: a commit is a directory", area="files")`.
    """

    level: Level
    name: str
    found: str
    fix: str = ""
    area: str = "files"

    @property
    def line(self) -> str:
        return f"{self.level:<4}  {self.name}: {self.found}" + (f"; {self.fix}" if self.fix else "")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a path's file system is mounted, of what type and how."""

    point: str
    kind: str
    options: tuple[str, ...] = ()
    source: str = ""


def probe_files(folder: Path, *, fs: Fs = POSIX) -> list[Finding]:
    """Try everything in `folder`, which exists and is empty. Leaves files there."""
    probes: list[tuple[str, Callable[[Path, Fs], Finding]]] = [
        ("exclusive create", _probe_create),
        ("publish without replacing", _probe_publish),
        ("atomic rename", _probe_rename),
        ("append", _probe_append),
        ("fsync", _probe_fsync),
        ("listing", _probe_listing),
    ]
    found = []
    for number, (name, probe) in enumerate(probes):
        place = folder / f"probe-{number}"
        try:
            fs.mkdir(place)
            found.append(probe(place, fs))
        except (OSError, StorageError) as error:
            found.append(Finding("bad", name, f"failed: {error}", _OTHER_PLACE))
    return found


_OTHER_PLACE = "put run.dir on another file system"


def _probe_create(folder: Path, fs: Fs) -> Finding:
    name, path = "exclusive create", folder / "claim"
    fs.create(path, b"first")
    try:
        fs.create(path, b"second")
    except FileExistsError:
        if fs.read(path) == b"first":
            return Finding("ok", name, "a name is given once: two jobs cannot hold one claim")
    return Finding("bad", name, "a name was given twice: two jobs could commit", _OTHER_PLACE)


def _probe_publish(folder: Path, fs: Fs) -> Finding:
    """The same calls as a COMMIT's; where there are no hard links, the fallback's."""
    name = "publish without replacing"
    has_links = _has_links(folder, fs)
    path = folder / "COMMIT"
    if not publish(path, b"mine", fs=fs):
        return Finding("bad", name, "what was published is not what is read", _OTHER_PLACE)
    if publish(path, b"theirs", fs=fs) or read_published(path, fs=fs) != b"mine":
        return Finding("bad", name, "a second writer replaced a commit", _OTHER_PLACE)
    left = [entry for entry in fs.list(folder) if entry.startswith(".tmp-COMMIT")]
    if left:
        return Finding("bad", name, f"{left[0]} could not be taken away", _OTHER_PLACE)
    if has_links:
        return Finding("ok", name, "hard links work and replace nothing")
    return Finding(
        "warn", name, "no hard links: each COMMIT becomes a directory, which works, with two inodes"
    )


def _has_links(folder: Path, fs: Fs) -> bool:
    """Whether link(2) works. Raises OSError where it replaces what is there."""
    for entry in ("source", "taken"):
        fs.create(folder / entry, entry.encode())
    try:
        fs.link(folder / "source", folder / "target")
    except OSError:
        return False
    try:
        fs.link(folder / "source", folder / "taken")
    except FileExistsError:
        pass
    if fs.read(folder / "taken") != b"taken":
        raise OSError(errno.EIO, "a hard link replaced a file that was there")
    return fs.read(folder / "target") == b"source"


def _probe_rename(folder: Path, fs: Fs) -> Finding:
    """A reader beside a writer that replaces a file: it sees an old one or a new one."""
    name, path = "atomic rename", folder / "hint"
    contents = [bytes([65 + i % 26]) * 4096 for i in range(_RENAMES)]
    write_file(path, contents[0], fs=fs)
    wrong: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set() and not wrong:
            try:
                if fs.read(path) not in contents:
                    wrong.append("a mixture was read")
            except OSError as error:
                # NFS: the file that was replaced while it was open; readers try again.
                if error.errno != errno.ESTALE:
                    wrong.append(f"the name was gone for a moment ({error.strerror})")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number, content in enumerate(contents):
            temporary = folder / f"next-{number}"
            fs.create(temporary, content)
            fs.rename(temporary, path)
    finally:
        done.set()
        reader.join()
    if not wrong and fs.read(path) != contents[-1]:
        wrong.append("the last write is not what is read")
    if wrong:
        return Finding("bad", name, wrong[0], _OTHER_PLACE)
    return Finding("ok", name, f"a reader saw whole files through {_RENAMES} replacements")


def _probe_append(folder: Path, fs: Fs) -> Finding:
    name, path = "append", folder / "journal"
    parts = [b"one\n", b"two\n", b"three\n"]
    for part in parts:
        fs.append(path, part)
    if fs.read(path) == b"".join(parts):
        return Finding("ok", name, "a journal keeps what was there")
    return Finding("bad", name, "appending lost what was there: finished groups", _OTHER_PLACE)


def _probe_fsync(folder: Path, fs: Fs) -> Finding:
    path = folder / "durable"
    fs.create(path, b"x" * 65536)
    began = time.monotonic()
    fs.fsync(path)
    fs.fsync_dir(folder)
    took_s = time.monotonic() - began
    if took_s > _SLOW_FSYNC_S:
        found = f"a file and its directory took {took_s:.1f} s: each commit waits for several"
        return Finding("warn", "fsync", found)
    return Finding("ok", "fsync", f"a file and its directory in {1000 * took_s:.0f} ms")


def _probe_listing(folder: Path, fs: Fs) -> Finding:
    if fs.list(folder):
        return Finding("bad", "listing", "an empty directory has names", _OTHER_PLACE)
    fs.create(folder / "new", b"")
    if fs.list(folder) != ["new"]:
        found = "a new name is not listed by the process that made it"
        return Finding("bad", "listing", found, _OTHER_PLACE)
    fs.unlink(folder / "new")
    if fs.list(folder):
        return Finding("bad", "listing", "a name stays after it was removed", _OTHER_PLACE)
    return Finding("ok", "listing", "new names show at once on this machine")


def judge_clock(filesystem_s: float, machine_s: float) -> Finding:
    """The clock that ages are measured by, against this machine's."""
    off_s = filesystem_s - machine_s
    found = f"the file system's is {abs(off_s):.1f} s {'ahead of' if off_s > 0 else 'behind'}"
    if abs(off_s) < _CLOCK_WARN_S:
        return Finding("ok", "clock", f"{found} this machine's; ages go by the file system's")
    fix = "have ntp mended, and look at dates in logs with that in mind"
    return Finding(
        "warn", "clock", f"{found} this machine's; ages go by the file system's alone", fix
    )


def probe_flock(folder: Path) -> Finding:
    """Told only: nothing here relies on a lock."""
    path = folder / "lock"
    try:
        with open(path, "w") as first, open(path, "w") as second:
            fcntl.flock(first, fcntl.LOCK_EX)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return Finding("ok", "flock", "works on this machine (nothing relies on it)")
        return Finding("ok", "flock", "locks nothing here (nothing of slurm-rl relies on it)")
    except OSError as error:
        return Finding("ok", "flock", f"is refused: {error.strerror} (nothing relies on it)")


def judge_space(
    free_bytes: int, free_inodes: int | None, *, each_bytes: int | None, kept: int
) -> Iterator[Finding]:
    """Free space against what an iteration writes, and `kept` of them keep.

    each_bytes: None if the model could not be read. free_inodes: None where there is no limit.
    """
    has = f"{_gigabytes(free_bytes)} free"
    fix = "free space, lower retention.keep_last, or choose another run.dir"
    if each_bytes is None:
        yield Finding("ok", "space", f"{has}; what an iteration writes is not known from here")
    elif free_bytes < 2 * each_bytes:
        need = f"an iteration writes {_gigabytes(each_bytes)} while the one before stays"
        yield Finding("bad", "space", f"{has}, but {need}", fix)
    elif free_bytes < kept * each_bytes:
        need = f"{kept} iterations of {_gigabytes(each_bytes)} are kept"
        yield Finding("warn", "space", f"{has}, but {need}", fix)
    else:
        need = f"{kept} iterations of {_gigabytes(each_bytes)} fit"
        yield Finding("ok", "space", f"{has}; {need}")
    if free_inodes is None:
        yield Finding("ok", "inodes", "the file system counts none")
    elif free_inodes < 1000:
        yield Finding("bad", "inodes", f"{free_inodes} free; an iteration takes dozens", fix)
    elif free_inodes < 100 * kept:
        yield Finding("warn", "inodes", f"{free_inodes} free, for {kept} iterations", fix)
    else:
        yield Finding("ok", "inodes", f"{free_inodes} free")


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def find_mount(path: Path) -> Mount | None:
    """The mount that `path` lies on, by this machine's own table."""
    try:
        text = Path("/proc/mounts").read_text(errors="replace")
    except OSError:
        return None
    return parse_mounts(text, str(path.resolve()))


def parse_mounts(text: str, path: str) -> Mount | None:
    """The deepest, and of equals the last, mount in `/proc/mounts` that `path` lies under."""
    best: Mount | None = None
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        point = _unescape(fields[1])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and (best is None or len(point) >= len(best.point)):
            best = Mount(point, fields[2], tuple(fields[3].split(",")), _unescape(fields[0]))
    return best


def _unescape(text: str) -> str:
    r"""`/a\040b` as the kernel means it: spaces, tabs and backslashes are in octal."""
    for code, char in (("040", " "), ("011", "\t"), ("012", "\n"), ("134", "\\")):
        text = text.replace(f"\\{code}", char)
    return text


def judge_mount(mount: Mount | None, *, is_shared: bool) -> Finding:
    """What the type of file system means. is_shared: other nodes must see it (Slurm)."""
    if mount is None:
        return Finding("warn", "file system", "its type is not told by /proc/mounts")
    at = f"{mount.kind} at {mount.point}"
    if "ro" in mount.options:
        return Finding("bad", "file system", f"{at} is mounted read-only", "choose another run.dir")
    if mount.kind.startswith("nfs"):
        return _judge_nfs(at, mount.options)
    if is_shared and mount.kind in _LOCAL:
        fix = "put run.dir on the shared file system, if `visibility` does not prove that it is"
        return Finding("warn", "file system", f"{at} looks like this machine's own", fix)
    if mount.kind in ("tmpfs", "ramfs"):
        fix = "choose another run.dir"
        return Finding("warn", "file system", f"{at} is memory: a reboot takes the run away", fix)
    return Finding("ok", "file system", at)


def _judge_nfs(at: str, options: tuple[str, ...]) -> Finding:
    if "soft" in options or "softerr" in options:
        fix = "ask for a hard mount"
        return Finding(
            "warn", "file system", f"{at} is a soft mount: a slow server loses writes", fix
        )
    found = f"{at}: other nodes may see a name up to a minute late; readers wait for that"
    return Finding("ok", "file system", found)
