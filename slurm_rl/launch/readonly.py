"""`python -m slurm_rl.launch.readonly WRITABLE PROTECTED… -- COMMAND…`: run a command for which
the protected folders are read-only, save for one folder inside.

By a mount namespace of its own: without root through a user namespace, in which the user stays who
he is. Other processes see nothing of it, and it ends with the command. Where the machine does not
allow that, the command runs all the same, and is told so on stderr: then the folders are protected
by file permissions alone.
"""

from __future__ import annotations

import ctypes
import os
import sys

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
#: statvfs's flag -> mount's: what is set must stay set in a user namespace.
_KEPT_FLAGS = {
    os.ST_NOSUID: 2,
    os.ST_NODEV: 4,
    os.ST_NOEXEC: 8,
    os.ST_NOATIME: 1024,
    os.ST_NODIRATIME: 2048,
    os.ST_RELATIME: 1 << 21,
}
#: Tells the command whether it worked: `1` or `0`.
VARIABLE = "SLURM_RL_READONLY"
_libc = ctypes.CDLL(None, use_errno=True)


def main(argv: list[str]) -> int:
    """Protect, then become the command; returns only if that cannot be started."""
    mark = argv.index("--")
    writable, protected, command = argv[0], argv[1:mark], argv[mark + 1 :]
    try:
        protect(protected, writable=writable)
        os.environ[VARIABLE] = "1"
    except OSError as error:
        os.environ[VARIABLE] = "0"
        sys.stderr.write(
            f"slurm-rl: {', '.join(protected)} could not be mounted read-only ({error.strerror}):"
            " do not write there\n"
        )
    sys.stderr.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"slurm-rl: {command[0]}: {error.strerror}\n")
        return 127


def protect(folders: list[str], *, writable: str) -> None:
    """Make `folders` read-only for this process and its children, but for `writable`.

    Raises OSError where the machine does not allow it; then nothing is protected.
    """
    here = os.getcwd()
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", _libc.unshare(_CLONE_NEWNS | (_CLONE_NEWUSER if uid else 0)))
    if uid:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _mount(None, "/", _MS_REC | _MS_PRIVATE)
    for folder in folders:
        _mount(folder, folder, _MS_BIND | _MS_REC)
    # A mount of its own, so that what follows leaves it alone.
    _mount(writable, writable, _MS_BIND)
    for folder in folders:
        said = os.statvfs(folder).f_flag
        kept = sum(flag for bit, flag in _KEPT_FLAGS.items() if said & bit)
        _mount(None, folder, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept)
    os.chdir(here)  # else the working directory stays the one below the new mounts


def _mount(source: str | None, target: str, flags: int) -> None:
    start = None if source is None else os.fsencode(source)
    _call(target, _libc.mount(start, os.fsencode(target), None, ctypes.c_ulong(flags), None))


def _call(what: str, status: int) -> None:
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
