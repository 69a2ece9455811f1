"""The graph of an iteration as data: a pure function from settings to stages and links.

A *stage* is a node of the graph. A *link* is what one Slurm job is submitted for: one stage under
`pack: stage`, all stages of an iteration under `pack: iteration`. A rollout in pools has a link for
each: arrays that ask Slurm for different things, of one stage. Evaluations hang off versions of the
weights: they are stages with a job of their own, and no stage of the chain needs them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slurm_rl.config.pools import pool_shards
from slurm_rl.config.schema import EVAL_PREFIX, Settings
from slurm_rl.config.stages import (
    moves_reference,
    needs_reference_stage,
    needs_score,
    uses_reference,
)
from slurm_rl.types import Slot, StageRef


@dataclass(frozen=True, slots=True)
class Need:
    """One parent of a stage.

    back:  0 for the same iteration, 1 for the one before.
    first: the stage of iteration 0 that stands in where there is no iteration before;
           None: the parent is simply absent there.
    """

    role: str
    kind: str
    back: int = 0
    first: str | None = None


@dataclass(frozen=True, slots=True)
class StageNode:
    """A stage kind: its parents, and into how many shards it is cut.

    pools: name -> the shards that have a job of their own; none: all are one job's.
    """

    kind: str
    needs: tuple[Need, ...] = ()
    num_shards: int = 1
    pools: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def shards(self) -> tuple[int | None, ...]:
        """The shards of its slots; one that is not cut has a slot without."""
        return tuple(range(self.num_shards)) if self.num_shards > 1 else (None,)


@dataclass(frozen=True, slots=True)
class EvalRule:
    """Which versions of the weights an evaluation is due for; the last one always is.

    interval: every so manieth version (0: none but the last). before: version 0 too.
    """

    kind: str
    interval: int = 0
    before: bool = True

    def is_due(self, version: int, *, last: int) -> bool:
        if version == 0:
            return self.before
        return version == last or (self.interval > 0 and version % self.interval == 0)


@dataclass(frozen=True, slots=True)
class Link:
    """What one job is for. Its intents lie with its last stage.

    pool: the part of its stage's shards that it is for; empty: all of them.
    """

    iteration: int
    kinds: tuple[str, ...]
    pool: str = ""

    @property
    def label(self) -> str:
        return self.job_kind if len(self.kinds) == 1 else "iteration"

    @property
    def job_kind(self) -> str:
        """The kind of its job: what it asks Slurm for is set under this name."""
        return f"{self.kinds[-1]}-{self.pool}" if self.pool else self.kinds[-1]

    @property
    def stages(self) -> tuple[StageRef, ...]:
        return tuple(StageRef(self.iteration, kind) for kind in self.kinds)

    @property
    def anchor(self) -> StageRef:
        return StageRef(self.iteration, self.kinds[-1])

    def job_name(self, run_name: str, token: str) -> str:
        return f"{run_name}.i{self.iteration:04d}.{self.label}.{token}"

    def __str__(self) -> str:
        """Its last stage, with the pool: `i0012.rollout-spot`."""
        return f"i{self.iteration:04d}.{self.job_kind}"


@dataclass(frozen=True)
class Graph:
    """Stages of every iteration, in the order in which one job would run them.

    It never changes, and is asked the same many times: what it found, it keeps.
    """

    num_iterations: int
    setup: tuple[StageNode, ...]
    nodes: tuple[StageNode, ...]
    pack: str = "stage"
    evals: tuple[EvalRule, ...] = ()

    def stages(self, iteration: int) -> tuple[StageNode, ...]:
        return (*self.setup, *self.nodes) if iteration == 0 else self.nodes

    def node(self, kind: str) -> StageNode:
        """A stage kind; an evaluation is a kind without needs that its iteration would tell."""
        return self._by_kind[kind]

    @functools.cached_property
    def _by_kind(self) -> dict[str, StageNode]:
        nodes = (*self.setup, *self.nodes, *(StageNode(rule.kind) for rule in self.evals))
        return {node.kind: node for node in nodes}

    def last_stage(self, iteration: int) -> StageRef:
        """Its commit means that the iteration is complete."""
        return StageRef(iteration, self.stages(iteration)[-1].kind)

    def parents(self, ref: StageRef) -> dict[str, StageRef]:
        """Role -> stage, for every parent that `ref` has."""
        if ref.is_eval:
            return {"weights": self.weights(ref.iteration)}
        parents = {}
        for need in self.node(ref.kind).needs:
            if need.back <= ref.iteration:
                parents[need.role] = StageRef(ref.iteration - need.back, need.kind)
            elif need.first is not None:
                parents[need.role] = StageRef(0, need.first)
        return parents

    @staticmethod
    def weights(version: int) -> StageRef:
        """The stage that makes a version of the weights."""
        return StageRef(version - 1, "train") if version else StageRef(0, "init")

    def due_evals(self, version: int) -> tuple[StageRef, ...]:
        """Evaluations that the rules ask for of one version."""
        due = [rule for rule in self.evals if rule.is_due(version, last=self.num_iterations)]
        return tuple(StageRef(version, rule.kind) for rule in due)

    def earlier(self, kind: str, *, before: int, most: int) -> list[StageRef]:
        """Stages of a kind in iterations below `before` (of an evaluation: due ones), newest first;
        at most so many, or those of so many iterations."""
        rule = next((rule for rule in self.evals if rule.kind == kind), None)
        if rule is not None:
            step = rule.interval or self.num_iterations
            due = range((before - 1) // step * step, 0, -step)[:most]
            zero = [0] if rule.before and before > 0 and len(due) < most else []
            return [StageRef(version, kind) for version in (*due, *zero)]
        return [
            StageRef(i, kind)
            for i in range(before - 1, max(-1, before - 1 - most), -1)
            if any(node.kind == kind for node in self.stages(i))
        ]

    def has_eval(self, ref: StageRef) -> bool:
        """Whether there can be such an evaluation, due or not."""
        is_known = any(rule.kind == ref.kind for rule in self.evals)
        return is_known and 0 <= ref.iteration <= self.num_iterations

    def links(self, iteration: int) -> tuple[Link, ...]:
        """The jobs of one iteration. Nothing but the setup packs alone: it has its own shape."""
        if iteration not in self._links:
            self._links[iteration] = self._make_links(iteration)
        return self._links[iteration]

    @functools.cached_property
    def _links(self) -> dict[int, tuple[Link, ...]]:
        return {}

    def _make_links(self, iteration: int) -> tuple[Link, ...]:
        nodes = self.stages(iteration)
        if self.pack != "stage":
            return (Link(iteration, tuple(node.kind for node in nodes)),)
        return tuple(
            Link(iteration, (node.kind,), pool)
            for node in nodes
            for pool in ([name for name, _ in node.pools] or [""])
        )

    def links_of(self, ref: StageRef) -> tuple[Link, ...]:
        """The links that a stage belongs to: one, or one for each pool."""
        if ref.is_eval:
            return (Link(ref.iteration, (ref.kind,)),)
        return tuple(link for link in self.links(ref.iteration) if ref.kind in link.kinds)

    def pool_of(self, slot: Slot) -> str:
        """The pool that a slot's shard belongs to; empty where there are none."""
        pools = self.node(slot.kind).pools
        return next((name for name, shards in pools if (slot.shard or 0) in shards), "")

    def job_kind(self, slot: Slot) -> str:
        """The kind of the jobs that a slot is worked on in."""
        return Link(slot.iteration, (slot.kind,), self.pool_of(slot)).job_kind

    def link_parents(self, link: Link) -> tuple[Link, ...]:
        """Links whose ends a link waits for: its stages' parents, less those that another of
        them waits for already; newest last."""
        if link not in self._link_parents:
            self._link_parents[link] = self._find_link_parents(link)
        return self._link_parents[link]

    @functools.cached_property
    def _link_parents(self) -> dict[Link, tuple[Link, ...]]:
        return {}

    def _find_link_parents(self, link: Link) -> tuple[Link, ...]:
        found = self._direct_parents(link)
        covered: set[Link] = set()
        for parent in sorted(found, key=_order, reverse=True):
            if parent not in covered:
                covered |= self._ancestors(parent, since=min(map(_age, found)))
        return tuple(sorted(found - covered, key=_order))

    def _direct_parents(self, link: Link) -> set[Link]:
        refs = {ref for stage in link.stages for ref in self.parents(stage).values()}
        # Older ones (the reference model) have committed long before.
        near = {ref for ref in refs if ref.iteration >= link.iteration - 2}
        return {at for ref in near for at in self.links_of(ref)} - {link}

    def _ancestors(self, link: Link, *, since: tuple[int, int]) -> set[Link]:
        """Those that are not older than `since`."""
        found: set[Link] = set()
        todo = [link]
        while todo:
            for parent in self._direct_parents(todo.pop()):
                if parent not in found and _age(parent) >= since:
                    found.add(parent)
                    todo.append(parent)
        return found

    def links_from(self, iteration: int) -> Iterator[Link]:
        """Links of `iteration` and all after it, in order."""
        for i in range(iteration, self.num_iterations):
            yield from self.links(i)

    def stages_from(self, iteration: int) -> Iterator[tuple[StageRef, tuple[Link, ...]]]:
        """The same by the stage that they end with: the pools of one come together."""
        for ref, links in itertools.groupby(self.links_from(iteration), lambda link: link.anchor):
            yield ref, tuple(links)


def _age(link: Link) -> tuple[int, int]:
    """Iteration, then the place of the last stage in it: pools of one stage are of the same."""
    return link.anchor.position


def _order(link: Link) -> tuple[tuple[int, int], str]:
    """Sorts links by age."""
    return _age(link), link.pool


#: The samples, for every stage that works on them.
_ROLLOUT = Need("rollout", "rollout")


def _training_nodes(settings: Settings) -> Iterator[StageNode]:
    """The stages behind the rollout. What one of them computes for the samples, those behind it
    that need it get by its kind as a role."""
    since_init: Any = {"back": settings.num_rollout + 1, "first": "init"}
    before: list[Need] = [_ROLLOUT]
    if needs_score(settings):
        yield StageNode("score", (_ROLLOUT,))
        before.append(Need("score", "score"))
    if needs_reference_stage(settings):
        last = (
            Need("reference", "reference", back=1, first="init")
            if moves_reference(settings)
            else Need("reference", "init", **since_init)
        )
        policy = Need("weights", "train", back=1, first="init")
        yield StageNode("reference", (_ROLLOUT, policy, last))
        before.append(Need("reference", "reference"))
    known = tuple(before)
    if settings.teacher is not None:
        yield StageNode("teacher", (_ROLLOUT, Need("teacher", "init", **since_init)))
        before.append(Need("teacher", "teacher"))
    if settings.critic is not None:
        yield StageNode("critic", (*known, Need("checkpoint", "critic", back=1, first="init")))
        before.append(Need("critic", "critic"))
    if uses_reference(settings) and not needs_reference_stage(settings):
        before.append(Need("reference", "init", **since_init))
    yield StageNode("train", (*before, Need("checkpoint", "train", back=1, first="init")))


def build_graph(settings: Settings) -> Graph:
    """The graph of a run.

    GRPO: rollout → train, or rollout → score → train where rewards come from a stage of their own.
    With lag 1 a rollout needs the weights before the last, so that it runs beside the train stage
    that makes the last; nor does it wait for the scores of the one before. With a KL to a reference
    its log-probs come from the train job, which is handed the reference's weights, or from a stage
    of their own. A critic and the policy advance in turn: each iteration's critic gives the policy
    its values, and goes on from the critic before.
    """
    rollout = StageNode(
        "rollout",
        (
            Need("weights", "train", back=1 + settings.chain.lag, first="init"),
            Need("previous", "rollout", back=1),
        ),
        num_shards=settings.rollout.shards,
        pools=tuple((name, tuple(shards)) for name, shards in pool_shards(settings).items()),
    )
    return Graph(
        num_iterations=settings.num_rollout,
        setup=(StageNode("init"),),
        nodes=(rollout, *_training_nodes(settings)),
        pack=settings.chain.pack,
        evals=tuple(
            EvalRule(f"{EVAL_PREFIX}{name}", rule.interval or 0, rule.before_training)
            for name, rule in settings.eval.items()
        ),
    )
