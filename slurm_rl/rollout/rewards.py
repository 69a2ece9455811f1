"""Rewards: a small table of built-in ones, and the user's own by dotted path.

Owns turning a finished sample into one finite number. A reward is
`function(args, sample) -> number`, or the same as a coroutine; `args` has every setting of
`rollout` and of the top level as an attribute, `sample` is a `samples.Sample` whose reward
is still None. The user's code comes from the run's snapshot, which the stage's entry puts on
`sys.path`. Whatever it raises or returns that is no number becomes a RewardError.

Coroutines of all groups run together on one event loop; plain functions run there one at a
time, so that they need not be thread-safe.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import numbers
import random
import re
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, RewardError
from slurm_rl.rollout.samples import Sample
from slurm_rl.seeds import derive_seed

RewardFunction = Callable[[Any, Sample], Any]

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_WORD = re.compile(r"\w+")


def exact_match(args: Any, sample: Sample) -> float:
    """1 if the response is the label, apart from white space around it."""
    return float(sample.response.strip() == str(sample.label).strip())


def prefix_match(args: Any, sample: Sample) -> float:
    """Share of the label that the response gets right before its first wrong character.

    Denominator: the longer of the two, so that going on past the label costs as well.
    """
    response, label = sample.response.strip(), str(sample.label).strip()
    num_right = 0
    for ours, wanted in zip(response, label, strict=False):
        if ours != wanted:
            break
        num_right += 1
    return num_right / max(len(response), len(label), 1)


def f1(args: Any, sample: Sample) -> float:
    """F1 of the words of the response against the label's, each counted as often as it is there."""
    ours = Counter(_WORD.findall(sample.response.lower()))
    wanted = Counter(_WORD.findall(str(sample.label).lower()))
    num_shared = (ours & wanted).total()
    return 2 * num_shared / max(ours.total() + wanted.total(), 1)


def last_number(args: Any, sample: Sample) -> float:
    """1 if the last number in the response equals the last one in the label (GSM8K's rule)."""
    ours, wanted = (_NUMBER.findall(text) for text in (sample.response, str(sample.label)))
    return float(bool(ours and wanted) and _value(ours[-1]) == _value(wanted[-1]))


def seeded_random(args: Any, sample: Sample) -> float:
    """Uniform in [0, 1), from the sample's seed: says nothing about it; for trying things out."""
    return random.Random(derive_seed(sample.seed, "reward")).random()


#: Names for `rollout.rm_type`, and for `rm_type` in a prompt's metadata.
BUILT_IN: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "prefix_match": prefix_match,
    "f1": f1,
    "gsm8k": last_number,
    "random": seeded_random,
}


class Rewarder:
    """Rewards groups of samples in the background, on an event loop of its own.

    Use as a context manager: on leaving, what is unfinished is cancelled.
    """

    def __init__(self, settings: Settings) -> None:
        rollout = settings.rollout
        self._args = SimpleNamespace(**{**dict(settings), **dict(rollout)})
        self._function = find_reward(rm_type=rollout.rm_type, custom_rm_path=rollout.custom_rm_path)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)

    def __enter__(self) -> Rewarder:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread.is_alive():
            # A reward that blocks the loop cannot be stopped; the thread ends with the process.
            asyncio.run_coroutine_threadsafe(_end_loop(), self._loop)
            self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()

    def submit(self, samples: Sequence[Sample]) -> Future[list[float]]:
        """The rewards of `samples`, in their order; the future raises RewardError."""
        return asyncio.run_coroutine_threadsafe(self._reward_all(samples), self._loop)

    async def _reward_all(self, samples: Sequence[Sample]) -> list[float]:
        return list(await asyncio.gather(*(self._reward_one(sample) for sample in samples)))

    async def _reward_one(self, sample: Sample) -> float:
        function = self._function
        try:
            function = self._choose(sample)
            value = function(self._args, sample)
            if inspect.isawaitable(value):
                value = await value
        except (asyncio.CancelledError, RewardError):
            raise
        except BaseException as error:  # the user's code, `sys.exit` too: say where, then stop
            raise RewardError(
                f"reward {describe(function)} raised {type(error).__name__}: {error}"
                f"{_failed_at(error)} for the prompt {_shorten(sample.prompt)}"
            ) from error
        return check_reward(value, function=function, sample=sample)

    def _choose(self, sample: Sample) -> RewardFunction:
        named = sample.metadata.get("rm_type")
        return self._function if named is None else find_reward(rm_type=named, custom_rm_path=None)


def find_reward(*, rm_type: str | None, custom_rm_path: str | None) -> RewardFunction:
    """The function that a name or a dotted path means; ConfigError if it is not exactly one."""
    if (rm_type is None) == (custom_rm_path is None):
        raise ConfigError(
            "rollout: set one of rm_type and custom_rm_path",
            hint=f"rm_type is one of {', '.join(BUILT_IN)}",
        )
    if custom_rm_path is not None:
        return import_function(custom_rm_path, field="rollout.custom_rm_path")
    assert rm_type is not None
    if rm_type not in BUILT_IN:
        raise ConfigError(
            f"rollout.rm_type = {rm_type!r} is no built-in reward",
            hint=f"there are {', '.join(BUILT_IN)}; for your own set custom_rm_path",
        )
    return BUILT_IN[rm_type]


def import_function(dotted: str, *, field: str) -> Callable[..., Any]:
    """The function at `package.module.name`; errors say which part is wrong.

    A module that fails while it is imported is the user's code failing: RewardError.
    """
    module_name, _, name = dotted.rpartition(".")
    if not module_name:
        raise ConfigError(f"{field} = {dotted!r} has no module", hint="write module.function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise RewardError(
            f"{field} = {dotted!r}: no module named {error.name!r}",
            hint="add the folder that holds it to `code`, or install it for this stage",
        ) from error
    except (Exception, SystemExit) as error:  # the user's code, at import
        raise RewardError(
            f"{field} = {dotted!r}: importing {module_name} raised"
            f" {type(error).__name__}: {error}{_failed_at(error)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardError(f"{field} = {dotted!r}: {module.__file__} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def check_reward(value: Any, *, function: RewardFunction, sample: Sample) -> float:
    """`value` as a finite float; RewardError saying who returned what for which prompt."""
    if not isinstance(value, numbers.Real):
        problem = f"a {type(value).__name__}, not a number"
    elif not math.isfinite(value):
        problem = str(float(value))
    else:
        return float(value)
    raise RewardError(
        f"reward {describe(function)} returned {problem} for the prompt {_shorten(sample.prompt)}",
        hint="return a finite float",
    )


def describe(function: Callable[..., Any]) -> str:
    """`name (file:line)`, for a person to click on."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _failed_at(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _shorten(prompt: Any) -> str:
    text = repr(prompt)
    return text if len(text) <= 60 else text[:57] + "…"


def _value(text: str) -> float:
    return float(text.replace(",", ""))


async def _end_loop() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.stop)
