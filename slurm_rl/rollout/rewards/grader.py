"""Grades finished groups: every term of every sample, the weighted sum, the shaping, the policy.

Nothing here knows where groups come from or go to. A group is graded as a whole, or not at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar

from slurm_rl.config.rollout_schema import Overrides
from slurm_rl.config.schema import Settings
from slurm_rl.errors import EngineError, RewardError
from slurm_rl.rollout.rewards.functions import BuiltIn, describe, shorten
from slurm_rl.rollout.rewards.means import SCORE, Means
from slurm_rl.rollout.rewards.parts import Part, finish, hand_over, make_part, take_back
from slurm_rl.rollout.rewards.plan import Plans, Term
from slurm_rl.rollout.rewards.running import UNTRIED, UserCode
from slurm_rl.rollout.rewards.served import ServedTokenizer
from slurm_rl.rollout.rewards.texts import last_boxed
from slurm_rl.rollout.rewards.workers import Workers
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.services import Clients, Unavailable, backoff_s
from slurm_rl.rollout.user_errors import say_error

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Graded:
    """What came of a group.

    outcome: `graded` (every sample has a finite reward), `dropped` (a reward failed, and
             on_reward_error is drop) or `ungraded` (a service is down, and its on_down is defer;
             the samples are as they were). `why` says it for a person.
    service: the one that is down.

    Example: `Graded((sample,), "dropped", "reward score (…) raised KeyError: 'gold' …")`.
    """

    samples: tuple[Sample, ...]
    outcome: Literal["graded", "dropped", "ungraded"]
    why: str = ""
    service: str = ""


class Grader:
    """Turns groups without rewards into `Graded` ones. An async context manager."""

    def __init__(
        self,
        settings: Settings,
        *,
        overrides: Overrides | None = None,
        score_url: str | None = None,
    ) -> None:
        """Finds every reward: raises ConfigError and RewardError for what cannot be found.

        overrides: of an evaluation, whose reward is not shaped. score_url: of the server that the
        score stage started.
        """
        self._settings = settings
        self._plans = Plans(settings, overrides, ask=self.ask)
        self._score_url = score_url
        self._loop: asyncio.AbstractEventLoop | None = None
        self._user: UserCode | None = None
        self._means: Means | None = None

    async def __aenter__(self) -> Grader:
        self._loop = asyncio.get_running_loop()
        self._user = UserCode(passes=(Unavailable,))
        server = self._settings.score.server
        self._means = Means(
            settings=self._settings,
            workers=Workers(self._settings.rollout.reward_workers),
            clients=Clients(),
            score_url=self._score_url,
            tokenize=None if server is None else ServedTokenizer(server.hf_checkpoint),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._means is not None and self._user is not None
        self._user.close()
        try:
            await self._means.workers.close()
        finally:
            await self._means.clients.close()

    async def grade(self, samples: Sequence[Sample]) -> Graded:
        """Reward a whole group.

        Raises RewardError where a reward fails and on_reward_error is halt, ServiceDown where a
        service is down and its on_down is halt, ConfigError where a reward cannot work here, and
        EngineError where the score stage's own server is gone.
        """
        try:
            rewarded = await self._reward(samples)
        except Unavailable as outage:
            if outage.client.name == SCORE:
                raise EngineError(f"the score stage's server: {outage.client.describe()}") from None
            if outage.client.service.on_down == "halt":
                raise outage.client.as_error() from None
            return Graded(tuple(samples), "ungraded", str(outage), outage.client.name)
        except RewardError as error:
            if self._settings.rollout.on_reward_error == "halt":
                raise
            log.warning("a group is dropped: %s", error.message)
            return Graded(tuple(samples), "dropped", error.message)
        return Graded(tuple(rewarded), "graded")

    async def ask(self, service: str, payload: dict[str, Any], *, path: str = "") -> Any:
        """What an entry of `services` answers; rewards of the user's call it as `args.ask`.

        An outage goes through the reward as an exception, and the entry's on_down applies.
        """
        assert self._loop is not None
        # Rewards of the user's run on a loop of their own; connections belong to ours.
        call = self._ask(service, payload, path)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    async def _ask(self, service: str, payload: dict[str, Any], path: str) -> Any:
        assert self._means is not None
        entry = self._settings.services.get(service)
        if entry is None:
            raise RewardError(f"args.ask: {service!r} is no entry of services")
        return await self._means.clients.get(service, entry).post(payload, path=path)

    async def _reward(self, samples: Sequence[Sample]) -> list[Sample]:
        plans = [self._plans.choose(s.data_set, s.metadata.get("rm_type")) for s in samples]
        pairs = list(zip(samples, plans, strict=True))
        if all(plan.is_quick for plan in plans):
            return [finish(s, p, [_quick(term, s) for term in p.terms]) for s, p in pairs]
        # Samples of one term go together: a term is asked, not a sample.
        members: dict[int, tuple[Term, list[int]]] = {}
        for place, plan in enumerate(plans):
            for term in plan.terms:
                members.setdefault(id(term), (term, []))[1].append(place)
        found = await _together(
            self._try_each(term, [samples[place] for place in places])
            for term, places in members.values()
        )
        parts: list[dict[int, Part]] = [{} for _ in samples]
        for (term, places), values in zip(members.values(), found, strict=True):
            for place, part in zip(places, values, strict=True):
                parts[place][id(term)] = part
        return [
            finish(sample, plan, [own[id(term)] for term in plan.terms])
            for (sample, plan), own in zip(pairs, parts, strict=True)
        ]

    async def _try_each(self, term: Term, samples: Sequence[Sample]) -> list[Part]:
        """One term of some samples, by the policy."""
        function = term.function
        if term.is_quick:
            return [_quick(term, sample) for sample in samples]
        if isinstance(function, BuiltIn):
            calls = (partial(self._call_built_in, function, term, sample) for sample in samples)
            return await _together(self._retry(call) for call in calls)
        if self._settings.rollout.group_rm:
            return await self._retry(partial(self._call_group, term, samples))
        given = [hand_over(sample) for sample in samples]
        values = await self._call_user(
            function,
            [(term.args, copied) for copied in given],
            prompts=[sample.prompt for sample in samples],
        )
        return [
            await self._settle(value, term, copied, sample)
            for value, copied, sample in zip(values, given, samples, strict=True)
        ]

    async def _settle(self, value: Any, term: Term, given: Sample, sample: Sample) -> Part:
        """A part from the first try of the user's reward, or from later ones."""
        tried = 0
        if value is not UNTRIED:
            try:
                return _part_of(value, term, given, sample)
            except RewardError as error:
                await self._count(error, tried := 1)
        return await self._retry(partial(self._call_one, term, sample), tried=tried)

    async def _retry(self, call: Callable[[], Awaitable[T]], *, tried: int = 0) -> T:
        """The policy's tries."""
        while True:
            try:
                return await call()
            except RewardError as error:
                tried += 1
                await self._count(error, tried)

    async def _count(self, error: RewardError, tried: int) -> None:
        """Wait before the next try, or raise the error if there is none left."""
        if tried > self._settings.rollout.reward_retries:
            raise error
        log.warning("try %d of a reward failed: %s", tried, error.message)
        await asyncio.sleep(backoff_s(tried))

    async def _call_built_in(self, function: BuiltIn, term: Term, sample: Sample) -> Part:
        assert self._means is not None and function.slow is not None
        try:
            value = await function.slow(self._means, term.args, _seen_by(function, sample))
        except RewardError as error:
            raise _about(error, sample) from None
        return make_part(value, term, prompt=sample.prompt)

    async def _call_one(self, term: Term, sample: Sample) -> Part:
        given = hand_over(sample)
        (value,) = await self._call_user(
            term.function, [(term.args, given)], prompts=[sample.prompt]
        )
        return _part_of(value, term, given, sample)

    async def _call_user(
        self, function: Any, calls: list[tuple[Any, Any]], *, prompts: list[Any]
    ) -> list[Any]:
        """What the user's function gives for each call; a service that is away goes first."""
        assert self._user is not None and self._means is not None
        limit = self._settings.rollout.reward_timeout_s
        values = await self._user.call_each(function, calls, timeout_s=limit, prompts=prompts)
        if any(isinstance(value, RewardError) for value in values):
            self._means.clients.check()  # it may have waited for one
        return values

    async def _call_group(self, term: Term, samples: Sequence[Sample]) -> list[Part]:
        """The user's reward of the whole group, once."""
        prompt = samples[0].prompt
        given = [hand_over(sample) for sample in samples]
        (values,) = await self._call_user(
            term.function, [(term.args, list(given))], prompts=[prompt]
        )
        if isinstance(values, RewardError):
            raise values
        try:
            listed = _as_list(values)
        except Exception as error:  # the values' own attributes
            raise RewardError(
                f"reward {describe(term.function)} returned what raised {say_error(error)}"
                f" for the prompt {shorten(prompt)}"
            ) from error
        if listed is None or len(listed) != len(samples):
            found = f"a {type(values).__name__}" if listed is None else f"{len(listed)} rewards"
            raise RewardError(
                f"reward {describe(term.function)} returned {found} for {len(samples)} samples"
                f" of the prompt {shorten(prompt)}",
                hint="with group_rm return a list with one reward for each sample",
            )
        return [
            take_back(value, term, copied, sample=sample)
            for value, copied, sample in zip(listed, given, samples, strict=True)
        ]


def _as_list(values: Any) -> Sequence[Any] | None:
    """A list or a tuple as it is; what an array or a tensor of one axis holds; None of all else."""
    if len(getattr(values, "shape", ())) == 1 and callable(getattr(values, "tolist", None)):
        values = values.tolist()
    return values if isinstance(values, (list, tuple)) else None


def _part_of(value: Any, term: Term, given: Sample, sample: Sample) -> Part:
    if isinstance(value, RewardError):
        raise value
    return take_back(value, term, given, sample=sample)


def _quick(term: Term, sample: Sample) -> Part:
    function = term.function
    assert isinstance(function, BuiltIn) and function.quick is not None
    try:
        return Part(function.quick(term.args, _seen_by(function, sample)))
    except RewardError as error:
        raise _about(error, sample) from None


def _seen_by(function: BuiltIn, sample: Sample) -> Sample:
    r"""What a `boxed_` reward sees: the content of the last box, or nothing."""
    if not function.is_boxed:
        return sample
    content = last_boxed(sample.response) or ""
    if function.keeps_box:
        content = f"\\boxed{{{content}}}"
    return replace(sample, response=content)


def _about(error: RewardError, sample: Sample) -> RewardError:
    return RewardError(f"{error.message} for the prompt {shorten(sample.prompt)}", hint=error.hint)


async def _together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order; after a first error the others are cancelled, not waited for."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done:
                task.result()  # the first that failed, in their order
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
