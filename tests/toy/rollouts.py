"""A rollout without a model: the product's supply, pipeline and sealing on made-up answers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm_rl.config.derive import data_overrides
from slurm_rl.config.schema import Settings
from slurm_rl.rollout.closing import Close, desk_of
from slurm_rl.rollout.data import Prompt, Visit
from slurm_rl.rollout.engine import Weights
from slurm_rl.rollout.groups import Finisher, Planner
from slurm_rl.rollout.instant import InstantEngine
from slurm_rl.rollout.ledger import Ledger, plan_rule
from slurm_rl.rollout.pipeline import Pipeline, Watch
from slurm_rl.rollout.rewards import Graded
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.single_turn import SingleTurn
from slurm_rl.rollout.supply import Supply
from slurm_rl.types import JOURNAL_NAME, Order

WEIGHTS = Weights(Path("none"), version=3, digest="xxh3:3", label="run/v3")


class Text:
    """A tokenizer that writes numbers."""

    def decode(self, tokens: Any, **options: Any) -> str:
        return " ".join(map(str, tokens))


@dataclass(frozen=True)
class Place:
    visits: int

    def as_dict(self) -> dict[str, Any]:
        return {"visits": self.visits}


class Numbers:
    """A stream of prompts 0, 1, 2, … from a number on."""

    def __init__(self, first: int = 0) -> None:
        self.start = Place(first)
        self._next = first

    def take(self) -> Visit:
        return self.visit(self.pass_by())

    def pass_by(self) -> int:
        self._next += 1
        return self._next - 1

    def visit(self, group_index: int) -> Visit:
        assert self.start.visits <= group_index < self._next
        prompt = Prompt(group_index, f"p{group_index}", group_index, {})
        return Visit(group_index, prompt, (group_index % 50, 7))

    def take_many(self, num: int) -> list[Visit]:
        return [self.take() for _ in range(num)]

    def cursor_after(self, group_index: int) -> Place:
        assert group_index < self._next
        return Place(group_index + 1)


class Slow(InstantEngine):
    """Answers after a while drawn from `seed`; counts what it made, by group."""

    def __init__(self, *, seed: int, longest_s: float = 0.004, concurrency: int = 8) -> None:
        super().__init__(num_tokens=(3, 9), concurrency=concurrency)
        self._draws = random.Random(seed)
        self._longest_s = longest_s
        self.made: list[int] = []

    async def generate(self, request, sampling):
        cut = asyncio.ensure_future(self._cut.wait())
        await asyncio.wait([cut], timeout=self._draws.random() * self._longest_s)
        cut.cancel()
        self.made.append(request.group_index)
        return await super().generate(request, sampling)


async def by_length(samples):
    """Rewards 1 for answers of an even number of tokens."""
    await asyncio.sleep(0)
    graded = tuple(replace(s, reward=float(s.response_length % 2 == 0)) for s in samples)
    return Graded(graded, "graded")


@dataclass
class Shard:
    """One attempt of one shard: where it writes, and what came of it."""

    root: Path
    settings: Settings
    number: int = 0
    num_shards: int = 1
    attempt: int = 1
    first: int = 0
    carried: tuple = ()
    start: dict[str, Any] = field(default_factory=dict)
    stream: Numbers | None = None
    weights: Weights = WEIGHTS
    keep: Any = None
    grade: Any = by_length
    over: int | None = None
    batch: int = 12
    admission: str = "cursor"
    close_at: float = 1.0
    max_groups: int | None = None
    close_after_s: float | None = None
    poll_s: float = 0.01
    outcome: Any = None
    close: Close | None = None
    engine: Slow = field(default_factory=lambda: Slow(seed=0))

    def __post_init__(self) -> None:
        self.stage = self.root / "rollout.t0"
        slot = self.stage if self.num_shards == 1 else self.stage / f"shard-{self.number:04d}"
        self.folder = slot / f"a{self.attempt:04d}-x{self.number}"
        self.folder.mkdir(parents=True)
        order = Order("", "run", "rollout", 5, 0, str(self.folder), "", "", {})
        planner = Planner(
            order,
            self.settings,
            self.weights,
            overrides=data_overrides(self.settings),
            purpose=("sample", 5),
            start=self.start,
        )
        rule = plan_rule(
            batch_size=self.batch,
            admission=self.admission,
            over_sampling=self.over,
            close_at=self.close_at,
            max_groups=self.max_groups,
        )
        self.supply = Supply(
            carried=self.carried,
            stream=self.stream or Numbers(self.first),
            planner=planner,
            ledger=Ledger(rule, num_carried=len(self.carried)),
            group_size=self.settings.rollout.n_samples_per_prompt,
            shard=self.number,
            num_shards=self.num_shards,
        )
        desk = None if self.num_shards == 1 else desk_of(self.stage, planner.made_from)
        watch = Watch(self.others, desk, self.poll_s, self.close_after_s)
        self.pipeline = Pipeline(self.supply, watch, keep=self.keep)

    def others(self):
        pattern = "a*" if self.num_shards == 1 else "shard-*/a*"
        return [path for path in sorted(self.stage.glob(pattern)) if path != self.folder]

    async def run(self) -> Shard:
        self.close = self.pipeline.settle()
        if self.close is None:
            self.engine.start(self.weights)
            generate = SingleTurn(self.engine, Finisher(self.weights, Text()))
            self.outcome = await self.pipeline.run(
                self.engine, generate, self.grade, journal_path=self.folder / JOURNAL_NAME
            )
            self.close = self.outcome.close
        return self

    def samples(self) -> list[Sample]:
        """What this shard would seal."""
        from slurm_rl.rollout.journal import read_group

        own = [i for i in self.close.decision.admitted if self.supply.is_own(i)]
        found = self.supply.entries
        return [s for i in own if i in found for s in read_group(found[i])]
