"""Prompts: where they are read from, in which order they are visited, and where to go on.

`resolve(settings)` opens the data, `open_stream` gives its visits from a cursor on.
"""

from slurm_rl.rollout.data.cursor import Cursor, Place
from slurm_rl.rollout.data.resolve import (
    PromptData,
    open_stream,
    prompt_tokenizer,
    resolve,
    resolve_eval,
)
from slurm_rl.rollout.data.rows import Prompt, Source
from slurm_rl.rollout.data.stream import Stream, Visit
from slurm_rl.rollout.data.templates import Tokenizer, to_messages

__all__ = [
    "Cursor",
    "Place",
    "Prompt",
    "PromptData",
    "Source",
    "Stream",
    "Tokenizer",
    "Visit",
    "open_stream",
    "prompt_tokenizer",
    "resolve",
    "resolve_eval",
    "to_messages",
]
