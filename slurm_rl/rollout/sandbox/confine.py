"""What one run asks of the kernel: namespaces, a root of its own, limits, no rights.

Linux only, through libc by ctypes, and no other program: neither root nor setuid helpers are
needed where user namespaces are allowed. Each function raises OSError where the kernel says no.

The root that a program sees holds the system's libraries and the interpreter, read-only, four
devices, and `/tmp`, which is memory of a bounded size and the only place to write. There is no
/proc, no /sys, no home and no run directory in it, and no network but a loopback that is down.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import stat
from typing import Any

#: nobody, on every Linux: who a program is if we are root.
NOBODY = 65534
WORK = "/tmp"

_NEW_NS, _NEW_UTS, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PID, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT = 1, 2, 4, 8, 32
_NOATIME, _NODIRATIME, _BIND, _REC, _PRIVATE, _RELATIME = 1024, 2048, 4096, 16384, 1 << 18, 1 << 21
_DETACH = 2
_SET_PDEATHSIG, _CAPBSET_DROP, _SET_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 24, 36, 38
_OLD = "/.old"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store")
_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_MOUNT_OPTIONS = {
    "nodev": _NODEV,
    "noexec": _NOEXEC,
    "noatime": _NOATIME,
    "nodiratime": _NODIRATIME,
    "relatime": _RELATIME,
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]


def enter_user_namespace() -> None:
    """A user namespace without any mapped id yet: `map_ids`, from outside, gives them."""
    _call("a user namespace", _libc.unshare(_NEW_USER))


def map_ids(pid: int) -> bool:
    """Map the ids of the namespace that `pid` has entered; called from outside.

    True if it has a root of its own beside nobody, and may become nobody. Else (we are not root,
    or in a container that has one id only) the only id in there is nobody, and stands for ours.
    """
    if os.geteuid() == 0:
        try:
            for name in ("uid_map", "gid_map"):
                _write(f"/proc/{pid}/{name}", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            return True
        except OSError:  # nobody is no id of this container
            pass
    _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", f"{NOBODY} {os.geteuid()} 1\n")
    _write(f"/proc/{pid}/gid_map", f"{NOBODY} {os.getegid()} 1\n")
    return False


def enter_namespaces() -> None:
    """Mounts, processes (of later children), network, IPC and host name apart from the others'."""
    flags = _NEW_NS | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_UTS
    _call("mount, pid, net, ipc and uts namespaces", _libc.unshare(flags))


def forbid_namespaces() -> None:
    """No user namespaces inside this one, which would give a program rights over mounts again."""
    try:
        _write("/proc/sys/user/max_user_namespaces", "0")
    except OSError:
        pass  # a container with a read-only /proc/sys: what they could undo is locked anyway


def build_root(binds: list[str], *, size_mb: int) -> None:
    """Become a process whose root is as the module says. binds: more folders to show, read-only."""
    _mount(None, "/", flags=_REC | _PRIVATE)
    _mount("tmpfs", WORK, kind="tmpfs", flags=_NOSUID | _NODEV, data="size=1m,mode=755")
    os.mkdir(WORK + _OLD)
    old = (WORK + _OLD).encode()
    _call("a root of its own", _libc.pivot_root(WORK.encode(), old))
    os.chdir("/")
    os.mkdir(WORK)
    data = f"size={size_mb}m,nr_inodes=4096,mode=1777"
    _mount("tmpfs", WORK, kind="tmpfs", flags=_NOSUID | _NODEV, data=data)
    for path in (*_SYSTEM, *_FILES, *_DEVICES, *binds):
        _show(path)
    _protect()
    _call("leaving the old root", _libc.umount2(_OLD.encode(), _DETACH))
    os.rmdir(_OLD)
    _mount(None, "/", flags=_REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chdir(WORK)


def _show(path: str) -> None:
    """Let a path of the old root be seen in the new one, if it exists, under the same name."""
    source = _OLD + path
    if os.path.islink(source):  # /lib -> usr/lib
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(os.readlink(source), path)
        return
    try:
        is_folder = stat.S_ISDIR(os.stat(source).st_mode)
    except FileNotFoundError:
        return
    if is_folder:
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, path, flags=_BIND | _REC)


def _protect() -> None:
    """Everything that is shown becomes read-only, with what is mounted below it.

    What the old mounts forbid must stay forbidden, or the kernel refuses.
    """
    with open(_OLD + "/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        lines = file.read().splitlines()
    for line in lines:
        fields = line.split(" ")
        target = _unescape(fields[4])
        if target in ("/", WORK, _OLD) or target.startswith(_OLD + "/"):
            continue
        kept = sum(_MOUNT_OPTIONS.get(option, 0) for option in fields[5].split(","))
        _mount(None, target, flags=_REMOUNT | _BIND | _RDONLY | _NOSUID | kept)


def _unescape(text: str) -> str:
    for code, character in (("040", " "), ("011", "\t"), ("012", "\n"), ("134", "\\")):
        text = text.replace("\\" + code, character)
    return text


def set_limits(spec: dict[str, Any], *, num_processes: int) -> None:
    """Bounds of each process that the program has: seconds, bytes, files, processes."""
    size = spec["memory_mb"] << 20
    seconds = int(spec["timeout_s"]) + 2
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: size,
        resource.RLIMIT_FSIZE: spec["disk_mb"] << 20,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_NPROC: num_processes,
    }
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def drop_rights(*, to_nobody: bool) -> None:
    """No capabilities, now or by any program that is started later; not root."""
    for capability in range(64):
        if _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # the kernel's last one, or we have none to drop
    if to_nobody:
        try:
            os.setgroups([])
        except PermissionError:
            pass  # a container that forbids it; its groups mean nothing in here
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _call("no new privileges", _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def die_with_parent() -> None:
    """SIGKILL if our parent ends; lost at a change of ids."""
    _libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Descendants whose parent ended become ours, instead of init's."""
    _libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)


def count_tasks(uid: int) -> int:
    """Threads that a user has on this machine: what RLIMIT_NPROC counts without a namespace."""
    num = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    num += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue  # it ended
    return num


def counts_by_namespace() -> bool:
    """Whether RLIMIT_NPROC counts each user namespace for itself: Linux 5.14 and later."""
    release = os.uname().release.split(".")
    try:
        return (int(release[0]), int(release[1].split("-")[0])) >= (5, 14)
    except (IndexError, ValueError):
        return False


def _mount(source: str | None, target: str, *, kind: str = "", flags: int, data: str = "") -> None:
    start = None if source is None else os.fsencode(source)
    status = _libc.mount(
        start, os.fsencode(target), kind.encode() or None, flags, data.encode() or None
    )
    _call(f"mounting {target}", status)


def _call(what: str, status: int) -> None:
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
