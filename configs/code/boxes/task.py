"""A task that cannot be solved without a tool: what lies in a box is only seen by opening it.

The prompt asks for a box (`c?`). The model names one letter, the tool puts in what lies in that box
(`>e=`), and the model names the content. Every row has other boxes, so there is nothing to learn by
heart: the model has to ask for the right box, and then to read what it was told.
"""

from __future__ import annotations

from typing import Any


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """One conversation: the model, the tool, the model."""
    talk = args.begin()  # from the prompt's tokens; what is added is the sample
    asked = await talk.say(max_new_tokens=1)
    box = asked.text
    content = sample.metadata["boxes"].get(box, "?")
    # Tokens of the tool: part of the sample, but nothing is learnt from them.
    talk.add_tokens(args.tokenizer.encode(f">{content}=", add_special_tokens=False))
    answer = await talk.say(max_new_tokens=1)
    sample.take(talk)
    if answer.finish != "abort":
        sample.status = sample.Status.COMPLETED  # a turn of one token is a whole one here
    sample.response = answer.text
    sample.metadata["opened"] = box
    return sample


def score(args: Any, sample: Any) -> float:
    """Half for opening the right box, half for saying what lies in it."""
    opened = sample.metadata["opened"] == sample.prompt.rstrip("?")
    return 0.5 * opened + 0.5 * (sample.response == sample.label)
