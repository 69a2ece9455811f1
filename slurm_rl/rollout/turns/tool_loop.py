"""The built-in loop: the model speaks, its tool calls are answered, until an answer has none.

Ends with `completed` at an answer without a call; with `truncated` where tokens or turns ran out,
or a call's answer would leave the model no room. Such a sample is graded like any other, by what
the model said last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.turns.calls import parse_calls
from slurm_rl.rollout.turns.conversation import Conversation
from slurm_rl.rollout.turns.tools import Tool, answer_calls
from slurm_rl.rollout.turns.transcript import Transcript


async def run_tools(conversation: Conversation, tools: Mapping[str, Tool]) -> list[Sample]:
    """One conversation; raises what the engine and the user's tools raise."""
    rollout = conversation.settings.rollout
    talk = conversation.open()
    num_calls = 0
    status = "truncated"
    for turn in range(rollout.max_turns):
        status, calls = await _speak(conversation, talk)
        if not calls or turn + 1 == rollout.max_turns:
            break
        messages = await answer_calls(
            calls,
            tools,
            args=conversation.args,
            max_characters=rollout.max_tool_output_len,
            timeout_s=rollout.reward_timeout_s,
        )
        num_calls += len(calls)
        if not talk.add_messages(messages):
            break
    return [
        conversation.finish(talk, status=status, reward=None, notes={"num_tool_calls": num_calls})
    ]


async def _speak(conversation: Conversation, talk: Transcript) -> tuple[str, list[Any]]:
    """The status if this was the last turn, and the calls that make it not the last."""
    turn = await talk.say()
    if turn.finish != "stop":
        return "truncated", []
    # With special tokens: some models' tags of a call are such.
    raw = conversation.tokenizer.decode(list(turn.tokens), skip_special_tokens=False)
    calls = parse_calls(raw)
    return ("truncated" if calls else "completed"), calls
