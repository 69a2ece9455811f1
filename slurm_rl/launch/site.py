"""What Slurm says of the site: its configuration, partitions, nodes and limits.

Parsing is pure and total: a key that a version lacks is None, a form that is not known is left
out. Who cannot be asked (accounting that is off) is absent, never guessed. What it means for a
run is judged elsewhere: `wall_times.py` for a submission, `cli/doctor/` for a person.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_rl.config.derive import parse_wall_time
from slurm_rl.errors import SchedulerUnavailable

TIMEOUT_S = 20.0
_CONFIG_LINE = re.compile(r"([\w\[\]/.-]+)\s*=\s?(.*)")
_KEY = re.compile(r"(?:^|\s)([A-Za-z]\w*)=")
_SECONDS = re.compile(r"(\d+)(?:\s*(?:s|sec|secs|seconds))?")
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()=]+)?[:=](\d+)")
_ABSENT = ("", "(null)", "N/A", "none", "None")
_NO_LIMIT = ("UNLIMITED", "INFINITE", "NONE", "")


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition. Times in seconds; None: no limit, or not set.

    modes: preemption modes of its jobs, in capitals (`OFF`, `REQUEUE`, `CANCEL`, `SUSPEND`).
    """

    name: str
    is_default: bool = False
    state: str = "UP"
    max_time_s: int | None = None
    default_time_s: int | None = None
    grace_s: int = 0
    min_nodes: int = 0
    max_nodes: int | None = None
    modes: tuple[str, ...] = ()
    qos: str = ""
    num_nodes: int = 0
    oversubscribe: str = ""


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes of one partition that are alike: `sinfo -o %R|%T|%D|%c|%G`."""

    partition: str
    state: str
    num_nodes: int
    cpus: int
    gpus: int

    @property
    def is_usable(self) -> bool:
        """Whether they may run jobs now or later, rather than being out of order."""
        word = self.state.rstrip("*~#!%$@^-+").lower()
        return word not in ("down", "drained", "draining", "drain", "fail", "failing", "unknown")


@dataclass(frozen=True, slots=True)
class Limits:
    """What accounting lets this user do; None: no limit that it tells of."""

    max_submit: int | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Qos:
    """A quality of service: its name, flags, and limits on jobs of a user."""

    name: str
    flags: tuple[str, ...] = ()
    max_submit: int | None = None
    max_wall_s: int | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """Slurm's own words about itself. `qos` is None where accounting does not answer."""

    config: Mapping[str, str]
    partitions: tuple[Partition, ...]
    nodes: tuple[NodeGroup, ...] = ()
    qos: tuple[Qos, ...] | None = None
    limits: tuple[Limits, ...] = field(default=())

    def word(self, key: str) -> str:
        """A value of the configuration, in its own words; empty if it is not set."""
        value = self.config.get(key.lower(), "")
        return "" if value in _ABSENT else value

    def seconds(self, key: str) -> int | None:
        return parse_seconds(self.word(key))

    def number(self, key: str) -> int | None:
        word = self.word(key)
        return int(word) if word.isdigit() else None

    def flags(self, key: str) -> tuple[str, ...]:
        """A list with commas: `preempt_send_user_signal,enable_configless`."""
        return tuple(part.strip() for part in self.word(key).split(",") if part.strip())

    @property
    def version(self) -> tuple[int, int] | None:
        match = re.match(r"(\d+)\.(\d+)", self.word("SLURM_VERSION"))
        return (int(match[1]), int(match[2])) if match else None


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config` by key in small letters; the first mention of a key counts.

    Sections of plugins that follow (cgroup, MPI) come under their own names.

    >>> parse_config("KillWait                = 30 sec")
    {'killwait': '30 sec'}
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _CONFIG_LINE.fullmatch(line.strip())
        if match is not None:
            found.setdefault(match[1].lower(), match[2].strip())
    return found


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """`scontrol show partition`, in one line each (`-o`) or in several."""
    records: list[dict[str, str]] = []
    for line in text.splitlines():
        for key, value in split_pairs(line):
            if key == "PartitionName":
                records.append({})
            if records:
                records[-1].setdefault(key, value)
    return tuple(_make_partition(record) for record in records)


def split_pairs(line: str) -> Iterator[tuple[str, str]]:
    """`key=value` words of a line; a value may hold spaces and `=` (`TRES=cpu=8,mem=8G`)."""
    marks = list(_KEY.finditer(line))
    ends = [*(mark.start() for mark in marks[1:]), len(line)]
    for mark, end in zip(marks, ends, strict=False):
        yield mark[1], line[mark.end() : end].strip()


def _make_partition(record: Mapping[str, str]) -> Partition:
    modes = record.get("PreemptMode", "")
    return Partition(
        name=record["PartitionName"],
        is_default=record.get("Default", "NO").upper() == "YES",
        state=record.get("State", "UP").upper(),
        max_time_s=parse_limit_s(record.get("MaxTime", "")),
        default_time_s=parse_limit_s(record.get("DefaultTime", "")),
        grace_s=parse_seconds(record.get("GraceTime", "")) or 0,
        min_nodes=_number(record.get("MinNodes", "")) or 0,
        max_nodes=_number(record.get("MaxNodes", "")),
        modes=tuple(mode.strip().upper() for mode in modes.split(",") if mode.strip()),
        qos="" if record.get("QoS", "") in _ABSENT else record["QoS"],
        num_nodes=_number(record.get("TotalNodes", "")) or 0,
        oversubscribe=record.get("OverSubscribe", record.get("Shared", "")),
    )


def parse_limit_s(text: str) -> int | None:
    """Seconds of a time limit; None for none, or for one that cannot be read."""
    if text.upper() in _NO_LIMIT:
        return None
    try:
        return parse_wall_time(text)
    except ValueError:
        return None


def parse_seconds(text: str) -> int | None:
    """`30 sec`, `30` or `00:00:30` as seconds; None for anything else."""
    match = _SECONDS.fullmatch(text.strip())
    if match:
        return int(match[1])
    return parse_limit_s(text) if ":" in text else None


def _number(text: str) -> int | None:
    """A plain number; Slurm may shorten thousands (`2K`)."""
    match = re.fullmatch(r"(\d+)([Kk]?)", text.strip())
    return int(match[1]) * (1000 if match[2] else 1) if match else None


def parse_nodes(text: str) -> tuple[NodeGroup, ...]:
    """Lines of `sinfo -h -o %R|%T|%D|%c|%G`; others are passed over."""
    groups = []
    for line in text.splitlines():
        fields = line.strip().split("|", 4)
        if len(fields) == 5:
            partition, state, num, cpus, gres = fields
            cores = _number(cpus.rstrip("+")) or 0
            groups.append(NodeGroup(partition, state, _number(num) or 0, cores, parse_gpus(gres)))
    return tuple(groups)


def parse_gpus(gres: str) -> int:
    """GPUs in a node's GRES.

    >>> parse_gpus("gpu:a100:4(S:0-1),gpu:t4:2,nvme:1"), parse_gpus("(null)")
    (6, 0)
    """
    bare = re.sub(r"\([^)]*\)", "", gres)
    return sum(int(number) for number in _GPUS.findall(bare))


QOS_FORMAT = "Name,Flags,MaxSubmitPU,MaxWall"
ASSOC_FORMAT = "Account,Partition,QOS,MaxSubmit,GrpSubmit"


def parse_qos(text: str) -> tuple[Qos, ...]:
    """`sacctmgr -n -P show qos format=Name,Flags,MaxSubmitPU,MaxWall`."""
    found = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) == 4 and fields[0]:
            flags = tuple(part for part in fields[1].split(",") if part)
            found.append(Qos(fields[0], flags, _number(fields[2]), parse_limit_s(fields[3])))
    return tuple(found)


def parse_associations(text: str) -> tuple[Limits, ...]:
    """`sacctmgr -n -P show assoc format=Account,Partition,QOS,MaxSubmit,GrpSubmit`."""
    found = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) == 5:
            numbers = [n for n in (_number(fields[3]), _number(fields[4])) if n is not None]
            found.append(Limits(min(numbers, default=None), fields[0]))
    return tuple(found)


def read_site(*, user: str) -> Site:
    """Everything above. Raises SchedulerUnavailable if scontrol does not answer."""
    config = parse_config(ask(["scontrol", "show", "config"]))
    partitions = parse_partitions(ask(["scontrol", "show", "partition", "-o"]))
    nodes = parse_nodes(_ask_softly(["sinfo", "-h", "-o", "%R|%T|%D|%c|%G"]) or "")
    qos: tuple[Qos, ...] | None = None
    limits: tuple[Limits, ...] = ()
    if config.get("accountingstoragetype", "").endswith("slurmdbd"):
        qos = read_qos()
        assoc = ["sacctmgr", "-n", "-P", "show", "assoc", f"user={user}", f"format={ASSOC_FORMAT}"]
        limits = parse_associations(_ask_softly(assoc) or "")
    return Site(config, partitions, nodes, qos, limits)


def read_partitions(*, timeout_s: float = TIMEOUT_S, hidden: bool = False) -> tuple[Partition, ...]:
    """The partitions alone: one call. Raises SchedulerUnavailable."""
    options = ["-a"] if hidden else []
    argv = ["scontrol", *options, "show", "partition", "-o"]
    return parse_partitions(ask(argv, timeout_s=timeout_s))


def read_qos(*, timeout_s: float = TIMEOUT_S) -> tuple[Qos, ...] | None:
    """Every quality of service; None if accounting does not answer."""
    argv = ["sacctmgr", "-n", "-P", "show", "qos", f"format={QOS_FORMAT}"]
    text = _ask_softly(argv, timeout_s=timeout_s)
    return None if text is None else parse_qos(text)


def ask(argv: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> str:
    """What a command printed. Raises SchedulerUnavailable if it failed or did not answer."""
    from slurm_rl.launch.slurm import run_command  # it imports submitit, which takes a while

    try:
        done = run_command(argv, timeout_s=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise SchedulerUnavailable(f"{argv[0]} did not answer in {timeout_s:.0f} s") from error
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise SchedulerUnavailable(f"{argv[0]}: {said or done.returncode}")
    return done.stdout


def _ask_softly(argv: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> str | None:
    """The same for what one can do without: None if there was no answer."""
    if shutil.which(argv[0]) is None:
        return None
    try:
        return ask(argv, timeout_s=timeout_s)
    except SchedulerUnavailable:
        return None
