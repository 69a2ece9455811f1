"""The evaluation stage: every row of one data set, answered by one version of the weights.

Owns what an evaluation is: all rows in their order, n samples each, sampled and rewarded as
`eval.<name>` says (a row whose reward fails, where that drops it, is counted as `dropped`), with
seeds that do not depend on the version, so that versions meet the same draws. The samples are
committed like a rollout's, beside the numbers; nothing is trained on them.

A reward whose service is down ends the attempt (blame `outage`): it is tried again later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_rl.config.rollout_schema import EvalSet
from slurm_rl.config.schema import EVAL_PREFIX, Settings
from slurm_rl.errors import DataError, RewardError
from slurm_rl.rollout.closing import Close
from slurm_rl.rollout.collecting import rare_collections
from slurm_rl.rollout.data import PromptData, Visit, prompt_tokenizer, resolve_eval
from slurm_rl.rollout.engine import Engine
from slurm_rl.rollout.grading import run_grading
from slurm_rl.rollout.groups import Planner
from slurm_rl.rollout.journal import Journal, read_group
from slurm_rl.rollout.ledger import Ledger, plan_rule
from slurm_rl.rollout.metrics import RolloutMetrics
from slurm_rl.rollout.passrate import PassRate
from slurm_rl.rollout.pipeline import Pipeline, Watch
from slurm_rl.rollout.rewards import Grader
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.sealing import seal_groups
from slurm_rl.rollout.supply import Supply
from slurm_rl.stages.serving import (
    Floor,
    find_context_len,
    follow,
    read_model,
    read_versions,
    run_pipeline,
)
from slurm_rl.storage.durable import seal_files
from slurm_rl.types import JOURNAL_NAME, Order, Result

log = logging.getLogger(__name__)


def run_eval(order: Order, settings: Settings, *, engine: Engine | None = None) -> Result:
    """Evaluate the data set that `order.kind` names; everything is fsynced on return.

    Raises what a rollout raises; DataError for a prompt that leaves no room for an answer, since
    leaving it out would change the number; ServiceDown where a reward's service does not answer.
    """
    settings = _without_routing(settings)
    if follow(order, settings):
        return Result(files=[])
    began = time.monotonic()
    name = order.kind.removeprefix(EVAL_PREFIX)
    chosen = settings.eval[name]
    weights, tokenizer = read_model(order)
    with rare_collections(), resolve_eval(settings, name) as data:
        data.check()
        context_len = find_context_len(settings, weights.path)
        rows = Rows(data, settings, name, tokenizer=tokenizer, context_len=context_len)
        planner = Planner(
            order,
            settings,
            weights,
            overrides={name: chosen},
            purpose=("eval", name),
            context_len=context_len,
        )
        supply = _open_supply(rows, planner, data.num_rows, settings=settings, name=name)
        pipeline = Pipeline(supply, Watch(attempts=lambda: _journals(order)))
        floor = Floor(order, settings, tokenizer, {name: chosen})
        outcome, numbers = run_pipeline(floor, pipeline, engine=engine)
        _grade_rest(supply, order, settings, chosen)
        result = _seal(supply, outcome.close, order=order, name=name, pass_k=chosen.pass_k)
    numbers |= {"perf/eval_time": time.monotonic() - began}
    content = {
        "weights": {"version": weights.version, "digest": weights.digest},
        "data_fingerprint": data.fingerprint,
        "eval": chosen.model_dump(exclude=_JOB),
    }
    return replace(result, content=result.content | content, metrics=result.metrics | numbers)


def _without_routing(settings: Settings) -> Settings:
    """Nobody trains on what is evaluated: which experts were chosen is not asked."""
    rollout = settings.rollout.model_copy(update={"use_rollout_routing_replay": False})
    return settings.model_copy(update={"rollout": rollout})


def _open_supply(
    rows: Rows, planner: Planner, num_rows: int, *, settings: Settings, name: str
) -> Supply:
    """All rows make the batch; nothing is filtered, and nothing carries over."""
    rule = plan_rule(
        batch_size=num_rows, max_groups=num_rows, admission="cursor", may_fall_short=True
    )
    own = settings.eval[name].n_samples_per_prompt
    return Supply(
        carried=(),
        stream=rows,
        planner=planner,
        ledger=Ledger(rule),
        group_size=own or settings.rollout.n_samples_per_prompt,
    )


def _journals(order: Order) -> Iterator[Path]:
    """Where earlier attempts left what they generated, and what they graded afterwards."""
    for folder in order.earlier_attempts:
        yield Path(folder)
        yield Path(folder) / "graded"


#: Settings of an evaluation that say where it runs and how often, not what comes out.
_JOB = {"slurm", "container", "python", "env", "deadline_s", "interval", "before_training"} | {
    "prompt_data",  # its fingerprint counts
}


class Rows:
    """Every row of a data set once, as a stream of visits: what `Supply` takes from."""

    def __init__(
        self,
        data: PromptData,
        settings: Settings,
        name: str,
        *,
        tokenizer: Any,
        context_len: int | None,
    ) -> None:
        chosen = settings.eval[name]
        self._data = data
        self._tokenize = prompt_tokenizer(tokenizer, settings, chosen, place=f"eval.{name}")
        self._context_len = context_len
        self._num_taken = 0
        self.start = RowCursor(0)

    def take(self) -> Visit:
        """The next row. Raises DataError for a prompt that fills the context."""
        return self.visit(self.pass_by())

    def pass_by(self) -> int:
        self._num_taken += 1
        return self._num_taken - 1

    def visit(self, group_index: int) -> Visit:
        prompt = self._data.read(0, group_index)
        tokens = tuple(self._tokenize(prompt))
        if self._context_len is not None and len(tokens) >= self._context_len:
            raise DataError(
                f"{self._data.path}: row {group_index}: {len(tokens)} tokens leave no room in a"
                f" context of {self._context_len}",
                hint="take the row out, or raise rollout.rollout_max_context_len",
            )
        return Visit(group_index, prompt, tokens)

    def cursor_after(self, group_index: int) -> RowCursor:
        return RowCursor(group_index + 1)


class RowCursor:
    """How many rows were taken."""

    def __init__(self, visits: int) -> None:
        self.visits = visits

    def as_dict(self) -> dict[str, Any]:
        return {"visits": self.visits}


def _grade_rest(supply: Supply, order: Order, settings: Settings, chosen: EvalSet) -> None:
    """Grade what a service's outage left ungraded. Raises ServiceDown if it is still down."""
    left = [entry for entry in supply.entries.values() if entry.outcome == "ungraded"]
    if not left:
        return
    path = Path(order.attempt_dir) / "graded" / JOURNAL_NAME
    path.parent.mkdir()
    with Journal(path) as journal:
        items = ((entry.key, read_group(entry) or []) for entry in left)
        grader = Grader(settings, overrides=chosen)
        concurrency = settings.score.concurrency
        run_grading(items, grader, concurrency=concurrency, journal=journal, done=supply.put)


def _seal(supply: Supply, close: Close, *, order: Order, name: str, pass_k: list[int]) -> Result:
    """Samples and numbers of the evaluation."""
    root, metrics = Path(order.attempt_dir), RolloutMetrics()
    admitted = (supply.entries[index] for index in sorted(close.decision.admitted))
    entries = [entry for entry in admitted if entry.keep]
    num_dropped = supply.ledger.rule.num_groups - len(entries)
    if not entries:
        raise RewardError(
            f"eval.{name}: the reward of every row failed, and each was dropped",
            hint="mend the reward; the log says what it raised",
        )
    rates = PassRate(pass_k)

    def count(group: list[Sample]) -> None:
        metrics.add(group)
        rates.add(group)

    files = seal_files(root, seal_groups(root, entries, count=count))
    found = {
        key.replace("rollout/", f"eval/{name}/", 1): value for key, value in metrics.fold().items()
    }
    found |= {f"eval/{name}/{key}": value for key, value in rates.fold().items()}
    found[f"eval/{name}"] = found[f"eval/{name}/raw_reward"]
    found[f"eval/{name}/dropped"] = float(num_dropped)
    log.info("%s: %.4f over %d samples", name, found[f"eval/{name}"], metrics.num_samples)
    counts = {"num_samples": metrics.num_samples, "num_groups": metrics.num_groups}
    counts["num_dropped"] = num_dropped
    return Result(files, content=counts, metrics=found, provenance={"versions": read_versions()})
