"""What this user's quota is, as far as `lfs quota` or `quota` tells. Best effort: silence says
nothing, and other file systems have tools of their own."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass

from slurm_rl.errors import SchedulerUnavailable
from slurm_rl.launch.site import ask
from slurm_rl.storage.probe import Mount

_TIMEOUT_S = 10.0
_NUMBERS = re.compile(r"\s(\d+)(\*?)\s+(\d+)\s+(\d+)\s+(\S+)\s+(\d+)(\*?)\s+(\d+)\s+(\d+)\s+(\S+)")


@dataclass(frozen=True, slots=True)
class Quota:
    """Used and most, in bytes and in files; a limit of None is none."""

    used_bytes: int
    limit_bytes: int | None
    used_files: int
    limit_files: int | None


def read_quota(mount: Mount | None, *, user: str) -> tuple[Quota | None, str]:
    """The quota on `mount`, and by which tool it was asked (empty: there is none for it)."""
    if mount is None:
        return None, ""
    if mount.kind == "lustre":
        argv = ["lfs", "quota", "-q", "-u", user, mount.point]
    else:
        argv = ["quota", "-w", "-p", "-u", user]
    if shutil.which(argv[0]) is None:
        return None, ""
    try:
        said = ask(argv, timeout_s=_TIMEOUT_S)
    except SchedulerUnavailable:
        return None, argv[0]  # quota ends with 1 where a limit is breached, too
    return parse_quota(said, names=(mount.point, mount.source)), argv[0]


def parse_quota(text: str, *, names: tuple[str, ...]) -> Quota | None:
    """The line of the file system that has one of `names`; None if there is none.

    Both tools print: file system, KiB used (`*`: too many), quota, limit, grace, and the same for
    files. A long name may stand on a line of its own.
    """
    joined = re.sub(r"\n\s+(?=\d)", " ", text)
    for line in joined.splitlines():
        words = line.split()
        found = _NUMBERS.search(line + " ")
        if words and words[0] in names and found is not None:
            soft, hard = int(found[3]), int(found[4])
            soft_files, hard_files = int(found[8]), int(found[9])
            return Quota(
                used_bytes=int(found[1]) * 1024,
                limit_bytes=(hard or soft) * 1024 or None,
                used_files=int(found[6]),
                limit_files=hard_files or soft_files or None,
            )
    return None
