"""A session: its budget, its seeds, and what it refuses from both sides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rl.errors import EngineError, RewardError
from slurm_rl.rollout.engine import Completion, Sampling
from slurm_rl.rollout.turns.session import ConversationCut, Limits, Session, Turn

PROMPT = (1, 2, 3)


@pytest.fixture(scope="session")
def make_session(chat: Any, served: Any) -> Callable[..., Session]:
    def make(
        engine: Any, *, response: int = 20, context: int | None = None, seed: int = 9
    ) -> Session:
        return Session(
            engine,
            tokenizer=chat,
            weights=served,
            sampling=Sampling(response, temperature=0.7, stop=("x",)),
            limits=Limits(response, context, len(chat)),
            group_index=4,
            index=1,
            seed=seed,
            prompt=PROMPT,
        )

    return make


def endless(session: str, turn: int, request: Any) -> list[int]:
    return [7] * 1000


def test_a_request_names_its_session_and_keeps_the_rollouts_sampling(
    scripted, make_session
) -> None:  # type: ignore[no-untyped-def]
    engine = scripted(lambda *_: "ab")
    session = make_session(engine)

    async def talk() -> None:
        await session.generate(PROMPT)
        await session.generate([*PROMPT, 5], max_new_tokens=3, stop=["y"], stop_token_ids=[8])

    asyncio.run(talk())
    (first, own), (second, changed) = engine.asked
    assert (first.session, second.session) == ("4/1", "4/1")
    assert (first.prompt_tokens, second.prompt_tokens) == (PROMPT, (*PROMPT, 5))
    assert (first.group_index, len(first.seeds)) == (4, 1)
    assert own == Sampling(20, temperature=0.7, stop=("x",))
    assert changed == Sampling(3, temperature=0.7, stop=("y",), stop_token_ids=(8,))


@settings(deadline=None)
@given(
    st.integers(1, 40),
    st.none() | st.integers(4, 60),
    st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(1, 12)), max_size=6),
)
def test_no_conversation_outgrows_its_limits(
    scripted, make_session, response: int, context: int | None, steps: list[Any]
) -> None:  # type: ignore[no-untyped-def]
    engine = scripted(endless)
    session = make_session(engine, response=response, context=context)
    allowed = min(response, (context or 10**9) - len(PROMPT))

    async def talk() -> None:
        tokens = PROMPT
        for inserted, wanted in steps:
            turn = await session.generate(tokens, max_new_tokens=wanted)
            room = allowed - (len(tokens) - len(PROMPT))
            assert len(turn.tokens) == max(0, min(room, wanted or 10**9))
            assert turn.finish == "length"
            tokens = (*tokens, *turn.tokens, *[6] * inserted)

    asyncio.run(talk())
    assert all(sampling.max_new_tokens >= 1 for _, sampling in engine.asked)
    assert session.num_tokens == sum(len(c.tokens) for c in engine.said["4/1"])


def test_a_context_of_its_own_is_a_prompt_of_its_own(scripted, make_session) -> None:  # type: ignore[no-untyped-def]
    session = make_session(scripted(endless), response=10, context=17)

    async def talk() -> list[int]:
        other = (9, 9, 9, 9, 9)
        first = await session.generate(other, max_new_tokens=6)
        second = await session.generate((*other, *first.tokens))
        longest = await session.generate((8,) * 16)
        none = await session.generate((8,) * 18)
        return [len(turn.tokens) for turn in (first, second, longest, none)]

    assert asyncio.run(talk()) == [6, 4, 1, 0]


def test_seeds_depend_on_what_was_said_and_not_on_who_asked_first(scripted, make_session) -> None:  # type: ignore[no-untyped-def]
    contexts = [(*PROMPT, n) for n in range(5)]

    def seeds(order: list[int], seed: int = 9) -> dict[Any, int]:
        engine = scripted(lambda *_: "a")
        session = make_session(engine, seed=seed)

        async def talk() -> None:
            await asyncio.gather(*(session.generate(contexts[i]) for i in order))

        asyncio.run(talk())
        return {request.prompt_tokens: request.seeds[0] for request, _ in engine.asked}

    forwards, backwards = seeds([0, 1, 2, 3, 4]), seeds([4, 2, 0, 1, 3])
    assert forwards == backwards
    assert len(set(forwards.values())) == 5
    assert not set(forwards.values()) & set(seeds([0, 1], seed=10).values())


def test_the_same_words_again_get_another_seed(scripted, make_session) -> None:  # type: ignore[no-untyped-def]
    engine = scripted(lambda *_: "a")
    session = make_session(engine)

    async def talk() -> None:
        for _ in range(3):
            await session.generate(PROMPT)

    asyncio.run(talk())
    assert len({request.seeds for request, _ in engine.asked}) == 3


@pytest.mark.parametrize("tokens", [[], [1, -1], [1, 10**6], [1, 2.0], [1, "a"], [None]])
def test_tokens_that_are_none_are_the_users_error(scripted, make_session, tokens: Any) -> None:  # type: ignore[no-untyped-def]
    engine = scripted(lambda *_: "a")
    session = make_session(engine)
    with pytest.raises(RewardError, match=r"session\.generate was given"):
        asyncio.run(session.generate(tokens))
    assert isinstance(session.failure, RewardError)
    assert engine.asked == []


class Answers:
    """An engine that gives exactly these completions."""

    def __init__(self, *completions: Completion) -> None:
        self.completions = list(completions)

    async def generate(self, request: Any, sampling: Any) -> list[Completion]:
        return self.completions


GOOD = Completion((5, 6), (-0.1, -0.2), "stop", "run/v3/xxh3:1")


@pytest.mark.parametrize(
    ("completions", "problem"),
    [
        ([replace(GOOD, label="run/v2/xxh3:0")], "a turn of run/v2/xxh3:0, not of run/v3/xxh3:1"),
        ([replace(GOOD, logprobs=(-0.1,))], "2 tokens with 1 log-probs"),
        (
            [replace(GOOD, tokens=(5,) * 30, logprobs=(-1.0,) * 30)],
            "30 tokens .* 20 were asked for",
        ),
        ([replace(GOOD, tokens=(), logprobs=())], "no whole answer"),
        ([GOOD, GOOD], "2 answers to one request"),
        ([], "0 answers to one request"),
    ],
)
def test_an_engine_that_answers_otherwise(make_session, completions: Any, problem: str) -> None:  # type: ignore[no-untyped-def]
    session = make_session(Answers(*completions))
    with pytest.raises(EngineError, match=problem):
        asyncio.run(session.generate(PROMPT))
    assert isinstance(session.failure, EngineError)


def test_after_the_cut_nobody_goes_on(make_session) -> None:  # type: ignore[no-untyped-def]
    session = make_session(Answers(replace(GOOD, finish="abort")))

    async def talk() -> Turn:
        turn = await session.generate(PROMPT)
        with pytest.raises(ConversationCut):
            await session.generate(PROMPT)
        return turn

    assert asyncio.run(talk()).finish == "abort"
    assert session.aborted
