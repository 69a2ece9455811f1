"""Iterations of supervised fine-tuning: a prompt's answer is its label, and nothing is sampled.

Owns what such a sample is: the label's tokens and the end-of-sequence token, each trained on, a
reward of 1, and log-probs of 0, since no engine has computed any. One sample a prompt, whatever
`n_samples_per_prompt`. Data, cursor, journal and seal are those of every rollout: the first
iteration that samples goes on behind the last prompt of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurm_rl.errors import DataError
from slurm_rl.rollout.engine import Weights
from slurm_rl.rollout.groups import PlannedGroup
from slurm_rl.rollout.rewards import Graded
from slurm_rl.rollout.samples import Sample

#: Of a sample that was not earned: nobody compares it.
REWARD = 1.0


class FromLabels:
    """Makes groups of one sample, out of their prompts' labels."""

    def __init__(self, weights: Weights, tokenizer: Any) -> None:
        self._weights = weights
        self._tokenizer = tokenizer

    async def __call__(self, group: PlannedGroup) -> list[Sample]:
        """The one sample of `group`. Raises DataError for a label that is no text, or empty."""
        prompt = group.visit.prompt
        label = prompt.label
        if not isinstance(label, str) or not label:
            raise DataError(
                f"{prompt.place or prompt.data_set}: its label is {label!r}, which is no answer to"
                " be trained on",
                hint="name the key of a text by label_key, or set train.sft_iterations: 0",
            )
        tokens, status = self._tokenize(label, limit=group.sampling.max_new_tokens)
        return [
            Sample(
                group.visit.group_index,
                0,
                group.visit.tokens,
                tokens,
                (0.0,) * len(tokens),
                (1,) * len(tokens),
                prompt.prompt,
                label,
                label,
                None,
                status,
                self._weights.version,
                group.request.seeds[0],
                prompt.metadata,
                data_set=prompt.data_set,
            )
        ]

    def _tokenize(self, label: str, *, limit: int) -> tuple[tuple[int, ...], str]:
        """The label's tokens with the end behind them; without it if they are cut off."""
        ids = [int(token) for token in self._tokenizer.encode(label, add_special_tokens=False)]
        end = self._tokenizer.eos_token_id
        whole = ids if end is None else [*ids, int(end)]
        return tuple(whole[:limit]), "completed" if len(whole) <= limit else "truncated"


async def grade_labels(samples: Sequence[Sample]) -> Graded:
    """Every sample as good as it gets."""
    return Graded(tuple(sample.graded(REWARD, {}) for sample in samples), "graded")
