"""The engine that makes up its answers keeps the promises that all engines make."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.errors import EngineError
from slurm_rl.rollout.engine import Completion, Engine, Request, Sampling, Weights
from slurm_rl.rollout.instant import InstantEngine

WEIGHTS = Weights(Path("/m"), 0, "d", "v0")


def answer(engine: Engine, request: Request, sampling: Sampling) -> list[Completion]:
    return asyncio.run(engine.generate(request, sampling))


@given(
    st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=4),
    st.integers(1, 20),
    st.integers(0, 30),
    st.integers(0, 20),
)
def test_answers_depend_on_the_seed_and_go_on_as_they_would_have(
    seeds: list[int], shortest: int, more: int, had: int
) -> None:
    engine: Engine = InstantEngine(num_tokens=(shortest, shortest + more))
    engine.start(WEIGHTS)
    sampling = Sampling(max_new_tokens=25)
    request = Request(0, (1,), tuple(seeds))
    whole = answer(engine, request, sampling)
    assert whole == answer(engine, request, sampling)
    for seed, completion in zip(seeds, whole, strict=True):
        wanted = shortest + seed % (more + 1)
        assert len(completion.tokens) == min(wanted, 25) == len(completion.logprobs)
        assert completion.finish == ("stop" if wanted <= 25 else "length")
        assert all(0 <= token < 1000 for token in completion.tokens)
    cuts = [min(had, len(c.tokens) - 1) for c in whole]
    prefixes = tuple(c.tokens[:n] for n, c in zip(cuts, whole, strict=True))
    rest = answer(engine, Request(0, (1,), tuple(seeds), prefixes), sampling)
    for n, before, after in zip(cuts, whole, rest, strict=True):
        assert (before.tokens[n:], before.finish) == (after.tokens, after.finish)


@pytest.mark.parametrize("delay_s", [0.0, 30.0])
def test_abort_cuts_off_what_runs_and_what_comes(delay_s: float) -> None:
    engine = InstantEngine(delay_s=delay_s)
    engine.start(WEIGHTS)

    async def cut() -> list[list[Completion]]:
        request = Request(0, (1,), (1, 2))
        running = [asyncio.ensure_future(engine.generate(request, Sampling(5))) for _ in range(3)]
        await asyncio.sleep(0)
        await engine.abort()
        return [*(await asyncio.gather(*running)), await engine.generate(request, Sampling(5))]

    groups = asyncio.run(asyncio.wait_for(cut(), 10))
    assert {(c.finish, c.tokens) for c in groups[-1]} == {("abort", ())}
    if delay_s:
        assert {c.finish for group in groups for c in group} == {"abort"}
    engine.load_weights(WEIGHTS)
    engine.stop()
    with pytest.raises(EngineError, match="has no weights"):
        answer(engine, Request(0, (1,), (1,)), Sampling(5))
