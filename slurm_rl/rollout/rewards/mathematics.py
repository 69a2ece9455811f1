"""Rewards that are computed in worker processes: mathematics, reasoning-gym, your own patterns.

Comparing two terms can take for ever, and a model's answer decides whether it does. An answer that
takes more than `ANSWER_CPU_S` of a processor to compare, or breaks the library, is a wrong one; its
process is killed. A pattern of the user's that hangs is the user's: a failure.
"""

from __future__ import annotations

import logging
from typing import Any

from slurm_rl.errors import RewardError
from slurm_rl.rollout.rewards.means import Means
from slurm_rl.rollout.rewards.texts import (
    after_thinking,
    check_label,
    last_boxed,
    tagged_answer,
    think_answer,
)
from slurm_rl.rollout.rewards.workers import WorkerDied, WorkerHung
from slurm_rl.rollout.samples import Sample

log = logging.getLogger(__name__)

#: Processor time, not wall time: a busy machine must not change a reward.
ANSWER_CPU_S = 10.0


async def math_reward(means: Means, args: Any, sample: Sample) -> float:
    """1 if the answer is mathematically the label, by math-verify.

    The answer is the last boxed one after the thinking, else what the library finds in there. The
    label may be a list, of which any will do; plain, in dollars or boxed.
    """
    check_label(sample, "math")
    text = after_thinking(sample.response)
    return await _compare(means, sample, answer=last_boxed(text), text=text)


async def deepscaler(means: Means, args: Any, sample: Sample) -> float:
    """1 if the boxed answer after the thinking is the label; 0 without thinking or box."""
    check_label(sample, "deepscaler")
    _, mark, text = sample.response.rpartition("</think>")
    answer = last_boxed(text) if mark else None
    return 0.0 if answer is None else await _compare(means, sample, answer=answer, text=text)


async def format_reward(means: Means, args: Any, sample: Sample) -> float:
    """1 if the whole response has the form: `reward_options.pattern`, or think and answer tags."""
    pattern = args.reward_options.get("pattern")
    if pattern is None:
        return think_answer(args, sample)
    task = {"kind": "pattern", "pattern": pattern, "text": sample.response}
    limit = args.reward_timeout_s
    try:
        return float(await means.workers.run(task, timeout_s=limit))
    except (WorkerHung, WorkerDied):
        raise RewardError(
            f"reward format took longer than {limit:g} s on one response",
            hint=f"the pattern {pattern!r} can take for ever: make its parts exclusive",
        ) from None


async def reasoning_gym(means: Means, args: Any, sample: Sample) -> float:
    """What reasoning-gym's data set says of the answer; `metadata.source_dataset` names it."""
    metadata = sample.metadata
    name = metadata.get("source_dataset") or metadata.get("data_set")
    if not name:
        raise RewardError(
            "reasoning_gym: metadata has no source_dataset, which says how to score",
            hint="use it with prompts of reasoning_gym:NAME",
        )
    entry = {"question": sample.prompt, "answer": sample.label, "metadata": metadata}
    answer = tagged_answer(sample.response)
    task = {"kind": "reasoning_gym", "data_set": str(name), "answer": answer, "entry": entry}
    return await _within(means, task, what=f"reasoning_gym {name}")


async def _compare(means: Means, sample: Sample, *, answer: str | None, text: str) -> float:
    labels = sample.label if isinstance(sample.label, list) else [sample.label]
    labels = [str(label).strip() for label in labels if label is not None and str(label).strip()]
    labels = [last_boxed(label) or label for label in labels]
    if answer is not None and answer.strip() in labels:
        return 1.0
    if answer is not None and not answer.strip():
        return 0.0
    task = {"kind": "math", "answer": answer, "text": text, "labels": labels}
    return await _within(means, task, what="math")


async def _within(means: Means, task: dict[str, Any], *, what: str) -> float:
    limit = means.settings.rollout.reward_timeout_s
    try:
        return float(await means.workers.run(task, timeout_s=limit, cpu_s=ANSWER_CPU_S))
    except (WorkerHung, WorkerDied) as error:
        why = "takes too long to compare" if isinstance(error, WorkerHung) else "breaks the library"
        log.warning("%s: an answer that %s counts as 0", what, why)
        return 0.0
