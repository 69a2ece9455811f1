"""Groups from their plan to rewarded samples: what is asked of the engine, and what comes back.

Owns the seeds of samples, the key under which a group is journalled, and the rule that a
sample of other weights is an error. Engines, rewards and the journal are its collaborators.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slurm_rl.config.derive import settings_digest
from slurm_rl.config.schema import Settings
from slurm_rl.errors import EngineError
from slurm_rl.rollout.engine import Completion, Engine, Request, Sampling, Weights
from slurm_rl.rollout.journal import Journal, read_journals
from slurm_rl.rollout.prompts import Visit
from slurm_rl.rollout.rewards import Rewarder
from slurm_rl.rollout.samples import Sample
from slurm_rl.seeds import derive_seed
from slurm_rl.storage.digest import digest_value
from slurm_rl.types import Order

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group before it is generated. `key` digests all that its samples depend on."""

    visit: Visit
    request: Request
    key: str


def plan_groups(
    visits: Iterable[Visit], *, order: Order, settings: Settings, weights: Weights
) -> list[PlannedGroup]:
    """Requests and seeds of each visit: functions of the config's seed and the place in the run.

    The keys hold the settings and the user's code too: a reward that was mended is another one.
    """
    rollout = settings.rollout
    shared = {
        "weights": weights.digest,
        "version": weights.version,
        "sampling": asdict(plan_sampling(settings)),
        "reward": [rollout.rm_type, rollout.custom_rm_path, Path(order.code_dir).name],
        "settings": settings_digest(settings),
    }
    planned = []
    for visit in visits:
        seeds = tuple(
            derive_seed(settings.seed, "sample", order.iteration, visit.group_index, k)
            for k in range(rollout.n_samples_per_prompt)
        )
        request = Request(visit.group_index, visit.tokens, seeds)
        made_from = shared | {"request": asdict(request), "prompt": asdict(visit.prompt)}
        planned.append(PlannedGroup(visit, request, digest_value(made_from)))
    return planned


def plan_sampling(settings: Settings) -> Sampling:
    """The run's sampling parameters as the engines take them."""
    rollout = settings.rollout
    return Sampling(
        max_new_tokens=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        stop=tuple(rollout.rollout_stop),
        stop_token_ids=tuple(rollout.rollout_stop_token_ids),
    )


def take_over(plan: Iterable[PlannedGroup], attempts: Iterable[str]) -> dict[str, list[Sample]]:
    """Groups of the plan that an earlier attempt finished, by key."""
    found = read_journals(attempts)
    taken = {group.key: found[group.key] for group in plan if group.key in found}
    if taken:
        log.info("takes over %d finished groups from earlier attempts", len(taken))
    return taken


class Collector:
    """Turns completions into rewarded, journalled groups."""

    def __init__(
        self, plan: Iterable[PlannedGroup], *, weights: Weights, tokenizer: Any, path: Path
    ) -> None:
        self._plan = {group.request: group for group in plan}
        self._weights = weights
        self._tokenizer = tokenizer
        self._path = path
        self._waiting: deque[tuple[str, list[Sample], Future[list[float]]]] = deque()
        self._done: list[list[Sample]] = []

    def run(self, engine: Engine, sampling: Sampling, rewarder: Rewarder) -> list[list[Sample]]:
        """Every planned group, rewarded, in the order in which they were finished."""
        with Journal(self._path) as journal:
            for request, completions in engine.generate(list(self._plan), sampling):
                group = self._plan[request]
                samples = make_samples(
                    group, completions, weights=self._weights, tokenizer=self._tokenizer
                )
                self._waiting.append((group.key, samples, rewarder.submit(samples)))
                self._collect(journal, wait=False)
            self._collect(journal, wait=True)
        return self._done

    def _collect(self, journal: Journal, *, wait: bool) -> None:
        # In order of arrival; a slow reward holds up the journal, not the generation.
        while self._waiting and (wait or self._waiting[0][2].done()):
            key, samples, future = self._waiting.popleft()
            rewarded = [
                replace(sample, reward=reward)
                for sample, reward in zip(samples, future.result(), strict=True)
            ]
            journal.append(key, rewarded)
            self._done.append(rewarded)


def make_samples(
    group: PlannedGroup, completions: Iterable[Completion], *, weights: Weights, tokenizer: Any
) -> list[Sample]:
    """Completions as samples without reward. EngineError if one is of other weights, was
    aborted, or has no tokens."""
    samples = []
    for index, completion in enumerate(completions):
        if completion.label != weights.label:
            raise EngineError(f"a sample of {completion.label}, not of {weights.label}")
        if completion.finish == "abort" or not completion.tokens:
            raise EngineError(f"group {group.visit.group_index}: the engine gave no whole answer")
        tokens = completion.tokens
        samples.append(
            Sample(
                group_index=group.visit.group_index,
                sample_index=index,
                prompt_tokens=group.visit.tokens,
                response_tokens=tokens,
                rollout_logprobs=completion.logprobs,
                loss_mask=(1,) * len(tokens),
                prompt=group.visit.prompt.prompt,
                response=tokenizer.decode(tokens, skip_special_tokens=True),
                label=group.visit.prompt.label,
                status="truncated" if completion.finish == "length" else "completed",
                weights_version=weights.version,
                seed=group.request.seeds[index],
                metadata=group.visit.prompt.metadata,
            )
        )
    return samples
