"""Groups: conversations beside each other, cut off, failing, and with a real engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rl.errors import EngineError, RewardError
from slurm_rl.rollout.engine import Sampling, Weights
from slurm_rl.rollout.turns import make_generate

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12"}}</tool_call>'


def by_seed(session: str, turn: int, request: Any) -> str:
    """What a model might say: a function of the seed and of all that came before."""
    key = f"{request.seeds[0]}/{request.prompt_tokens}".encode()
    number = xxhash.xxh3_64_intdigest(key)
    return f"{number % 1000} " + (CALL if number % 3 else "done")


@settings(max_examples=25, deadline=None)
@given(delays=st.lists(st.floats(0, 0.004), min_size=40, max_size=40), shift=st.integers(0, 9))
def test_whoever_is_slow_the_samples_are_the_same(
    turn_maker, scripted, make_group, served, chat, delays: list[float], shift: int
) -> None:  # type: ignore[no-untyped-def]
    settings = turn_maker(tools=["calculator"], max_turns=5)

    def run(delay: Any) -> Any:
        engine = scripted(by_seed, delay=delay)
        generate = make_generate(settings, engine=engine, tokenizer=chat, weights=served)
        samples = asyncio.run(_all(generate, [make_group(num=4, index=i) for i in (5, 6)]))
        return samples, engine

    async def wait(request: Any, turn: int) -> None:
        number = (
            request.group_index * 4 + int(request.session.split("/")[1]) + 3 * turn + shift
        ) % 40
        await asyncio.sleep(delays[number])

    (slow, engine), (quick, _) = run(wait), run(None)
    assert slow == quick
    for request, _ in engine.asked:  # no conversation ever speaks in another's session
        group, k = map(int, request.session.split("/"))
        assert request.group_index == group
        assert any(
            (*s.prompt_tokens, *s.response_tokens)[: len(request.prompt_tokens)]
            == request.prompt_tokens
            for s in slow[group - 5]
            if s.rollout_index == k
        )


async def _all(generate: Any, groups: list[Any]) -> Any:
    return list(await asyncio.gather(*(generate(group) for group in groups)))


def test_conversations_of_a_group_run_at_the_same_time(
    turn_settings, scripted, make_group, served, chat
) -> None:  # type: ignore[no-untyped-def]
    barrier = asyncio.Barrier(6)

    async def meet(request: Any, turn: int) -> None:
        async with asyncio.timeout(5):
            await barrier.wait()

    engine = scripted(lambda *_: "done", delay=meet)
    settings = turn_settings(tools=["calculator"])
    generate = make_generate(settings, engine=engine, tokenizer=chat, weights=served)
    samples = asyncio.run(generate(make_group(num=6)))
    assert [s.seed for s in samples] == [100, 101, 102, 103, 104, 105]
    assert len({r.seeds for r, _ in engine.asked}) == 6


STUBBORN = """
async def generate(args, sample, sampling_params):
    talk = args.begin()
    while True:
        try:
            turn = await talk.say()
            if "done" in turn.text:
                return sample.take(talk)
            turn.text[0]
        except Exception:
            if args.session.aborted:
                raise ValueError("what is this?")
"""
SWALLOWING = """
async def generate(args, sample, sampling_params):
    talk = args.begin()
    for _ in range(9):
        try:
            if "done" in (await talk.say()).text:
                break
        except Exception:
            pass
    return sample.take(talk)
"""


GAME = """
from slurm_rl.rollout.turns import Step

class Game:
    seen = []

    async def reset(self, prompt, seed):
        pass

    async def step(self, response):
        Game.seen.append(response)
        return Step("more", done="done" in response, reward=1.0)

    async def score(self):
        return 2.0
"""


@pytest.mark.parametrize("way", ["tools", "stubborn", "swallowing", "environment"])
def test_a_cut_leaves_whole_samples_and_empty_places(
    turn_settings, scripted, make_group, served, chat, code, way: str
) -> None:  # type: ignore[no-untyped-def]
    game = code(GAME)
    settings = {
        "tools": lambda: turn_settings(tools=["calculator"], max_turns=9),
        "stubborn": lambda: turn_settings(
            custom_generate_function_path=f"{code(STUBBORN)}.generate"
        ),
        "swallowing": lambda: turn_settings(
            custom_generate_function_path=f"{code(SWALLOWING)}.generate"
        ),
        "environment": lambda: turn_settings(environment=f"{game}.Game", max_turns=9),
    }[way]()

    async def wait(request: Any, turn: int) -> None:
        if request.session == "5/1" and turn == 1:
            await engine.abort()

    def say(session: str, turn: int, request: Any) -> str:
        return "done" if session == "5/0" else CALL

    engine = scripted(say, delay=wait)
    generate = make_generate(settings, engine=engine, tokenizer=chat, weights=served)
    samples = asyncio.run(asyncio.wait_for(generate(make_group(num=2)), 10))
    assert [s.status for s in samples] == ["completed", "aborted"]
    assert [s.rollout_index for s in samples] == [s.sample_index for s in samples] == [0, 1]
    assert samples[1].response_tokens == samples[1].loss_mask == ()
    assert samples[1].reward is None
    assert samples[1].seed == 101
    # Half an answer is nobody's move.
    assert all(len(response) > 1 for response in __import__(game).Game.seen)


@pytest.mark.parametrize("error", [EngineError("it died"), RewardError("tool")])
def test_the_first_that_fails_ends_the_others(
    turn_settings, scripted, make_group, served, chat, error: Exception
) -> None:  # type: ignore[no-untyped-def]
    ended = []

    async def wait(request: Any, turn: int) -> None:
        if request.session == "5/1":
            raise error
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(request.session)
            raise

    engine = scripted(lambda *_: "done", delay=wait)
    generate = make_generate(
        turn_settings(tools=["calculator"]), engine=engine, tokenizer=chat, weights=served
    )
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(asyncio.wait_for(generate(make_group(num=3)), 10))
    assert sorted(ended) == ["5/0", "5/2"]


def test_without_a_way_there_is_nothing_to_generate(turn_settings, scripted, served, chat) -> None:  # type: ignore[no-untyped-def]
    settings = turn_settings()
    assert make_generate(settings, engine=scripted(by_seed), tokenizer=chat, weights=served) is None


def test_the_models_own_tokens_beyond_the_tokenizers_are_known(tmp_path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    from slurm_rl.rollout.turns.generate import read_vocabulary

    assert read_vocabulary(tmp_path, tokenizer) == len(tokenizer)
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 4096}}')
    assert read_vocabulary(tmp_path, tokenizer) == 4096
    (tmp_path / "config.json").write_text('{"vocab_size": 3}')
    assert read_vocabulary(tmp_path, tokenizer) == len(tokenizer)


ECHO = """
from slurm_rl.rollout.turns import Step

class Echo:
    async def reset(self, prompt, seed):
        self.num = 0

    async def step(self, response):
        self.num += 1
        letters = "".join(c for c in response if c.isalpha())[:3]
        return Step("=" + letters, done=self.num == 3, reward=float(self.num))
"""


def test_a_real_engine_scores_what_it_said_in_its_place(
    turn_settings, make_group, tiny_model, tokenizer, code
) -> None:  # type: ignore[no-untyped-def]
    """Log-probs of every turn are those of one plain forward over the whole sample."""
    import torch
    from transformers import AutoModelForCausalLM

    from slurm_rl.rollout.embedded import EmbeddedEngine

    engine = EmbeddedEngine(tokenizer)
    weights = Weights(tiny_model, 0, "d", "v0")
    engine.start(weights)
    settings = turn_settings(environment=f"{code(ECHO)}.Echo", apply_chat_template=False)
    generate = make_generate(settings, engine=engine, tokenizer=tokenizer, weights=weights)
    ids = tuple(tokenizer.encode("abc=", add_special_tokens=False))
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    group = make_group("abc=", num=3, tokens=ids, tokenizer=tokenizer)
    from dataclasses import replace

    group = replace(group, sampling=Sampling(40, temperature=0.8, stop_token_ids=(3, 7, 11)))
    try:
        samples = asyncio.run(generate(group))
        again = asyncio.run(generate(group))
    finally:
        engine.stop()
    assert samples == again
    assert len({s.response_tokens for s in samples}) == 3
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for sample in samples:
        tokens = torch.tensor([sample.tokens])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(tokens).logits[0].float() / 0.8, -1)
        start = len(sample.prompt_tokens) - 1
        expected = logprobs[start:-1].gather(1, tokens[0, start + 1 :, None])[:, 0].tolist()
        trained = [i for i, mask in enumerate(sample.loss_mask) if mask]
        assert [sample.rollout_logprobs[i] for i in trained] == pytest.approx(
            [expected[i] for i in trained], abs=2e-5
        )
    assert any(0 in sample.loss_mask for sample in samples)
