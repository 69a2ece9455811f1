"""What must hold of a run at every moment, whatever happens to it.

The judge sits below all processes: it sees each name as it is made, and looks at the queue after
each step of the cluster. It raises AssertionError, and remembers the first breach: a process may
take the exception for its own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_rl.chain.scheduler import JobState
from slurm_rl.chain.slots import slots_of
from slurm_rl.launch.memory import MemoryJob
from slurm_rl.storage.commits import commit_path, find_damage
from slurm_rl.storage.control import Control, read_control
from slurm_rl.storage.tombstones import is_condemned
from slurm_rl.types import Slot
from toy.mirror_fs import MirrorFs
from toy.world import World

_SLOT = re.compile(r"iterations/(\d+)/([\w-]+)\.t(\d+)(?:/shard-(\d+))?/COMMIT")
_GIVEN_UP = re.compile(r"iterations/(\d+)/(eval-[\w-]+)\.t(\d+)/given-up\.\d+")


class Breach(AssertionError):
    """A rule was broken."""


class Judge:
    """Watches one run. `commits` holds what was published where, `breach` the first broken rule.

    max_submissions: how often one link, or a shard of it, may be submitted on one timeline.
    is_honest: whether the scheduler, and everybody's clock, could be believed so far: then no link
               has two jobs.
    """

    def __init__(
        self,
        world: World,
        *,
        max_submissions: int,
        max_ticks: int,
        is_honest: Callable[[], bool] = lambda: False,
    ) -> None:
        self.world, self.is_honest = world, is_honest
        self.fs = world.cluster.fs
        assert isinstance(self.fs, MirrorFs)
        self.fs.watch = self._on_name
        self.max_submissions, self.max_ticks = max_submissions, max_ticks
        self.control = read_control(world.run)
        self.commits: dict[Slot, bytes] = {}
        self.given_up: set[Slot] = set()
        self.breach: Breach | None = None
        self._is_stale = False
        self._num_seen = 0
        self._open: list[MemoryJob] = []
        self._doubled: dict[tuple[str, int | None], float] = {}
        self._submissions: Counter[str] = Counter()
        batch = world.settings.rollout.rollout_batch_size
        self._batch, self._lag = batch, world.settings.chain.lag

    # -- after every step ---------------------------------------------------------------------

    def look(self) -> None:
        """Raise what was broken meanwhile; hold the queue against its rules."""
        if self.breach is not None:
            raise self.breach
        if self._is_stale:
            self.control, self._is_stale = read_control(self.world.run), False
        for job in self.world.cluster.history[self._num_seen :]:
            self._on_submission(job)
        self._num_seen = len(self.world.cluster.history)
        for job in [job for job in self._open if job.state is JobState.ENDED]:
            self._open.remove(job)
            self._on_end(job)
        self._check_doubles()

    def is_complete(self) -> bool:
        """The last iteration has its commit, on the timeline that counts, and every evaluation has
        one or was given up."""
        graph = self.world.graph
        ref = graph.last_stage(graph.num_iterations - 1)
        if Slot(ref.iteration, ref.kind, self.control.timeline_of(ref)) not in self.commits:
            return False
        slots = [
            Slot(ref.iteration, ref.kind, self.control.timeline_of(ref))
            for version in range(graph.num_iterations + 1)
            for ref in graph.due_evals(version)
        ]
        return all(slot in self.commits or slot in self.given_up for slot in slots)

    def is_stranded(self) -> bool:
        """Nothing runs, and nothing in the queue will start by itself."""
        cluster = self.world.cluster
        if cluster.has_work():
            return False
        stuck: set[str] = set()
        jobs = [job for job in cluster.live_jobs() if job.request.command]
        for _ in jobs:
            stuck |= {j.base_id for j in jobs if j.state is JobState.HELD or stuck & set(j.after)}
        return stuck >= {job.base_id for job in jobs}

    def _check_doubles(self) -> None:
        """One live job for each link and shard, but for one that is about to end."""
        now = self.world.cluster.now
        found = Counter(
            (job.request.command[2].rpartition("/")[0], job.task)
            for job in self._open
            if not job.is_tick and job.state in (JobState.PENDING, JobState.RUNNING)
        )
        twice = [key for key, count in found.items() if count > 1]
        self._doubled = {key: self._doubled.get(key, now) for key in twice}
        if twice and self.is_honest():
            lasting = [key for key, since in self._doubled.items() if now - since > 5.0]
            self._rule(not lasting, f"two jobs for {lasting}")

    def _on_submission(self, job: MemoryJob) -> None:
        self._open.append(job)
        if job.is_tick:
            pending = [
                j
                for j in self.world.cluster.live_jobs()
                if j.is_tick and j.request.command and j.state is JobState.PENDING
            ]
            self._rule(len(pending) <= self.max_ticks, f"{len(pending)} ticks are pending")
            return
        # An array whose tasks are seen to end one after the other comes again in parts.
        link = f"{job.request.command[2].rpartition('/')[0]} {job.task}"
        self._submissions[link] += 1
        number = self._submissions[link]
        self._rule(number <= self.max_submissions, f"{job.request.name}: submission {number}")

    def _on_end(self, job: MemoryJob) -> None:
        """Only a job whose stage (or shard) is committed may say 0."""
        if job.exit_code == 0 and not job.is_tick:
            done = {(s.iteration, s.kind, s.shard) for s in self.commits}
            for ref in job.request.stages:
                shards = self.world.graph.node(ref.kind).num_shards
                wanted = [None] if job.task is None or shards == 1 else [job.task]
                is_done = all((ref.iteration, ref.kind, shard) in done for shard in wanted)
                self._rule(is_done, f"{job.request.name} ended with 0 without a commit of {ref}")

    # -- at every name ------------------------------------------------------------------------

    def _on_name(self, path: Path) -> None:
        if path.parent.name == "control":
            self._is_stale = True
        elif path.name.startswith("given-up."):
            match = _GIVEN_UP.search(str(path))
            assert match is not None, path
            self.given_up.add(Slot(int(match[1]), match[2], int(match[3])))
        elif path.name == "COMMIT":
            try:
                self._on_commit(path)
            except Breach as breach:
                self.breach = self.breach or breach

    def _on_commit(self, path: Path) -> None:
        """At most one for each slot, whole, from committed parents, of the right samples."""
        match = _SLOT.search(str(path))
        assert match is not None, path
        shard = None if match[4] is None else int(match[4])
        slot = Slot(int(match[1]), match[2], int(match[3]), shard)
        self._rule(slot not in self.commits, f"{slot}: a second commit")
        data = self.world.run.fs.read(path)
        self.commits[slot] = data
        content = json.loads(data)["content"]
        self._check_parents(slot, content)
        getattr(self, f"_check_{slot.kind.partition('-')[0]}")(slot, content)
        for name, entry in self._files(slot, json.loads(data)).items():
            found = self.fs.files.get(name)
            size = None if found is None else len(found)
            self._rule(size == entry["size_bytes"], f"{slot}: {name} is not what it commits")

    def _check_parents(self, slot: Slot, content: dict[str, Any]) -> None:
        control = as_of(self.control_now(), slot.timeline)
        wanted = {}
        for role, ref in self.world.graph.parents(slot.stage).items():
            place = Slot(ref.iteration, ref.kind, control.timeline_of(ref))
            self._rule(place in self.commits, f"{slot}: made before {place} was committed")
            wanted[role] = json.loads(self.commits[place])["digest"]
        self._rule(content["parents"] == wanted, f"{slot}: made from {content['parents']}")

    def _check_init(self, slot: Slot, content: dict[str, Any]) -> None:
        self._rule(content["weights"]["version"] == 0, f"{slot}: {content['weights']}")

    def _check_rollout(self, slot: Slot, content: dict[str, Any]) -> None:
        version = max(0, slot.iteration - self._lag)
        self._rule(content["weights"]["version"] == version, f"{slot}: {content['weights']}")
        first, num_shards = (
            slot.iteration * self._batch,
            self.world.graph.node("rollout").num_shards,
        )
        self._rule(content["cursor"]["position"] == first + self._batch, f"{slot}: {content}")
        if slot.shard is None and num_shards > 1:
            return
        raw = json.loads(self.commits[slot])
        samples = [
            json.loads(line)
            for name in self._files(slot, raw)
            for line in self.fs.files.get(name, b"").splitlines()
        ]
        mine = range(first + (slot.shard or 0), first + self._batch, num_shards)
        wanted = [(position, copy) for position in mine for copy in (0, 1)]
        found = [(sample["position"], sample["copy"]) for sample in samples]
        self._rule(found == wanted, f"{slot}: samples {found}, wanted {wanted}")
        versions = {sample["version"] for sample in samples}
        self._rule(versions == {version}, f"{slot}: samples of versions {versions}")

    def _check_train(self, slot: Slot, content: dict[str, Any]) -> None:
        version = slot.iteration + 1
        self._rule(content["weights"]["version"] == version, f"{slot}: {content['weights']}")
        self._rule(content["optimizer_steps"] == version, f"{slot}: {content}")
        trained = 2 * self._batch * version
        self._rule(content["num_samples_trained"] == trained, f"{slot}: {content}")

    def _check_critic(self, slot: Slot, content: dict[str, Any]) -> None:
        self._rule(content["version"] == slot.iteration + 1, f"{slot}: {content}")

    def _check_reference(self, slot: Slot, content: dict[str, Any]) -> None:
        self._rule(content["version"] == slot.iteration, f"{slot}: {content}")

    def _check_teacher(self, slot: Slot, content: dict[str, Any]) -> None:
        self._rule(content["version"] == 0, f"{slot}: {content}")

    def _check_score(self, slot: Slot, content: dict[str, Any]) -> None:
        self._rule(content["num_samples"] == 2 * self._batch, f"{slot}: {content}")

    def _check_eval(self, slot: Slot, content: dict[str, Any]) -> None:
        self._rule(content["weights"]["version"] == slot.iteration, f"{slot}: {content}")
        is_due = slot.stage in self.world.graph.due_evals(slot.iteration)
        self._rule(is_due, f"{slot}: nobody wanted it")

    def control_now(self) -> Control:
        if self._is_stale:
            self.control, self._is_stale = read_control(self.world.run), False
        return self.control

    # -- in the end ---------------------------------------------------------------------------

    def check_end(self, undisturbed: dict[str, str]) -> None:
        """The same content as without faults; whatever was committed is still there, and whole."""
        world = self.world
        for process, error in world.cluster.crashes:
            raise Breach(f"{process.name} crashed: {error!r}") from error
        given_up = world.given_up()
        wanted = {name: digest for name, digest in undisturbed.items() if name not in given_up}
        found = {name: digest for name, digest in world.digests().items() if name in wanted}
        self._rule(found == wanted, "other content than undisturbed")
        for slot, data in self.commits.items():
            found = self.fs.files.get(str(commit_path(world.run, slot)))
            self._rule(found == data, f"{slot}: its COMMIT is another, or gone")
        losses = find_losses(world)
        self._rule(not losses, f"lost: {losses}")
        self._check_tokens()
        self._check_words()

    def _check_words(self) -> None:
        """Who says that he committed did; every attempt had its claim."""
        for name, data in self.fs.files.items():
            folder, _, tail = name.rpartition("/")
            slot, _, attempt = folder.rpartition("/")
            if tail != "ended.json" or json.loads(data)["outcome"] != "committed":
                continue
            commit = json.loads(self.fs.files[f"{slot}/COMMIT"])
            self._rule(commit["provenance"]["attempt"] == attempt, f"{folder}: did not win")
            epoch, _, token = attempt.partition("-")
            claim = json.loads(self.fs.files[f"{slot}/claim.{epoch[1:]}"])
            self._rule(claim["attempt_token"] == token, f"{folder}: without its claim")

    def _check_tokens(self) -> None:
        """Every link job has its own intent, and each intent one job at most."""
        links = [job for job in self.world.cluster.history if job.request.stages]
        names = Counter((job.request.name.rpartition(".")[2], job.task) for job in links)
        twice = [name for name, count in names.items() if count > 1]
        self._rule(not twice, f"submitted twice: {twice}")
        tokens = {
            json.loads(data)["token"]
            for name, data in self.fs.files.items()
            if re.search(r"/submit\.\d+$", name)
        }
        strays = {token for token, _ in names} - tokens
        self._rule(not strays, f"jobs without an intent: {strays}")

    def _files(self, slot: Slot, raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Absolute path -> entry, for the files that a COMMIT names."""
        folder, provenance = self.world.run.slot_dir(slot), raw["provenance"]
        found = {}
        for entry in raw["content"]["files"]:
            if "attempt" in provenance:
                found[f"{folder}/{provenance['attempt']}/{entry['path']}"] = entry
            else:
                shard, _, rest = entry["path"].partition("/")
                found[f"{folder}/{provenance['attempts'][shard]}/{rest}"] = entry
        return found

    def _rule(self, holds: bool, words: str) -> None:
        if not holds:
            breach = Breach(words)
            self.breach = self.breach or breach
            raise breach


def find_losses(world: World) -> list[str]:
    """Committed files that are not what was committed, and were not let go on purpose."""
    control = read_control(world.run)
    refs = [*world.stages(), *world.wanted_evals()]
    slots = {ref: Slot(ref.iteration, ref.kind, control.timeline_of(ref)) for ref in refs}
    return [
        line
        for ref, slot in slots.items()
        if (commit := world.commit(ref)) is not None and not is_condemned(world.run, slot)
        for line in find_damage(world.run, slot, commit)
    ]


def as_of(control: Control, timeline: int) -> Control:
    """Control as an attempt on `timeline` had read it."""
    starts = tuple(start for start in control.timelines if start.number <= timeline)
    return Control(timelines=starts)


def slots_now(world: World) -> dict[str, Slot]:
    """Name -> slot, of every slot on the current timelines."""
    control = read_control(world.run)
    refs = world.stages()
    return {str(slot): slot for ref in refs for slot in slots_of(world.graph, control, ref)}
