"""The records that everything else passes around. Read this file first.

All are frozen. They own no files and do no work; `chain` decides with them,
`storage` writes and reads them, stage programs get an `Order` and leave a `Result`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

#: Order of the stages inside an iteration; timelines begin at a point of this order. Kinds with a
#: name behind, as `eval-aime`, stand where the kind without it does.
STAGE_ORDER = ("init", "rollout", "score", "reference", "teacher", "critic", "train", "eval")
_ORDER = {kind: number for number, kind in enumerate(STAGE_ORDER)}
#: A rollout's finished groups; in the attempt directory.
JOURNAL_NAME = "journal.jsonl"
#: Begins the name of the decision which groups make a rollout's batch; in the stage's directory.
DECISION_PREFIX = "CLOSE-"
#: Patterns of what a stage keeps of work that a kill must not cost; in the attempt directory.
KEPT = (JOURNAL_NAME, "partial-*.json")
#: Key of a commit's content that says why it is not like others of its kind: a policy that was
#: `carried` forward, an iteration that was `supervised`. Nothing is learnt from it about others.
UNUSUAL = "unusual"
#: Format of the run directory. A directory with a larger number is refused.
RUN_FORMAT = 1


@dataclass(frozen=True, slots=True, order=True)
class StageRef:
    """One stage of one iteration, whatever its timeline: `StageRef(12, "rollout")`.

    Of an evaluation, `iteration` is the version of the weights that are evaluated:
    `StageRef(12, "eval-aime")` is about what the train stage of iteration 11 made.
    """

    iteration: int
    kind: str

    @property
    def is_eval(self) -> bool:
        return _base_of(self.kind) == "eval"

    @property
    def position(self) -> tuple[int, int]:
        """Where it stands in the history: an evaluation right behind what made its weights."""
        if self.is_eval:
            return (self.iteration - 1, _ORDER["eval"]) if self.iteration else (0, _ORDER["init"])
        return self.iteration, _ORDER.get(_base_of(self.kind), len(STAGE_ORDER))

    def __str__(self) -> str:
        return f"i{self.iteration:04d}.{self.kind}"


@dataclass(frozen=True, slots=True)
class Slot:
    """A place that takes exactly one commit: a stage on a timeline, or one shard of it.

    Example: `Slot(12, "rollout", 0, 7)` is `iterations/000012/rollout.t0/shard-0007`.
    """

    iteration: int
    kind: str
    timeline: int
    shard: int | None = None

    @property
    def stage(self) -> StageRef:
        return StageRef(self.iteration, self.kind)

    def __str__(self) -> str:
        tail = "" if self.shard is None else f"/shard-{self.shard:04d}"
        return f"i{self.iteration:04d}.{self.kind}.t{self.timeline}{tail}"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One committed file. `path` is relative to the attempt directory, with `/`.

    In an assembled commit the path starts with the shard: `shard-0003/samples.safetensors`.
    """

    path: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Who works on a slot. Epochs count from 1; the highest one holds the slot.

    claimed: when, in seconds by the clock of the run's file system.
    """

    epoch: int
    job_token: str
    attempt_token: str
    host: str = ""
    pid: int = 0
    job_id: str = ""
    claimed: float = 0.0

    @property
    def attempt_name(self) -> str:
        return f"a{self.epoch:04d}-{self.attempt_token}"


@dataclass(frozen=True, slots=True)
class Commit:
    """The published result of a slot.

    `content` is digested and says nothing about when or where it was made; `provenance`
    (run id, job, nodes, times, attempt directory) is outside the digest, so that two runs
    can be equal. `content` holds at least: `stage`, `iteration`, `files` (of `FileEntry`),
    `parents` (role -> content digest), `settings` (digest of what shaped the numbers).
    """

    content: dict[str, Any]
    provenance: dict[str, Any]
    digest: str

    @property
    def files(self) -> list[FileEntry]:
        return [FileEntry(**entry) for entry in self.content.get("files", [])]

    @property
    def parents(self) -> dict[str, str]:
        return dict(self.content.get("parents", {}))


@dataclass(frozen=True, slots=True)
class Input:
    """One committed input of a stage, as handed to its program.

    role:    `weights` (what to serve), `previous` (the rollout before: its data cursor),
             `rollout` (the samples to train on), `score` (their rewards, where a stage of its own
             gives them), `checkpoint` (what to continue from), `reference` (the policy that KL is
             measured against, or what a stage computed by it), `teacher` (likewise), `critic` (the
             values that it computed).
    path:    absolute: the committed attempt directory; for an assembled commit the stage
             directory, whose files are to be found through `files` alone.
    files:   logical path (as in `content["files"]`) -> absolute path.
    content: the content part of its COMMIT.
    """

    role: str
    iteration: int
    kind: str
    digest: str
    path: str
    files: dict[str, str] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)

    def named(self, name: str) -> list[str]:
        """Absolute paths of every file called `name`, one per shard, in shard order."""
        return [self.files[key] for key in sorted(self.files) if key.split("/")[-1] == name]


@dataclass(frozen=True, slots=True)
class Order:
    """What a stage program is told: everything, so that it needs no Slurm and no planner.

    It lies as `order.json` in the attempt directory, the only place where the program
    writes. `earlier_attempts` are directories of superseded attempts of the same slot
    with the same inputs: finished groups may be taken over from their journals. `versions` are
    the libraries of the stages before, by name; the program refuses to run with others.
    """

    run_dir: str
    run_id: str
    kind: str
    iteration: int
    timeline: int
    attempt_dir: str
    settings_path: str
    code_dir: str
    inputs: dict[str, Input]
    shard: int = 0
    num_shards: int = 1
    earlier_attempts: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def input(self, role: str) -> Input:
        return self.inputs[role]


@dataclass(frozen=True, slots=True)
class Result:
    """What a stage program leaves as `result.json`, written last, after everything is fsynced.

    files:      what is committed, digested while it was written.
    content:    more facts to digest: `weights`, `cursor`, `seeds`, `lr`, `schedule_step`, …
    metrics:    numbers for people, under the field's names; outside the digest.
    provenance: versions, devices, durations; outside the digest.
    """

    files: list[FileEntry]
    content: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)


def _base_of(kind: str) -> str:
    """`eval` of `eval-aime`; any other kind as it is."""
    return kind.partition("-")[0]


def dump_record(record: Any) -> bytes:
    """A record as canonical JSON (sorted keys, UTF-8, one line)."""
    return canonical_json(dataclasses.asdict(record))


def canonical_json(value: Any) -> bytes:
    """JSON whose bytes depend on the value alone. NaN and infinities are refused."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def parse_order(data: bytes) -> Order:
    """The order in `data`, as `dump_record` wrote it."""
    raw = json.loads(data)
    raw["inputs"] = {role: Input(**entry) for role, entry in raw["inputs"].items()}
    return Order(**raw)


def parse_result(data: bytes) -> Result:
    """The result in `data`, as `dump_record` wrote it."""
    raw = json.loads(data)
    raw["files"] = [FileEntry(**entry) for entry in raw["files"]]
    return Result(**raw)
