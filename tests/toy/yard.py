"""A run directory with commits in it, made without jobs: ground for garbage collection.

`check` holds what a pass left against what retention promises, without using its code.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_rl.chain.gc import Keeper, Report, collect
from slurm_rl.chain.graph import Graph, build_graph
from slurm_rl.chain.observe import link_folder, read_current
from slurm_rl.chain.slots import slots_of
from slurm_rl.storage.claims import AttemptEnd, attempt_dir, try_claim, write_end, write_heartbeat
from slurm_rl.storage.commits import file_path, publish_commit, read_commit, read_stage_commit
from slurm_rl.storage.control import read_control, start_timeline
from slurm_rl.storage.durable import seal_files, write_file
from slurm_rl.storage.fs import Fs
from slurm_rl.storage.intents import Intent, publish_intent, write_job_id
from slurm_rl.storage.retention import FOLD_BEHIND
from slurm_rl.storage.rundir import RunDir, RunIdentity, create_run
from slurm_rl.types import Claim, Slot, StageRef
from toy.world import FastFs, make_settings

GRACE_S = 100.0
FILES = {
    "init": ("weights/model",),
    "rollout": ("samples.jsonl", "samples.safetensors", "stats.json"),
    "train": ("checkpoint/rank-0/state", "checkpoint/common", "weights/model"),
    "eval": ("found.json",),
}


@dataclass
class Yard:
    """One run; `now` is the clock of its file system."""

    folder: Path
    rules: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    now: float = 1_000.0
    fold_behind: int | None = None

    def __post_init__(self) -> None:
        rules = {"keep_last": 2, "gc_grace_s": GRACE_S, **self.rules}
        changes = {"num_rollout": 8, "retention": rules, **self.changes}
        self.settings = make_settings(self.folder, **changes)
        self.graph: Graph = build_graph(self.settings)
        self.run = RunDir(self.folder / "toy", FastFs())
        values = self.settings.model_dump(mode="json")
        create_run(self.run, RunIdentity("abcdef01", "toy", 0.0, "me", "0", values, ""))

    def keeper(self, *, fs: Fs | None = None, archive: Path | None = None) -> Keeper:
        run = self.run if fs is None else RunDir(self.run.root, fs)
        window = self.settings.chain.window
        rules = self.settings.retention
        behind = FOLD_BEHIND if self.fold_behind is None else self.fold_behind
        window = window if self.fold_behind is None else 0
        return Keeper(run, self.graph, rules, window, lambda: self.now, archive, behind)

    def collect(self, *, fs: Fs | None = None, archive: Path | None = None) -> Report:
        return collect(self.keeper(fs=fs, archive=archive))

    def collect_all(self, *, archive: Path | None = None) -> Report:
        """Mark, let the grace go by, delete, and let what was waiting follow."""
        self.collect(archive=archive)
        self.now += GRACE_S + 1
        self.collect(archive=archive)
        self.now += GRACE_S + 1
        return self.collect(archive=archive)

    # -- making -------------------------------------------------------------------------------

    def commit_until(self, head: int) -> None:
        """Commit every stage of the iterations below `head` that has no commit."""
        for iteration in range(head):
            for node in self.graph.stages(iteration):
                self.commit(StageRef(iteration, node.kind))

    def commit(self, ref: StageRef) -> None:
        control = read_control(self.run)
        if read_current(self.run, self.graph, control, ref) is not None:
            return
        for link in self.graph.links_of(ref):
            folder = link_folder(self.run, control, link)
            publish_intent(self.run, folder, Intent(1, f"abcdef{ref.iteration:06d}", self.now))
            write_job_id(self.run, folder, 1, "17")
        logs = self.run.logs_dir(ref.iteration)
        self.run.fs.mkdir(logs)
        (logs / f"{ref.kind}.0001.log").write_text(f"job of {ref}\n" * 3)
        parents = {}
        for role, parent in self.graph.parents(ref).items():
            found = read_current(self.run, self.graph, control, parent)
            assert found is not None, f"{ref}: {parent} first"
            parents[role] = found.digest
        slots = slots_of(self.graph, control, ref)
        for slot in slots:
            self._commit_slot(slot, parents)
        timeline = control.timeline_of(ref)
        assert read_stage_commit(self.run, ref, timeline=timeline, num_shards=len(slots))

    def _commit_slot(self, slot: Slot, parents: dict[str, str]) -> None:
        folder = self.attempt(slot, "feed")
        names = FILES[slot.kind.partition("-")[0]]
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"{slot.stage} {slot.shard} {name}\n" * 5)
        (folder / "journal.jsonl").write_text("groups\n")
        files = seal_files(folder, names, fs=self.run.fs)
        content: dict[str, Any] = {
            "stage": slot.kind,
            "iteration": slot.iteration,
            "files": [dataclasses.asdict(entry) for entry in files],
            "parents": parents,
        }
        if slot.shard is not None:
            content["shard"] = slot.shard
        provenance = {"attempt": folder.name, "metrics": {}}
        assert publish_commit(self.run, slot, content=content, provenance=provenance)

    def attempt(self, slot: Slot, token: str) -> Path:
        """An attempt with the records of one; its directory."""
        folder = self.run.slot_dir(slot)
        epoch = 1 + sum(name.startswith("claim.") for name in self.run.fs.list(folder))
        claim = Claim(epoch, f"job{epoch}", f"{token}{epoch}")
        assert try_claim(self.run, slot, claim)
        write_heartbeat(self.run, slot, claim, 3, elapsed_s=7.0)
        write_end(self.run, slot, claim, AttemptEnd("stopped"))
        path = attempt_dir(self.run, slot, claim)
        write_file(path / "order.json", b"{}", fs=self.run.fs)
        (path / "rank-0.log").write_text(f"log of {slot} {token}\n")
        return path

    def abandon(self, slot: Slot) -> Path:
        """An attempt that got half of its checkpoint written and was never heard of again."""
        folder = self.attempt(slot, "dead")
        (folder / "checkpoint").mkdir()
        (folder / "checkpoint" / "half").write_bytes(b"half" * 50)
        (folder / "link").symlink_to(self.folder)
        return folder

    def rewind(self, iteration: int) -> int:
        """A new timeline from the rollout of `iteration` on; its number."""
        control = read_control(self.run)
        last = max((start.number for start in control.timelines), default=0)
        assert start_timeline(self.run, StageRef(iteration, "rollout"), after=last, reason="why")
        return last + 1

    # -- looking ------------------------------------------------------------------------------

    def slot(self, iteration: int, kind: str) -> Slot:
        ref = StageRef(iteration, kind)
        return Slot(iteration, kind, read_control(self.run).timeline_of(ref))

    def missing(self, slot: Slot) -> list[Path]:
        """Files of a commit that are not as they were committed."""
        commit = read_commit(self.run, slot)
        assert commit is not None
        paths = [file_path(self.run, slot, commit, entry.path) for entry in commit.files]
        text = {e.path: f"{slot.stage} " for e in commit.files}
        return [
            path
            for path, start in zip(paths, text.values(), strict=True)
            if not (path.exists() and path.read_text().startswith(start))
        ]

    def pruned(self) -> set[str]:
        """Stages of the current timelines of which files are missing."""
        slots = [
            self.slot(i, node.kind)
            for i in range(self.graph.num_iterations)
            for node in self.graph.stages(i)
        ]
        there = [slot for slot in slots if read_commit(self.run, slot) is not None]
        return {str(slot.stage) for slot in there if self.missing(slot)}

    def check(self) -> None:
        """What must hold whenever a pass ended, or was killed."""
        commits = {p.parent: p for p in self.run.root.glob("iterations/**/COMMIT")}
        for folder, path in commits.items():
            raw = json.loads(path.read_bytes())
            names = [entry["path"] for entry in raw["content"]["files"]]
            assert names, path
            places = raw["provenance"].get("attempts") or {"": raw["provenance"]["attempt"]}
            gone = []
            for name in names:
                shard, _, rest = name.partition("/") if "" not in places else ("", "", name)
                target = folder / places[shard] / rest
                gone += [] if target.exists() else [target]
            stage = folder.parent if folder.name.startswith("shard-") else folder
            told = (folder / "PRUNED").exists() or (stage / "PRUNED").exists()
            assert not gone or told, f"{gone[0]} is gone, and nothing says why"
        self._check_needed()

    def _check_needed(self) -> None:
        control = read_control(self.run)
        head = 0
        while head < self.graph.num_iterations and self._is_complete(head):
            head += 1
        self._check_evals(head)
        stages = [
            StageRef(i, node.kind)
            for i in range(self.graph.num_iterations)
            for node in self.graph.stages(i)
        ]
        for ref in stages:
            commit = read_current(self.run, self.graph, control, ref)
            if commit is None:
                for role, parent in self.graph.parents(ref).items():
                    found = read_current(self.run, self.graph, control, parent)
                    if found is not None and role != "previous":
                        where = self.slot(parent.iteration, parent.kind)
                        assert not self.missing(where), f"{ref} needs {role} {parent}"
            elif ref.kind == "init" or ref.iteration >= head - 2:
                assert not self.missing(self.slot(ref.iteration, ref.kind)), f"{ref} is gone"

    def _check_evals(self, head: int) -> None:
        """What may still be evaluated is there. Written anew: without `chain/evals.py`."""
        folders = [p.parent for p in self.run.root.glob("iterations/*/eval-*/given-up.*")]
        for version in range(head + 1):
            for ref in self.graph.due_evals(version):
                slot = self.slot(version, ref.kind)
                is_over = read_commit(self.run, slot) is not None
                if not is_over and self.run.slot_dir(slot) not in folders:
                    weights = self.graph.weights(version)
                    where = self.slot(weights.iteration, weights.kind)
                    there = read_commit(self.run, where)
                    assert there is None or not self.missing(where), f"{ref} needs {weights}"

    def _is_complete(self, iteration: int) -> bool:
        ref = self.graph.last_stage(iteration)
        return read_commit(self.run, self.slot(iteration, ref.kind)) is not None
