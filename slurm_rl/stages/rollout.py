"""The rollout stage: from a weights commit to a committed batch of samples.

Owns the order of things: see what the journals hold already, and, if that is not enough, verify the
weights, start the engine, check it, and generate; then seal. What each of these means is in
`slurm_rl.rollout`.

Nothing is generated before the engine has shown that it serves the weights of the commit. In
deterministic mode the sealed files are a function of the order and the settings, however often the
stage was killed, whatever the journals held, and whichever shard made which group.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_rl.config.derive import admission, data_overrides, is_graded_later
from slurm_rl.config.schema import Settings
from slurm_rl.config.stages import is_supervised
from slurm_rl.rollout.carry import PARTIAL_NAME, Carried, read_carried, write_carried
from slurm_rl.rollout.closing import Close, find_desk
from slurm_rl.rollout.collecting import rare_collections
from slurm_rl.rollout.data import Visit, open_stream, resolve
from slurm_rl.rollout.engine import Engine, Weights
from slurm_rl.rollout.filters import open_filter
from slurm_rl.rollout.groups import Planner
from slurm_rl.rollout.ledger import Ledger, plan_rule
from slurm_rl.rollout.metrics import RolloutMetrics
from slurm_rl.rollout.pipeline import Outcome, Pipeline, Watch
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.sealing import seal_groups
from slurm_rl.rollout.supply import Supply
from slurm_rl.stages.rank import current_rank
from slurm_rl.stages.serving import (
    Floor,
    find_context_len,
    follow,
    read_model,
    read_versions,
    run_on_labels,
    run_pipeline,
)
from slurm_rl.storage.commits import read_commit
from slurm_rl.storage.damage import check_inputs
from slurm_rl.storage.durable import seal_files
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import UNUSUAL, Order, Result, Slot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """What a rollout works with before there is an engine."""

    weights: Weights
    tokenizer: Any
    supply: Supply
    pipeline: Pipeline
    began: float


def run_rollout(order: Order, settings: Settings, *, engine: Engine | None = None) -> Result:
    """Run the stage (or shard) that `order` names; everything is fsynced on return.

    engine: one that is already serving, for a process that lives longer than a stage: it is
    given the new weights and left running. Without it, one is started and stopped here, if the
    journals of earlier attempts and of the other shards leave anything to do.

    Raises DataError, RewardError, ModelError (the user's), CorruptError (the weights are not
    what was committed) and EngineError.
    """
    if not is_supervised(settings, order.iteration) and follow(order, settings):
        return Result(files=[])
    if is_supervised(settings, order.iteration) and current_rank(os.environ) != 0:
        return Result(files=[])  # no engine, so no other nodes' part of it
    with rare_collections(), open_rollout(order, settings) as opened:
        floor = Floor(order, settings, opened.tokenizer)
        if is_supervised(settings, order.iteration):
            outcome = run_on_labels(floor, opened.pipeline, opened.weights)
            return seal(opened, outcome, order=order, settings=settings, numbers={})
        is_graded = not is_graded_later(settings)
        outcome, numbers = run_pipeline(floor, opened.pipeline, engine=engine, is_graded=is_graded)
        return seal(opened, outcome, order=order, settings=settings, numbers=numbers)


@contextmanager
def open_rollout(order: Order, settings: Settings) -> Iterator[Opened]:
    """The model, the data at the cursor, and what was carried over; nothing is started."""
    began = time.monotonic()
    weights, tokenizer = read_model(order)
    context_len = find_context_len(settings, weights.path)
    carried = _read_carried(order, settings)
    previous = order.inputs.get("previous")
    # Labels are not compared with each other: no filter would let one pass.
    filters = nullcontext() if is_supervised(settings, order.iteration) else open_filter(settings)
    with resolve(settings) as data, filters as keep:
        if previous is None:
            data.check()  # once in a run: a bad row is found before the first GPU hour
        stream = open_stream(
            data,
            settings,
            cursor=None if previous is None else previous.content["cursor"],
            tokenizer=tokenizer,
            context_len=context_len,
        )
        planner = Planner(
            order,
            settings,
            weights,
            overrides=data_overrides(settings),
            purpose=("sample", order.iteration),
            context_len=context_len,
            start=stream.start.as_dict(),
        )
        supply = Supply(
            carried=carried,
            stream=stream,
            planner=planner,
            ledger=_open_ledger(settings, num_carried=len(carried)),
            group_size=settings.rollout.n_samples_per_prompt,
            shard=order.shard,
            num_shards=order.num_shards,
        )
        watch = plan_watch(order, settings, key=planner.made_from)
        pipeline = Pipeline(supply, watch, keep=keep)
        yield Opened(weights, tokenizer, supply, pipeline, began)


def _read_carried(order: Order, settings: Settings) -> list[Carried]:
    """What the rollout before handed on, compared with its commit.

    After a change of settings that would make another group of it, a prompt starts afresh.
    """
    previous = order.inputs.get("previous")
    if previous is None:
        return []
    check_inputs(previous, [n for n in previous.files if n.split("/")[-1] == PARTIAL_NAME])
    rollout, overrides = settings.rollout, data_overrides(settings)

    def may_go_on(visit: Visit, samples: Sequence[Sample]) -> bool:
        own = overrides.get(visit.prompt.data_set)
        num = (own and own.n_samples_per_prompt) or rollout.n_samples_per_prompt
        return rollout.partial_rollout and len(samples) == num

    carried = read_carried(previous.named(PARTIAL_NAME))
    return [(visit, had if may_go_on(visit, had) else ()) for visit, had in carried]


def _open_ledger(settings: Settings, *, num_carried: int) -> Ledger:
    rollout = settings.rollout
    rule = plan_rule(
        batch_size=rollout.rollout_batch_size,
        over_sampling=rollout.over_sampling_batch_size,
        close_at=rollout.close_at,
        max_groups=rollout.max_groups,
        admission=admission(settings),
        may_fall_short=rollout.on_exhausted == "train",
    )
    return Ledger(rule, num_carried=num_carried)


def plan_watch(order: Order, settings: Settings, *, key: str) -> Watch:
    """Where the other attempts and shards of this stage leave what they do."""
    own = Path(order.attempt_dir)
    is_alone = order.num_shards == 1
    stage = own.parent if is_alone else own.parent.parent
    pattern = "a[0-9]*-*" if is_alone else "shard-*/a[0-9]*-*"
    earlier = [Path(folder) for folder in order.earlier_attempts]

    def attempts() -> Iterator[Path]:
        yield from earlier
        yield from (path for path in sorted(stage.glob(pattern)) if path not in (own, *earlier))

    desk = None if is_alone else find_desk(stage, key, committed=_read_decisions(order))
    return Watch(
        attempts=attempts,
        desk=desk,
        close_after_s=settings.rollout.close_after_s,
    )


def _read_decisions(order: Order) -> Iterator[str]:
    """Digests of the decisions by which shards of this stage have sealed and committed."""
    run = RunDir(Path(order.run_dir))
    for shard in range(order.num_shards):
        commit = read_commit(run, Slot(order.iteration, order.kind, order.timeline, shard))
        if commit is not None and "decision" in commit.content:
            yield commit.content["decision"]


def seal(
    opened: Opened, outcome: Outcome, *, order: Order, settings: Settings, numbers: dict[str, float]
) -> Result:
    """Write and fsync the admitted samples of this shard, and what carries over."""
    began = time.monotonic()
    root, close = Path(order.attempt_dir), outcome.close
    supply, metrics = opened.supply, RolloutMetrics()
    admitted = filter(supply.is_own, sorted(close.decision.admitted))
    # One that had to be made again, and whose reward failed, is not there.
    own = [supply.entries[index] for index in admitted if index in supply.entries]
    names = seal_groups(root, own, count=metrics.add)
    names += write_carried(root, _carried(opened, outcome, settings))
    files = seal_files(root, names)
    ended = time.monotonic()
    numbers = numbers | {
        "perf/seal_time": ended - began,
        "perf/rollout_time": ended - opened.began,
        "rollout/groups_taken_over": float(max(0, len(own) - outcome.num_made)),
        "rollout/groups_dropped": float(close.decision.num_dropped),
        "rollout/groups_carried": float(len(close.decision.carried)),
    }
    found = metrics.fold()
    log.info(
        "reward %s over %d samples", found.get("rollout/raw_reward", "open"), metrics.num_samples
    )
    unusual = {UNUSUAL: "supervised"} if is_supervised(settings, order.iteration) else {}
    return Result(
        files,
        content=_content(opened, close, settings)
        | unusual
        | {"num_samples": metrics.num_samples, "num_groups": metrics.num_groups},
        metrics=found | numbers,
        provenance={"versions": read_versions(), "save_s": round(ended - began, 3)},
    )


def _content(opened: Opened, close: Close, settings: Settings) -> dict[str, Any]:
    decision = close.decision
    weights = {"version": opened.weights.version, "digest": opened.weights.digest}
    return {
        "weights": weights,
        "cursor": close.cursor,
        "seed": settings.seed,
        "carried": decision.carried,
        "dropped": decision.reasons,
        # Shards of different decisions must not be put together.
        "decision": decision.digest,
    }


def _carried(opened: Opened, outcome: Outcome, settings: Settings) -> Iterator[Carried]:
    """Our own groups that the next rollout goes on with; their tokens only where that is meant."""
    keeps_tokens = settings.rollout.partial_rollout
    for visit in opened.supply.carried_visits(outcome.close):
        samples = outcome.cut_off.get(visit.group_index, []) if keeps_tokens else []
        yield visit, tuple(samples)
