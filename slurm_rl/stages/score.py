"""The score stage: from a rollout's samples to a reward for each, where the rollout left it open.

Owns which samples are graded here: those that the rollout left without a reward, be it that all
rewards are this stage's (`score.enabled`, or a model that is served meanwhile), or that a service
was down. What has a reward is handed on as it is. Groups are journalled as they are graded.

A service that is down ends the attempt (blame `outage`), and the stage is tried again later: that
spends no retries. What a kill leaves: the journal; the next attempt goes on from it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from slurm_rl.config.schema import Settings
from slurm_rl.config.shaping import settings_digest
from slurm_rl.rollout.engine import Weights
from slurm_rl.rollout.grading import run_grading
from slurm_rl.rollout.journal import Entry, Journal, JournalReader, read_group
from slurm_rl.rollout.listing import Listing, open_listing
from slurm_rl.rollout.metrics import RolloutMetrics
from slurm_rl.rollout.rewards import Grader
from slurm_rl.rollout.samples import LINES_NAME, TENSORS_NAME, Sample
from slurm_rl.rollout.scores import Score, write_scores
from slurm_rl.rollout.sglang import SglangEngine
from slurm_rl.rollout.sglang.options import HOST
from slurm_rl.stages.serving import plan_other_server, read_versions
from slurm_rl.storage.damage import check_inputs
from slurm_rl.storage.digest import digest_value
from slurm_rl.storage.durable import seal_files
from slurm_rl.types import JOURNAL_NAME, Input, Order, Result

log = logging.getLogger(__name__)


def run_score(order: Order, settings: Settings) -> Result:
    """Grade what is open; everything is fsynced on return.

    Raises ServiceDown (blame `outage`) where a service is down, RewardError, EngineError for the
    served model, and CorruptError if the rollout is not what was committed.
    """
    began = time.monotonic()
    source = order.input("rollout")
    listing = read_rollout(source)
    keys = _Keys(order, settings, source)
    entries = _read_journals(order)
    todo = [
        (keys.of(group), (start, stop))
        for group, start, stop in _spans(listing)
        if _is_open(listing, start, stop) and keys.of(group) not in entries
    ]
    with Journal(Path(order.attempt_dir) / JOURNAL_NAME) as journal:

        def put(entry: Entry) -> None:
            entries[entry.key] = entry

        if todo:
            log.info("grades %d groups", len(todo))
            with serving_model(order, settings) as url:
                items = ((key, [listing.sample(i) for i in range(*span)]) for key, span in todo)
                grader = Grader(settings, score_url=url)
                concurrency = settings.score.concurrency
                run_grading(items, grader, concurrency=concurrency, journal=journal, done=put)
    account = _Account(listing, keys, entries, RolloutMetrics())
    return _seal(order, account, began=began, num_graded=len(todo))


class _Keys:
    """What a group's rewards depend on, as one digest."""

    def __init__(self, order: Order, settings: Settings, source: Input) -> None:
        self._base = [source.digest, Path(order.code_dir).name, settings_digest(settings)]

    def of(self, group: int) -> str:
        return digest_value([*self._base, group])


def read_rollout(source: Input) -> Listing:
    """The samples of a committed rollout, compared with their commit. Raises CorruptError."""
    tensors = sorted(name for name in source.files if name.split("/")[-1] == TENSORS_NAME)
    lines = [name.removesuffix(TENSORS_NAME) + LINES_NAME for name in tensors]
    check_inputs(source, [*tensors, *lines])
    pairs = zip(tensors, lines, strict=True)
    return open_listing((Path(source.files[a]), Path(source.files[b])) for a, b in pairs)


def _read_journals(order: Order) -> dict[str, Entry]:
    """What earlier attempts graded, by key."""
    found = JournalReader().poll(Path(folder) for folder in order.earlier_attempts)
    return {entry.key: entry for entry in found}


def _spans(listing: Listing) -> Iterator[tuple[int, int, int]]:
    """Each group, and where its samples begin and end."""
    start = 0
    for group, members in groupby(listing.batch.group_index.tolist()):
        stop = start + sum(1 for _ in members)
        yield group, start, stop
        start = stop


def _is_open(listing: Listing, start: int, stop: int) -> bool:
    rewards = listing.batch.rewards[start:stop]
    return bool((rewards != rewards).any())  # NaN


@contextmanager
def serving_model(order: Order, settings: Settings) -> Iterator[str | None]:
    """The address of the served reward model or judge; None without one."""
    server = settings.score.server
    if server is None:
        yield None
        return
    engine = SglangEngine(plan_other_server(order, settings, server.sglang))
    model = Path(server.hf_checkpoint)
    try:
        engine.start(Weights(model, version=0, digest="", label=f"{order.run_id}/score"))
        yield f"http://{HOST}:{engine.servers[0].port}"
    finally:
        engine.stop()


@dataclass
class _Account:
    """The scores of every sample, in the rollout's order, and what was counted on the way."""

    listing: Listing
    keys: _Keys
    entries: dict[str, Entry]
    metrics: RolloutMetrics
    num_dropped: int = 0

    def scores(self) -> Iterator[Score]:
        for group, start, stop in _spans(self.listing):
            entry = self.entries.get(self.keys.of(group))
            samples = read_group(entry) if entry is not None else None
            if samples is None:
                samples = [self.listing.sample(i) for i in range(start, stop)]
            self.metrics.add(samples)
            self.num_dropped += entry is not None and not entry.keep
            yield from map(_score, samples)


def _seal(order: Order, account: _Account, *, began: float, num_graded: int) -> Result:
    root, metrics = Path(order.attempt_dir), account.metrics
    files = seal_files(root, write_scores(root, account.scores()))
    return Result(
        files,
        content={
            "weights": order.input("rollout").content["weights"],
            "num_samples": metrics.num_samples,
            "num_groups": metrics.num_groups,
            "num_dropped": account.num_dropped,
        },
        metrics={
            **{name: value for name, value in metrics.fold().items() if "reward" in name},
            "score/groups_graded": float(num_graded),
            "score/groups_dropped": float(account.num_dropped),
            "perf/score_time": time.monotonic() - began,
        },
        provenance={"versions": read_versions()},
    )


def _score(sample: Sample) -> Score:
    return Score(sample.group_index, sample.sample_index, sample.reward, sample.rewards)
