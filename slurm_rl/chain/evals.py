"""Evaluations: which are wanted, and which of those are still to be done.

Wanted are those that the rules ask for (`Graph.due_evals`) and those that somebody wished for. One
is *settled* when it is committed, was given up, or when its weights were pruned. No stage of the
chain ever waits for one; the run is over when all wanted ones are settled.

The cost of looking does not grow with the run: `evaluated` is a hint below which version all is
settled. Any damage to it costs a look at everything.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from slurm_rl.chain.graph import Graph
from slurm_rl.chain.view import Spec
from slurm_rl.errors import StorageError
from slurm_rl.storage.claims import read_claims, read_elapsed
from slurm_rl.storage.commits import has_commit, read_commit
from slurm_rl.storage.control import Control
from slurm_rl.storage.digest import digest_value
from slurm_rl.storage.durable import write_hint
from slurm_rl.storage.evals import read_given_up, read_wishes
from slurm_rl.storage.rundir import RunDir
from slurm_rl.storage.tombstones import is_condemned, is_pruned
from slurm_rl.types import Slot, StageRef

_HINT = "evaluated"


@dataclass(frozen=True)
class Evals:
    """One reading of what is wanted. newest: the newest version whose weights are committed (-1:
    none is)."""

    run: RunDir
    graph: Graph
    control: Control
    wishes: tuple[StageRef, ...]
    newest: int

    def wanted(self, first: int, last: int) -> Iterator[StageRef]:
        """Of versions `first` to `last`, due or wished for, by version."""
        if not self.graph.evals:
            return
        wished = itertools.groupby(self.wishes, key=lambda ref: ref.iteration)
        by_version = {version: list(refs) for version, refs in wished}
        for version in range(max(0, first), min(last, self.graph.num_iterations) + 1):
            refs = [*self.graph.due_evals(version), *by_version.get(version, ())]
            yield from (ref for ref in dict.fromkeys(refs) if self.graph.has_eval(ref))

    def is_wanted(self, ref: StageRef) -> bool:
        return ref in set(self.wanted(ref.iteration, ref.iteration))

    def slot(self, ref: StageRef) -> Slot:
        return Slot(ref.iteration, ref.kind, self.control.timeline_of(ref))

    def weights_slot(self, ref: StageRef) -> Slot:
        """Where the weights are that it evaluates."""
        return self.slot(self.graph.weights(ref.iteration))

    def is_settled(self, ref: StageRef) -> bool:
        slot = self.slot(ref)
        return (
            has_commit(self.run, slot)
            or read_given_up(self.run, self.control, slot) is not None
            or is_pruned(self.run, self.weights_slot(ref))
        )

    def open_evals(self) -> Iterator[StageRef]:
        """Wanted ones of committed weights that are not settled, by version."""
        if not self.graph.evals:
            return iter(())
        first, _ = self._read_hint()
        return (ref for ref in self.wanted(first, self.newest) if not self.is_settled(ref))

    def can_begin(self, ref: StageRef) -> bool:
        """Whether its weights may be read: they may have been marked before it was wanted; the next
        collection takes that back."""
        return not is_condemned(self.run, self.weights_slot(ref))

    def read_gpu_s(self, spec: Spec, *, last: int | None = None) -> float:
        """GPU seconds of the evaluations of versions up to `last`; None: of all."""
        if not self.graph.evals:
            return 0.0
        first, before_s = self._read_hint() if last is None else (0, 0.0)
        last = self.graph.num_iterations if last is None else last
        return before_s + self._sum_gpu_s(spec, self.wanted(first, last))

    def write_hint(self, spec: Spec, first_open: StageRef | None) -> None:
        """Note that everything before `first_open` is settled (None: everything so far)."""
        if not self.graph.evals:
            return
        known, before_s = self._read_hint()
        first = self.newest + 1 if first_open is None else first_open.iteration
        if first <= known:
            return
        gpu_s = before_s + self._sum_gpu_s(spec, self.wanted(known, first - 1))
        value = {"version": first, "gpu_s": gpu_s, "key": self._key()}
        with contextlib.suppress(OSError, StorageError):  # no room, or no right: others look again
            write_hint(self.run.root / _HINT, json.dumps(value).encode(), fs=self.run.fs)

    def _sum_gpu_s(self, spec: Spec, refs: Iterable[StageRef]) -> float:
        gpus = dict(spec.gpus)
        return sum(
            self._gpu_s_of(self.slot(ref), gpus[ref.kind]) for ref in refs if gpus.get(ref.kind)
        )

    def _gpu_s_of(self, slot: Slot, gpus: int) -> float:
        """As its commit says; where there is none, of the attempts so far."""
        commit = read_commit(self.run, slot)
        if commit is not None:
            return float(commit.provenance.get("gpu_s", 0.0))
        return gpus * sum(read_elapsed(self.run, slot, c) for c in read_claims(self.run, slot))

    def _read_hint(self) -> tuple[int, float]:
        """Up to which version all is settled, and what that took in GPU seconds."""
        try:
            raw = json.loads(self.run.fs.read(self.run.root / _HINT))
            if raw["key"] != self._key():
                return 0, 0.0
            return min(max(0, int(raw["version"])), self.newest + 1), float(raw["gpu_s"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return 0, 0.0  # a hint: any damage to it costs a look at everything

    def _key(self) -> str:
        """What was settled is so for these rules, wishes, timelines and pardons alone."""
        rules = [(rule.kind, rule.interval, rule.before) for rule in self.graph.evals]
        timelines = [start.number for start in self.control.timelines]
        pardons = [(name, n) for name, n in self.control.forgiven if ".eval-" in name]
        wishes = [str(ref) for ref in self.wishes]
        return digest_value([rules, self.graph.num_iterations, timelines, pardons, wishes])


def read_evals(run: RunDir, graph: Graph, control: Control, *, head: int) -> Evals:
    """What is wanted now. head: the first iteration that is not complete."""
    if not graph.evals:
        return Evals(run, graph, control, (), head)
    init = graph.weights(0)
    has_weights = head > 0 or has_commit(run, Slot(0, init.kind, control.timeline_of(init)))
    return Evals(run, graph, control, read_wishes(run), head if has_weights else -1)
