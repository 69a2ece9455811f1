"""Environments of the library `verifiers`, behind our protocol, by their shape alone.

Such an object serves all conversations; what belongs to one lies in a dict that it is handed,
`state`. Used of it: `setup_state(state)`, `is_completed([messages,] state)`,
`env_response(messages, state)` and `rubric.score_rollout`, plain or coroutines, in the forms that
its versions have had: messages alone or beside the state, a score that is returned or put into
the state. What needs the library's own client (tools that call models, judges that share it) is
not there: `state["client"]` is None.

Its prompt is the row's; its answer is the row's label; `info` is the row's metadata.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from typing import Any

from slurm_rl.errors import RewardError
from slurm_rl.rollout.data.rows import Prompt
from slurm_rl.rollout.turns.protocol import Said, Step

_FIELD = "rollout.environment"


def is_verifiers(value: Any) -> bool:
    """Whether `value` has the shape of one of the library's environments."""
    return all(callable(getattr(value, name, None)) for name in ("env_response", "is_completed"))


class VerifiersEnvironment:
    """One conversation with a shared `verifiers` object."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self._state: dict[str, Any] = {}

    async def reset(self, prompt: Prompt, seed: int) -> Said | None:
        """Make the state; the prompt stays the data's, unless `setup_state` changes it."""
        said = prompt.prompt
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        row = {"prompt": messages, "answer": prompt.label, "info": dict(prompt.metadata)}
        self._state = _make_state(row | {"task": prompt.data_set, "example_id": prompt.row})
        setup = getattr(self._shared, "setup_state", None)
        if setup is not None:
            self._state = await _wait(setup(self._state)) or self._state
        begun: Said = self._state["prompt"]
        return None if begun == messages else begun

    async def step(self, response: str) -> Step:
        """Hand the answer over, and what the object says to it back."""
        state, before = self._state, self._messages()
        answer = {"role": "assistant", "content": response}
        state["completion"].append(answer)
        state["responses"].append(response)
        state["turn"] += 1
        state["trajectory"].append({"prompt": before, "completion": [answer]})
        if await self._is_completed():
            return Step(done=True)
        said = await _wait(self._shared.env_response(self._messages(), state))
        if isinstance(said, tuple):
            said, self._state = said
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        self._state["completion"] += messages
        # What it said may have been the last: there is no answer to a goodbye.
        return Step(messages, done=await self._is_completed())

    def _messages(self) -> list[Mapping[str, Any]]:
        return [*self._state["prompt"], *self._state["completion"]]

    async def _is_completed(self) -> bool:
        check = self._shared.is_completed
        needed = [
            p
            for p in inspect.signature(check).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        ]
        args = (self._messages(), self._state) if len(needed) > 1 else (self._state,)
        return bool(await _wait(check(*args)))

    async def score(self) -> float | None:
        """The rubric's reward of the conversation as it stands; None without a rubric."""
        score = getattr(getattr(self._shared, "rubric", None), "score_rollout", None)
        if score is None:
            return None
        state = self._state
        names = inspect.signature(score).parameters
        known = {"state": state} | {n: state[n] for n in _SCORED if n in names}
        found = await _wait(score(**{n: v for n, v in known.items() if n in names}))
        if found is not None and not isinstance(found, Mapping):
            reward, metrics = found.reward, getattr(found, "metrics", {})
        else:
            values = state if found is None else found
            reward, metrics = values.get("reward"), values.get("metrics")
        if reward is None:
            raise RewardError(
                f"{_FIELD}: {type(self._shared.rubric).__name__}.score_rollout gave no reward",
                hint="this version of verifiers is not known; write an environment of your own",
            )
        state["reward"], state["metrics"] = reward, dict(metrics or {})
        return float(reward)


_SCORED = ("prompt", "completion", "answer", "task", "info")


def _make_state(row: dict[str, Any]) -> dict[str, Any]:
    """What the library's own rollout would begin with."""
    return row | {
        "input": dict(row),
        "completion": [],
        "responses": [],
        "trajectory": [],
        "turn": 0,
        "id": row["example_id"],
        "is_completed": False,
        "is_truncated": False,
        "stop_condition": None,
        "error": None,
        "reward": None,
        "metrics": None,
        "client": None,
        "timing": {
            "generation_ms": 0.0,
            "scoring_ms": 0.0,
            "total_ms": 0.0,
            "start_time": time.time(),
        },
    }


async def _wait(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
