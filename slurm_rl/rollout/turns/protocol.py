"""What an environment is: the other side of one conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slurm_rl.rollout.data.rows import Prompt

#: A text (which the user says), or chat messages.
Said = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment says to an answer. `info` goes into the sample's metadata.

    Example: `Step("too low")`, `Step(done=True, reward=1.0)`.
    """

    observation: Said = ""
    done: bool = False
    reward: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One conversation's other side; a new object for each.

    Two more methods are used where they are: `async score() -> float | None`, asked once at the
    end for a reward of the whole conversation, and `async close()`, called last whatever happened.
    """

    async def reset(self, prompt: Prompt, seed: int) -> Said | None:
        """Begin; returns the prompt, or None for the data's own."""
        ...

    async def step(self, response: str) -> Step:
        """Take the model's answer, without special tokens."""
        ...
