"""The translation to and from SGLang's `/generate`. Pure.

Each group is one request with one entry a sample, each with its own `sampling_seed`: SGLang's `n`
would give every sample the same seed. SGLang honours seeds only under
`--enable-deterministic-inference`, where a draw depends on the seed and the position in the whole
sequence: a sample that goes on from a prefix draws what it would have drawn. A stop text that
begins in a prefix is one that SGLang does not see.

What comes back is believed in nothing that can be checked: the number of results, the label of
the weights, that log-probs are numbers and belong to the tokens, the length, the reason of ending.
Anything else is an EngineError, never a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from slurm_rl.errors import EngineError
from slurm_rl.rollout.engine import Completion, Request, Sampling
from slurm_rl.rollout.routing import Experts, parse_routed

#: Log-probs of tokens that are certain come out a rounding error above 0.
_MOST_LOGPROB = 1e-3
_FINISH: dict[str, Literal["stop", "length", "abort"]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The completions of one request, and what the server says of its prompts."""

    completions: list[Completion]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    why_aborted: str = ""


def render_request(request: Request, sampling: Sampling, *, routed: bool = False) -> dict[str, Any]:
    """The body of `/generate` for one group: one entry a sample. routed: with its routing."""
    shared: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "skip_special_tokens": False,
    }
    if sampling.min_p > 0:
        shared["min_p"] = sampling.min_p
    if sampling.stop:
        shared["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        shared["stop_token_ids"] = list(sampling.stop_token_ids)
    num = len(request.seeds)
    return {
        **({"return_routed_experts": True} if routed else {}),
        "input_ids": [list(request.entry_tokens(i)) for i in range(num)],
        "sampling_params": [
            shared
            | {
                "max_new_tokens": request.max_new_tokens(i, sampling),
                "sampling_seed": request.seeds[i],
            }
            for i in range(num)
        ],
        "return_logprob": True,
    }


@dataclass(frozen=True, slots=True)
class Scores:
    """Of `tokens[1:]` of a text, each given those before it, at temperature 1: log-probs, and of
    the likeliest tokens at each place the ids and log-probs, likeliest first (if asked for)."""

    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


def render_scoring(tokens: Sequence[int], *, top_num: int = 0) -> dict[str, Any]:
    """The body of `/generate` that asks for the log-probs of `tokens` and generates nothing."""
    return {
        **({"top_logprobs_num": top_num} if top_num else {}),
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def parse_json(data: bytes) -> Any:
    """The JSON of an answer; EngineError showing its beginning if it is none."""
    try:
        return orjson.loads(data)
    except ValueError as error:
        shown = data[:200].decode(errors="replace")
        raise EngineError(f"SGLang answered with what is not JSON: {shown!r}") from error


def parse_answer(
    data: bytes,
    request: Request,
    sampling: Sampling,
    *,
    label: str,
    experts: Experts | None = None,
) -> Answer:
    """The answer to one group, checked. EngineError says what is wrong with it.

    experts: of the model, if the routing was asked for.
    """
    results = parse_json(data)
    num = len(request.seeds)
    if not isinstance(results, list) or len(results) != num:
        given = len(results) if isinstance(results, list) else 1
        raise EngineError(f"SGLang gave {given} results for {num} samples")
    try:
        answer = _fold(results, request, sampling, label=label)
        return answer if experts is None else _add_routing(answer, results, request, experts)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise EngineError(
            f"SGLang's answer has not the form of version 0.5.17: {type(error).__name__}: {error}"
        ) from error


def _fold(
    results: list[Mapping[str, Any]], request: Request, sampling: Sampling, *, label: str
) -> Answer:
    completions = []
    prompt_tokens = cached_tokens = 0
    why = ""
    for i, result in enumerate(results):
        most = request.max_new_tokens(i, sampling)
        completions.append(parse_completion(result, label=label, max_new_tokens=most))
        meta = result["meta_info"]
        prompt_tokens += meta.get("prompt_tokens") or 0
        cached_tokens += meta.get("cached_tokens") or 0
        if completions[-1].finish == "abort":
            why = str((meta["finish_reason"] or {}).get("message", ""))
    return Answer(completions, prompt_tokens, cached_tokens, why)


def _add_routing(
    answer: Answer, results: list[Mapping[str, Any]], request: Request, experts: Experts
) -> Answer:
    """With the routing of each sample that was not cut off; those start again."""
    found = []
    for i, (completion, result) in enumerate(zip(answer.completions, results, strict=True)):
        if completion.finish != "abort":
            routed = parse_routed(
                result["meta_info"].get("routed_experts"),
                experts,
                num_tokens=len(request.entry_tokens(i)) + len(completion.tokens),
                what=f"SGLang's answer {i} to group {request.group_index}",
            )
            completion = replace(completion, routed_experts=routed)
        found.append(completion)
    return replace(answer, completions=found)


def parse_completion(
    result: Mapping[str, Any], *, label: str, max_new_tokens: int = 1 << 31
) -> Completion:
    """One result as a completion; EngineError if it is of other weights or inconsistent.

    What was cut off counts as far as there are both tokens and log-probs.
    """
    meta = result["meta_info"]
    served = str(meta.get("weight_version"))
    if served != label:
        raise EngineError(f"SGLang answered with the weights {served}, not {label}")
    reason = (meta.get("finish_reason") or {}).get("type")
    if reason not in _FINISH:
        raise EngineError(f"SGLang ended a sample for the reason {reason!r}")
    tokens, logprobs = _split(meta.get("output_token_logprobs") or ())
    output = tuple(result["output_ids"])
    if reason == "abort":
        num = min(len(output), len(tokens))
        output, tokens, logprobs = output[:num], tokens[:num], logprobs[:num]
    if tokens != output:
        raise EngineError(
            f"SGLang's log-probs are of other tokens than its output: {len(tokens)} and"
            f" {len(output)}"
        )
    if len(tokens) > max_new_tokens:
        raise EngineError(f"SGLang gave {len(tokens)} tokens where {max_new_tokens} were the most")
    if not tokens and reason != "abort":
        raise EngineError("SGLang gave an answer without a token")
    return Completion(tokens, logprobs, _FINISH[reason], served)


def _split(triples: Sequence[Sequence[Any]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens and log-probs of `[log-prob, token, text]` triples. A fraction of a µs a token."""
    logprobs = tuple([triple[0] for triple in triples])
    tokens = tuple([triple[1] for triple in triples])
    # JSON has no NaN: SGLang writes null.
    wrong = "NaN" if None in logprobs else ""
    if not wrong and not math.isfinite(sum(logprobs)):
        wrong = str(next(x for x in logprobs if not math.isfinite(x)))
    if not wrong and logprobs and max(logprobs) > _MOST_LOGPROB:
        wrong = str(max(logprobs))
    if wrong:
        raise EngineError(f"SGLang gave the log-prob {wrong}")
    return tokens, logprobs


def parse_scoring(data: bytes, tokens: Sequence[int], *, label: str) -> list[float]:
    """The log-probs of `tokens[1:]` in an answer to `render_scoring`. EngineError as above."""
    return parse_scores(data, tokens, label=label).logprobs


def parse_scores(data: bytes, tokens: Sequence[int], *, label: str, top_num: int = 0) -> Scores:
    """All of an answer to `render_scoring`. EngineError as above."""
    answer = parse_json(data)
    try:
        meta = answer["meta_info"]
        served = str(meta["weight_version"])
        if served != label:
            raise EngineError(f"SGLang answered with the weights {served}, not {label}")
        scored, logprobs = _split(meta["input_token_logprobs"][1:])
        places = meta["input_top_logprobs"][1:] if top_num else []
        tops = [_split(place) for place in places]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"SGLang did not score a text: {str(answer)[:300]}") from error
    if scored != tuple(tokens[1:]):
        raise EngineError(
            f"SGLang scored other tokens than it was asked for: {len(scored)} of {len(tokens) - 1}"
        )
    if top_num and {len(ids) for ids, _ in tops} != {top_num}:
        raise EngineError(f"SGLang gave other than {top_num} likeliest tokens at a place")
    ids, of_ids = [list(top[0]) for top in tops], [list(top[1]) for top in tops]
    return Scores(list(logprobs), ids, of_ids)
