import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers import AutoModelForCausalLM

from slurm_rl.errors import EngineError, ModelError
from slurm_rl.rollout.embedded import EmbeddedEngine, truncate
from slurm_rl.rollout.engine import Completion, Request, Sampling, Weights

PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 11)]
#: Two samples of each, at most six tokens.
GOLDEN = [
    [(2, 24, 9, 36, 26, 9), (12, 11, 4, 24, 23, 20)],
    [(34, 26, 14, 35, 32, 37), (21, 5, 15, 32, 2, 33)],
    [(29, 39, 14, 40), (24, 31, 16, 17, 0, 13)],
]


def weights(path: Path, label: str = "v0") -> Weights:
    return Weights(path, 0, "d", label)


@pytest.fixture
def engine(tiny_model, tokenizer) -> Iterator[EmbeddedEngine]:  # type: ignore[no-untyped-def]
    engine = EmbeddedEngine(tokenizer)
    engine.start(weights(tiny_model))
    yield engine
    engine.stop()


def requests(num_samples: int = 4) -> list[Request]:
    return [
        Request(g, p, tuple(range(10 * g, 10 * g + num_samples))) for g, p in enumerate(PROMPTS)
    ]


def generate(engine: EmbeddedEngine, asked: list[Request], sampling: Sampling):  # type: ignore[no-untyped-def]
    """All at once, as the stage does; completions in the order of `asked`."""

    async def ask() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.generate(request, sampling) for request in asked))

    return asyncio.run(ask())


def one(engine: EmbeddedEngine, request: Request, sampling: Sampling) -> list[Completion]:
    return generate(engine, [request], sampling)[0]


def forward_logprobs(path: Path, tokens: tuple[int, ...], temperature: float = 1.0) -> np.ndarray:  # type: ignore[type-arg]
    """Log-probs of tokens[1:], by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].float() / temperature, -1)
    return logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()


def test_the_bytes_are_those_of_before(engine) -> None:  # type: ignore[no-untyped-def]
    # Tokens depend on the processor only where two uniforms fall between rounding errors.
    found = [[c.tokens for c in group] for group in generate(engine, requests(2), Sampling(6))]
    assert found == GOLDEN


def test_logprobs_are_those_of_a_plain_forward_after_temperature(engine, tiny_model) -> None:  # type: ignore[no-untyped-def]
    sampling = Sampling(max_new_tokens=12, temperature=0.7, top_k=5, min_p=0.05)
    for request, completions in zip(
        requests(), generate(engine, requests(), sampling), strict=True
    ):
        for completion in completions:
            tokens = request.prompt_tokens + completion.tokens
            expected = forward_logprobs(tiny_model, tokens, 0.7)[-len(completion.tokens) :]
            np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


def test_a_text_is_scored_as_a_plain_forward_scores_it(engine, tiny_model) -> None:  # type: ignore[no-untyped-def]
    tokens = (1, 2, 3, 4, 5, 6)
    found = asyncio.run(engine.logprobs(tokens))
    np.testing.assert_allclose(found, forward_logprobs(tiny_model, tokens), atol=2e-5)


def test_a_group_does_not_depend_on_what_else_runs(engine) -> None:  # type: ignore[no-untyped-def]
    sampling = Sampling(max_new_tokens=12)
    together = dict(zip(requests(), generate(engine, requests(), sampling), strict=True))
    for request in reversed(requests()):
        assert one(engine, request, sampling) == together[request]


def test_threads_are_pinned_while_it_computes_and_restored(engine) -> None:  # type: ignore[no-untyped-def]
    seen = []
    engine._loaded.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            results.append(generate(engine, requests(), Sampling(max_new_tokens=12)))
            assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
    assert results[0] == results[1]


def test_same_seed_same_sample_and_other_seeds_differ(engine) -> None:  # type: ignore[no-untyped-def]
    samples = one(engine, Request(0, (1, 2, 3), (5, 6, 5, 7)), Sampling(max_new_tokens=12))
    assert samples[0].tokens == samples[2].tokens
    assert len({sample.tokens for sample in samples}) == 3


def test_global_rng_is_untouched(engine, other_model) -> None:  # type: ignore[no-untyped-def]
    state, np_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    engine.load_weights(weights(other_model))
    generate(engine, requests(), Sampling(max_new_tokens=4))
    assert torch.equal(state, torch.get_rng_state())
    assert (np_state == np.random.get_state()[1]).all()


@pytest.mark.parametrize(("min_p", "top_k"), [(0.0, -1), (0.3, -1), (0.0, 3)])
def test_samples_follow_the_distribution(engine, tiny_model, min_p: float, top_k: int) -> None:  # type: ignore[no-untyped-def]
    num = 4000
    group = Request(0, (1, 2, 3), tuple(range(num)))
    samples = one(engine, group, Sampling(max_new_tokens=1, min_p=min_p, top_k=top_k))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        probs = torch.softmax(model(torch.tensor([[1, 2, 3]])).logits[0, -1].double(), -1).numpy()
    probs[probs < min_p * probs.max()] = 0
    if top_k > 0:
        probs[probs < np.sort(probs)[-top_k]] = 0
    probs /= probs.sum()
    counts = np.bincount([sample.tokens[0] for sample in samples], minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    # Five standard deviations of a binomial.
    assert (np.abs(counts - num * probs) <= 5 * np.sqrt(num * probs * (1 - probs)) + 1).all()


def test_temperature_zero_takes_the_likeliest_token(engine, tiny_model) -> None:  # type: ignore[no-untyped-def]
    prompt = (1, 2, 3)
    first, second = one(engine, Request(0, prompt, (5, 6)), Sampling(8, temperature=0))
    assert first == second
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokens = prompt
    with torch.no_grad():
        for _ in first.tokens:
            tokens += (int(model(torch.tensor([tokens])).logits[0, -1].argmax()),)
    assert first.tokens == tokens[3:]
    expected = forward_logprobs(tiny_model, tokens)[2:]
    np.testing.assert_allclose(first.logprobs, expected, atol=2e-5)


def test_generation_ends_at_stop_token_stop_text_and_length(engine, tokenizer) -> None:  # type: ignore[no-untyped-def]
    group = Request(0, (1, 2, 3), tuple(range(16)))
    free = one(engine, group, Sampling(max_new_tokens=8))
    assert all((s.finish == "length") == (s.tokens[-1] != tokenizer.eos_token_id) for s in free)
    longest = max(free, key=lambda s: len(s.tokens))
    assert len(longest.tokens) == 8
    token, text = longest.tokens[3], tokenizer.decode(longest.tokens[2:4])
    i = free.index(longest)
    for sampling in (
        Sampling(max_new_tokens=8, stop_token_ids=(token,)),
        Sampling(max_new_tokens=8, stop=(text,)),
    ):
        stopped = one(engine, group, sampling)
        assert stopped[i].finish == "stop"
        assert stopped[i].tokens == longest.tokens[: len(stopped[i].tokens)]
        assert len(stopped[i].tokens) <= 4


def test_a_sample_that_goes_on_ends_as_it_would_have(engine, tokenizer) -> None:  # type: ignore[no-untyped-def]
    prompt, seeds = (1, 2, 3), tuple(range(6))
    whole = one(engine, Request(0, prompt, seeds), Sampling(max_new_tokens=12))
    had = [min(i, len(c.tokens) - 1) for i, c in enumerate(whole)]
    prefixes = tuple(c.tokens[:n] for n, c in zip(had, whole, strict=True))
    assert len({len(prefix) for prefix in prefixes}) > 2
    rest = one(engine, Request(0, prompt, seeds, prefixes), Sampling(max_new_tokens=12))
    for n, before, after in zip(had, whole, rest, strict=True):
        assert (before.tokens[n:], before.finish) == (after.tokens, after.finish)
        np.testing.assert_allclose(after.logprobs, before.logprobs[n:], atol=2e-5)
    # A stop text may begin in what it had already.
    i = max(range(6), key=lambda k: len(whole[k].tokens) if had[k] else 0)
    text = tokenizer.decode(whole[i].tokens[had[i] - 1 : had[i] + 1])
    cut = one(engine, Request(0, prompt, (seeds[i],), (prefixes[i],)), Sampling(12, stop=(text,)))
    assert (cut[0].tokens, cut[0].finish) == (whole[i].tokens[had[i] : had[i] + 1], "stop")


def test_abort_ends_what_runs_and_what_waits_with_what_there_is(engine) -> None:  # type: ignore[no-untyped-def]
    sampling = Sampling(max_new_tokens=200)
    whole = [one(engine, request, sampling) for request in requests()]
    longest = max(len(c.tokens) for c in whole[0])
    assert longest > 20
    computed = asyncio.Event()

    async def cut() -> tuple[list[list[Completion]], list[Completion]]:
        loop, calls = asyncio.get_running_loop(), []

        def hook(*_: object) -> None:
            calls.append(1)
            if len(calls) == 6:  # the seventh token is drawn after we have said abort
                asyncio.run_coroutine_threadsafe(engine.abort(), loop).result()
                loop.call_soon_threadsafe(computed.set)

        handle = engine._loaded.model.register_forward_pre_hook(hook)
        running = [asyncio.ensure_future(engine.generate(r, sampling)) for r in requests()]
        await computed.wait()
        results = await asyncio.gather(*running)
        handle.remove()
        return results, await engine.generate(requests()[0], sampling)

    (first, *others), later = asyncio.run(cut())
    for before, after in zip(whole[0], first, strict=True):
        if len(before.tokens) > 6:
            assert (after.finish, after.tokens) == ("abort", before.tokens[:6])
            assert after.logprobs == before.logprobs[:6]
        else:
            assert after == before
    for group in (*others, later):
        assert {(c.finish, c.tokens, c.logprobs) for c in group} == {("abort", (), ())}
    engine.load_weights(weights(engine_path(engine)))
    assert one(engine, requests()[0], sampling) == whole[0]


def engine_path(engine: EmbeddedEngine) -> Path:
    return Path(engine._loaded.model.name_or_path)


def test_a_caller_who_leaves_ends_the_computation(engine) -> None:  # type: ignore[no-untyped-def]
    calls: list[int] = []
    engine._loaded.model.register_forward_pre_hook(lambda *_: calls.append(1))

    async def leave() -> None:
        request = Request(0, (1, 2, 3), tuple(range(4)))
        task = asyncio.ensure_future(engine.generate(request, Sampling(100_000)))
        while not calls:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.logprobs((1, 2))  # behind it in the same thread

    asyncio.run(asyncio.wait_for(leave(), 30))


def test_what_waits_when_it_is_stopped_is_an_error(engine) -> None:  # type: ignore[no-untyped-def]
    async def stop() -> list[object]:
        running = [asyncio.ensure_future(engine.generate(r, Sampling(100_000))) for r in requests()]
        await asyncio.sleep(0.05)
        engine.stop()
        return await asyncio.gather(*running, return_exceptions=True)

    first, *others = asyncio.run(asyncio.wait_for(stop(), 30))
    assert "abort" in {c.finish for c in first}  # type: ignore[attr-defined]
    assert all(isinstance(error, EngineError) for error in others)
    engine.stop()
    with pytest.raises(EngineError):
        one(engine, requests()[0], Sampling(1))


def test_metrics_are_means_over_requests(engine) -> None:  # type: ignore[no-untyped-def]
    generate(engine, requests(), Sampling(max_new_tokens=20))
    metrics = engine.metrics()
    assert metrics["engine/requests"] == 3
    assert 0 < metrics["engine/queue_time_mean"] < metrics["engine/latency_mean"] < 60


def test_other_weights_give_other_samples_and_their_own_label(
    engine, tiny_model, other_model
) -> None:  # type: ignore[no-untyped-def]
    sampling = Sampling(max_new_tokens=12)
    first = generate(engine, requests(), sampling)
    engine.load_weights(weights(other_model, "v1"))
    second = generate(engine, requests(), sampling)
    assert {c.label for group in second for c in group} == {"v1"}
    assert [[c.tokens for c in g] for g in first] != [[c.tokens for c in g] for g in second]
    engine.load_weights(weights(tiny_model))
    assert generate(engine, requests(), sampling) == first


def test_weights_that_cannot_be_loaded_leave_the_old_ones(engine, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelError, match="cannot load"):
        engine.load_weights(weights(tmp_path, "v1"))
    assert one(engine, requests()[0], Sampling(max_new_tokens=1))[0].label == "v0"


@given(
    hnp.arrays(np.float64, (2, 7), elements=st.floats(0.001, 1)),
    st.integers(1, 7),
    st.floats(0.05, 1.0),
    st.floats(0.0, 1.0),
)
def test_truncation_keeps_the_smallest_likeliest_set(
    weights, top_k: int, top_p: float, min_p: float
) -> None:  # type: ignore[no-untyped-def]
    probs = weights / weights.sum(-1, keepdims=True)
    kept = truncate(probs.copy(), Sampling(1, top_k=top_k, top_p=top_p))
    both = truncate(probs.copy(), Sampling(1, top_k=top_k, top_p=top_p, min_p=min_p))
    least = min_p * probs.max(-1, keepdims=True)
    assert (both == np.where(kept >= least, kept, 0)).all()
    for before, after in zip(probs, kept, strict=True):
        mask = after > 0
        assert 1 <= mask.sum() <= top_k
        assert (after[mask] == before[mask]).all()
        assert mask.all() or before[mask].min() >= before[~mask].max()
        within = np.sort(before)[::-1][:top_k].sum()
        assert mask.sum() == top_k or after.sum() >= top_p * within - 1e-12
        # Without its least likely member it would fall short.
        assert after.sum() - after[mask].min() < top_p * within + 1e-12
