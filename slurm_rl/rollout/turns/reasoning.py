"""Tasks of `reasoning-gym` in several attempts: the library's own score judges each.

For rows of a `reasoning_gym:NAME` data set. With `max_turns: 1` it is that score and nothing
else. Otherwise a wrong answer is told so, and the last attempt's score counts. An answer may
stand between `<answer>` tags; else the whole response, after what was only thought, is the answer.
"""

from __future__ import annotations

import re
from typing import Any

from slurm_rl.rollout.data.procedural import score_answer
from slurm_rl.rollout.data.rows import Prompt
from slurm_rl.rollout.turns.protocol import Step

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
AGAIN = "That is not right. Try again."


class ReasoningGym:
    """One conversation about one task."""

    def __init__(self) -> None:
        self._metadata: dict[str, Any] = {}
        self._num_attempts = 0

    async def reset(self, prompt: Prompt, seed: int) -> None:
        self._metadata = prompt.metadata
        self._num_attempts = 0

    async def step(self, response: str) -> Step:
        """Done at a full score. Raises DataError for rows of other data."""
        self._num_attempts += 1
        score = score_answer(self._metadata, find_answer(response))
        info = {"num_attempts": self._num_attempts}
        return Step(AGAIN, done=score >= 1.0, reward=score, info=info)


def find_answer(response: str) -> str:
    """The last answer between tags, else all that was not only thought."""
    response = response.rpartition("</think>")[2]
    tagged = _ANSWER.findall(response)
    return str(tagged[-1] if tagged else response).strip()
