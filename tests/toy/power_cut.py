"""What a power cut leaves: a recording file system, and the trees that its record can come to.

The model is POSIX's, no more: a file's data are safe after fsync of the file, a name is safe after
fsync of its directory, and each alone. What is not safe may be there or not, name by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slurm_rl.storage.fs import POSIX, Fs


@dataclass(frozen=True)
class Op:
    """One recorded operation; `target` is the second path of a link or rename."""

    kind: str
    path: Path
    target: Path | None = None
    data: bytes = b""


@dataclass
class RecordingFs:
    """Does what the real one does, and keeps a record of what changes or syncs anything."""

    inner: Fs = POSIX
    ops: list[Op] = field(default_factory=list)

    def create(self, path: Path, data: bytes) -> None:
        self.inner.create(path, data)
        self.ops.append(Op("create", path, data=data))

    def append(self, path: Path, data: bytes) -> None:
        self.inner.append(path, data)
        self.ops.append(Op("append", path, data=data))

    def fsync(self, path: Path) -> None:
        self.inner.fsync(path)
        self.ops.append(Op("fsync", path))

    def fsync_dir(self, path: Path) -> None:
        self.inner.fsync_dir(path)
        self.ops.append(Op("fsync_dir", path))

    def link(self, source: Path, target: Path) -> None:
        self.inner.link(source, target)
        self.ops.append(Op("link", source, target))

    def rename(self, source: Path, target: Path) -> None:
        self.inner.rename(source, target)
        self.ops.append(Op("rename", source, target))

    def unlink(self, path: Path) -> None:
        self.inner.unlink(path)
        self.ops.append(Op("unlink", path))

    def rmdir(self, path: Path) -> None:
        self.inner.rmdir(path)
        self.ops.append(Op("rmdir", path))

    def mkdir(self, path: Path) -> None:
        for parent in [*reversed(path.parents), path]:
            if not parent.exists():
                self.inner.mkdir(parent)
                self.ops.append(Op("mkdir", parent))

    def read(self, path: Path) -> bytes:
        return self.inner.read(path)

    def list(self, path: Path) -> list[str]:
        return self.inner.list(path)

    def size(self, path: Path) -> int:
        return self.inner.size(path)

    def now(self, folder: Path) -> float:
        return self.inner.now(folder)


@dataclass
class Inode:
    """A file (data) or a directory (names). Pending changes of names are (old, new, inode)."""

    data: bytes | None = None
    safe_data: bytes = b""
    names: dict[str, Inode] = field(default_factory=dict)
    safe_names: dict[str, Inode] = field(default_factory=dict)
    pending: list[tuple[str | None, str | None, Inode | None]] = field(default_factory=list)

    def change(self, old: str | None, new: str | None, inode: Inode | None) -> None:
        self.pending.append((old, new, inode))
        apply_change(self.names, old, new, inode)


def apply_change(
    names: dict[str, Inode], old: str | None, new: str | None, inode: Inode | None
) -> None:
    if old is not None:
        names.pop(old, None)
    if new is not None and inode is not None:
        names[new] = inode


def replay(ops: list[Op], root: Path) -> Inode:
    """The file system below `root` after `ops`, with what is safe and what is not."""
    top = Inode()
    for op in ops:
        if op.kind == "fsync_dir":
            inode = _find(top, root, op.path)
            inode.safe_names, inode.pending = dict(inode.names), []
            continue
        folder, name = _find(top, root, op.path.parent), op.path.name
        if op.kind == "mkdir":
            folder.change(None, name, Inode())
        elif op.kind in ("create", "append"):
            inode = folder.names.get(name)
            if inode is None:
                inode = Inode(data=b"")
                folder.change(None, name, inode)
            inode.data = (inode.data or b"") + op.data
        elif op.kind == "fsync":
            inode = folder.names[name]
            inode.safe_data = inode.data or b""
        elif op.kind in ("unlink", "rmdir"):
            folder.change(name, None, None)
        elif op.target is not None:
            assert op.target.parent == op.path.parent, "names move inside one directory"
            inode = folder.names[name]
            folder.change(name if op.kind == "rename" else None, op.target.name, inode)
    return top


def survivors(top: Inode) -> Iterator[dict[str, bytes | None]]:
    """Trees (path -> data, None for a directory) that a power cut may leave.

    All that is unsafe lost; all of it there; each pending name alone lost or there; each with
    unsafe data lost or there.
    """
    pending = [(id(node), number) for node in _all(top) for number in range(len(node.pending))]
    everything = frozenset(pending)
    choices = {frozenset[tuple[int, int]](), everything}
    choices |= {frozenset([one]) for one in pending}
    choices |= {everything - {one} for one in pending}
    for kept in choices:
        for keep_data in (False, True):
            tree: dict[str, bytes | None] = {}
            _collect(top, "", kept, keep_data, tree)
            yield tree


def write_tree(tree: dict[str, bytes | None], root: Path) -> None:
    """Make the tree for real."""
    root.mkdir(parents=True, exist_ok=True)
    for name, data in tree.items():
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)


def _collect(
    node: Inode,
    prefix: str,
    kept: frozenset[tuple[int, int]],
    keep_data: bool,
    tree: dict[str, bytes | None],
) -> None:
    names = dict(node.safe_names)
    for number, change in enumerate(node.pending):
        if (id(node), number) in kept:
            apply_change(names, *change)
    for name, child in names.items():
        if child.data is None:
            tree[prefix + name] = None
            _collect(child, f"{prefix}{name}/", kept, keep_data, tree)
        else:
            tree[prefix + name] = child.data if keep_data else child.safe_data


def _all(node: Inode) -> Iterator[Inode]:
    yield node
    for child in {id(c): c for c in [*node.names.values(), *node.safe_names.values()]}.values():
        if child.data is None:
            yield from _all(child)


def _find(top: Inode, root: Path, path: Path) -> Inode:
    node = top
    for part in path.relative_to(root).parts:
        node = node.names[part]
    return node
