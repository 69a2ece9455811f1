"""Rewards that a server gives: a remote reward model, SGLang's reward models, a judge."""

from __future__ import annotations

import re
from typing import Any

from slurm_rl.config.row_rules import LABEL_PLACE
from slurm_rl.errors import RewardError
from slurm_rl.rollout.rewards.means import Means
from slurm_rl.rollout.rewards.texts import check_label
from slurm_rl.rollout.samples import Sample

_NUMBER = r"(-?\d+(?:\.\d+)?)"
_JUDGE_PATTERN = rf"(?i)score\s*:\s*\**\s*{_NUMBER}"
_JUDGE_TEMPLATE = (
    "Judge the answer to the question below.\n\nQuestion:\n{prompt}\n\nAnswer:\n{response}\n\n"
    "Reference answer:\n{label}\n\n"
    "Say briefly what is right and wrong in it. End with a line `Score: x`, x from 0 to 1."
)
_JUDGE_TOKENS = 1024


async def remote_rm(means: Means, args: Any, sample: Sample) -> Any:
    """What the remote reward model answers to {"prompt", "response", "label", "metadata"}.

    A number, or an object; one with `reward` or `score` is that number, unless reward_key is set.
    """
    payload = {
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "metadata": sample.metadata,
    }
    answer = await means.remote_client().post(payload)
    if isinstance(answer, dict) and args.reward_key is None:
        for key in ("reward", "score"):
            if key in answer:
                return answer[key]
        keys = ", ".join(map(str, answer)) or "nothing"
        raise RewardError(
            f"remote_rm got an object without reward or score (it has {keys})",
            hint="answer a number, or name the entry as rollout.reward_key",
        )
    return answer


async def served_rm(means: Means, args: Any, sample: Sample) -> float:
    """The score of a reward model that SGLang serves (`is_embedding: true`), by /classify.

    The model's own chat template is put around prompt and response. `reward_options.index`: which
    of its outputs, for a model with several.
    """
    client = means.score_client()
    assert means.tokenize is not None
    messages = [*_messages(sample.prompt), {"role": "assistant", "content": sample.response}]
    answer = await client.post({"input_ids": await means.tokenize(messages)}, path="/classify")
    first = answer[0] if isinstance(answer, list) and answer else answer
    index = int(args.reward_options.get("index", 0))
    try:
        return float(first["embedding"][index])
    except (KeyError, IndexError, TypeError, ValueError):
        raise RewardError(
            f"served_rm: /classify answered {str(answer)[:100]!r}, which has no output {index}",
            hint="is score.server.hf_checkpoint a reward model, served with is_embedding: true?",
        ) from None


async def judge(means: Means, args: Any, sample: Sample) -> float:
    """The number that a served model says of the response, at temperature 0.

    reward_options: `template` with {prompt}, {response}, {label}; `pattern`, whose first group is
    the number; `scale` to divide it by; `max_tokens`; `unreadable`, the reward where the pattern
    finds nothing (unset: that is a failure).
    """
    options = args.reward_options
    template = options.get("template", _JUDGE_TEMPLATE)
    if LABEL_PLACE in template:
        check_label(sample, "judge")
    text = _fill(template, sample)
    payload = {
        "model": "default",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": int(options.get("max_tokens", _JUDGE_TOKENS)),
    }
    answer = await means.score_client().post(payload, path="/v1/chat/completions")
    try:
        said = str(answer["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError):
        raise RewardError(f"judge: the server answered {str(answer)[:100]!r}") from None
    pattern = options.get("pattern", _JUDGE_PATTERN)
    found = list(re.finditer(pattern, said))
    try:
        return float(found[-1].group(1)) / float(options.get("scale", 1))
    except (IndexError, TypeError, ValueError):
        if "unreadable" in options:
            return float(options["unreadable"])
        raise RewardError(
            f"judge: no number by {pattern!r} in its answer {said[-80:]!r}",
            hint="mend `template` or `pattern` in the options of rewards, or set unreadable",
        ) from None


def _messages(prompt: Any) -> list[dict[str, Any]]:
    return list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]


def _fill(template: str, sample: Sample) -> str:
    """The template with its places filled; braces in what is filled in mean nothing."""
    prompt = sample.prompt
    if isinstance(prompt, list):
        prompt = "\n\n".join(f"{m.get('role')}: {m.get('content')}" for m in prompt)
    values = {"prompt": str(prompt), "response": sample.response, "label": str(sample.label)}
    return re.sub(r"\{(prompt|response|label)\}", lambda match: values[match[1]], template)
