"""The SGLang engine against a real SGLang 0.5.17 server on the CPU.

One server serves most tests, in the order of this file: starting one takes some 20 s.
"""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slurm_rl.errors import EngineError
from slurm_rl.rollout import watchdog
from slurm_rl.rollout.engine import Completion, Request, Sampling, Weights
from slurm_rl.rollout.sglang import SglangEngine, serve_follower
from slurm_rl.rollout.weights import check_probe

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(560)]

PROMPTS = [(1, 2, 3, 4), (5,), (6, 7, 8, 9, 10, 11, 12)]
SAMPLING = Sampling(max_new_tokens=16)


@pytest.fixture(scope="module")
def engine(make_options, all_weights, tmp_path_factory) -> Iterator[SglangEngine]:  # type: ignore[no-untyped-def]
    engine = SglangEngine(make_options(tmp_path_factory.mktemp("server") / "sglang.log"))
    try:
        engine.start(all_weights[0])
        yield engine
    finally:
        engine.stop()


def ask_all(
    engine: SglangEngine, requests: list[Request], sampling: Sampling
) -> list[list[Completion]]:
    async def ask() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.generate(r, sampling) for r in requests))

    return asyncio.run(ask())


def generate(
    engine: SglangEngine, sampling: Sampling = SAMPLING, *, seed: int = 0
) -> dict[int, list[Completion]]:
    requests = [
        Request(g, prompt, tuple(seed + 10 * g + k for k in range(4)))
        for g, prompt in enumerate(PROMPTS)
    ]
    return dict(enumerate(ask_all(engine, requests, sampling)))


def tokens(groups: dict[int, list[Completion]]) -> dict[int, list[tuple[int, ...]]]:
    return {g: [c.tokens for c in group] for g, group in groups.items()}


def reference_logprobs(
    weights: Weights, prompt: tuple[int, ...], answer: tuple[int, ...], temperature: float
) -> np.ndarray:  # type: ignore[type-arg]
    model = AutoModelForCausalLM.from_pretrained(weights.path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0].numpy()


def ask(engine: SglangEngine, path: str) -> dict[str, Any]:
    answer: dict[str, Any] = engine.servers[0].call("GET", path, timeout_s=30)[1]
    return answer


def test_it_serves_the_version_and_digest_it_was_given(engine, all_weights) -> None:  # type: ignore[no-untyped-def]
    info = ask(engine, "/model_info")
    assert info["model_path"] == str(all_weights[0].path)
    assert info["weight_version"] == all_weights[0].label
    assert all_weights[0].digest in str(info["weight_version"])
    assert {c.label for group in generate(engine).values() for c in group} == {all_weights[0].label}


@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(16, temperature=0.7, top_k=5, top_p=0.9)])
def test_logprobs_are_those_of_transformers(engine, all_weights, sampling: Sampling) -> None:  # type: ignore[no-untyped-def]
    for group, completions in generate(engine, sampling).items():
        for completion in completions:
            expected = reference_logprobs(
                all_weights[0], PROMPTS[group], completion.tokens, sampling.temperature
            )
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


def test_samples_of_a_group_differ_and_seeds_decide(engine) -> None:  # type: ignore[no-untyped-def]
    first, again, other = generate(engine), generate(engine), generate(engine, seed=1000)
    assert tokens(first) == tokens(again)
    for group in first:
        assert len({c.tokens for c in first[group]}) == 4
        assert not {c.tokens for c in first[group]} & {c.tokens for c in other[group]}


def test_ends_and_lengths(engine, all_weights) -> None:  # type: ignore[no-untyped-def]
    config = json.loads((all_weights[0].path / "config.json").read_text())
    completions = [c for group in generate(engine, Sampling(64)).values() for c in group]
    for completion in completions:
        if completion.finish == "length":
            assert len(completion.tokens) == 64
        else:
            assert completion.tokens[-1] == config["eos_token_id"]
    assert {c.finish for c in completions} == {"stop", "length"} or len(completions[0].tokens) <= 64
    ends = tuple(range(20))
    stopped = generate(engine, Sampling(64, stop_token_ids=ends))
    assert all(c.tokens[-1] in (*ends, config["eos_token_id"]) for g in stopped.values() for c in g)


def test_a_reload_changes_samples_and_version_and_can_be_undone(engine, all_weights) -> None:  # type: ignore[no-untyped-def]
    before = generate(engine)
    engine.load_weights(all_weights[1])
    assert ask(engine, "/model_info")["weight_version"] == all_weights[1].label
    after = generate(engine)
    assert {c.label for group in after.values() for c in group} == {all_weights[1].label}
    assert tokens(after) != tokens(before)
    answer = after[0][0].tokens
    expected = reference_logprobs(all_weights[1], PROMPTS[0], answer, 1.0)
    np.testing.assert_allclose(after[0][0].logprobs, expected, atol=1e-5)
    engine.load_weights(all_weights[0])
    assert tokens(generate(engine)) == tokens(before)


def test_weights_that_cannot_be_loaded_leave_the_old_ones_served(
    engine, all_weights, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    before = generate(engine)
    with pytest.raises(EngineError, match="did not load"):
        engine.load_weights(Weights(tmp_path / "none", 2, "xxh3:2", "run/v2/xxh3:2"))
    assert ask(engine, "/model_info")["weight_version"] == all_weights[0].label
    assert tokens(generate(engine)) == tokens(before)


def test_temperature_zero_is_the_likeliest_token(engine, all_weights) -> None:  # type: ignore[no-untyped-def]
    model = AutoModelForCausalLM.from_pretrained(all_weights[0].path, dtype=torch.float32)
    for group, completions in generate(engine, Sampling(8, temperature=0)).items():
        answer: tuple[int, ...] = ()
        with torch.no_grad():
            for _ in completions[0].tokens:
                logits = model(torch.tensor([PROMPTS[group] + answer])).logits[0, -1]
                answer += (int(logits.argmax()),)
        assert {c.tokens for c in completions} == {answer}
        expected = reference_logprobs(all_weights[0], PROMPTS[group], answer, 1.0)
        np.testing.assert_allclose(completions[0].logprobs, expected, atol=1e-5)


def test_a_sample_that_goes_on_ends_as_it_would_have(engine) -> None:  # type: ignore[no-untyped-def]
    seeds = tuple(range(50, 56))
    (whole,) = ask_all(engine, [Request(0, PROMPTS[0], seeds)], Sampling(24))
    had = [min(4 * i, len(c.tokens) - 1) for i, c in enumerate(whole)]
    prefixes = tuple(c.tokens[:n] for n, c in zip(had, whole, strict=True))
    assert len({len(prefix) for prefix in prefixes}) > 2
    (rest,) = ask_all(engine, [Request(0, PROMPTS[0], seeds, prefixes)], Sampling(24))
    for n, before, after in zip(had, whole, rest, strict=True):
        assert (before.tokens[n:], before.finish) == (after.tokens, after.finish)
        np.testing.assert_allclose(after.logprobs, before.logprobs[n:], atol=1e-5)


def test_the_probe_tells_right_weights_from_wrong_ones(engine, all_weights) -> None:  # type: ignore[no-untyped-def]
    text = (1, 2, 3, 4, 5, 6, 7, 8)
    probes = [
        {"tokens": list(text), "logprobs": reference_logprobs(w, text[:1], text[1:], 1.0).tolist()}
        for w in all_weights
    ]
    right = dataclasses.replace(all_weights[0], probe=probes[0])
    gap = asyncio.run(check_probe(engine, right, tolerance=0.01))
    assert gap is not None and gap < 1e-5
    wrong = dataclasses.replace(all_weights[0], probe=probes[1])
    with pytest.raises(EngineError, match="the engine does not serve run/v0"):
        asyncio.run(check_probe(engine, wrong, tolerance=0.25))


def test_abort_brings_back_what_there_is(engine, all_weights) -> None:  # type: ignore[no-untyped-def]
    requests = [Request(g, PROMPTS[0], (2 * g, 2 * g + 1)) for g in range(8)]
    sampling = Sampling(400)
    whole = ask_all(engine, requests, sampling)

    async def cut() -> list[list[Completion]]:
        running = [asyncio.ensure_future(engine.generate(r, sampling)) for r in requests]
        while ask(engine, "/v1/loads")["loads"][0]["num_used_tokens"] < 60:
            await asyncio.sleep(0.05)
        await engine.abort()
        return await asyncio.gather(*running)

    began = time.monotonic()
    groups = asyncio.run(cut())
    assert time.monotonic() - began < 20
    cut_off = [c for group in groups for c in group if c.finish == "abort"]
    assert any(c.tokens for c in cut_off)
    assert any(not c.tokens for c in cut_off), "some had not begun"
    for before, after in zip(whole, groups, strict=True):
        for a, b in zip(before, after, strict=True):
            assert b.tokens == a.tokens[: len(b.tokens)]
            np.testing.assert_allclose(b.logprobs, a.logprobs[: len(b.tokens)], atol=1e-5)
    engine.load_weights(all_weights[0])
    (again,) = ask_all(engine, requests[:1], sampling)
    assert [c.tokens for c in again] == [c.tokens for c in whole[0]]


def test_metrics(engine) -> None:  # type: ignore[no-untyped-def]
    before = engine.metrics()["engine/requests"]
    generate(engine)
    metrics = engine.metrics()
    assert metrics["engine/requests"] == before + 3
    assert metrics["engine/latency_mean"] > 0
    assert {"engine/cache_hit_rate", "engine/token_usage"} <= metrics.keys()


def test_stop_in_the_middle_leaves_nothing(engine) -> None:  # type: ignore[no-untyped-def]
    process = engine.servers[0].process

    async def stop() -> list[object]:
        many = [Request(g, (1, 2, 3), (g,)) for g in range(300)]
        running = [asyncio.ensure_future(engine.generate(r, Sampling(400))) for r in many]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        assert len(process.processes()) >= 2
        engine.stop()
        return await asyncio.gather(*running, return_exceptions=True)

    began = time.monotonic()
    results = asyncio.run(stop())
    assert process.processes() == []
    # SIGTERM alone drains, and would need longer.
    assert time.monotonic() - began < 40
    assert sum(isinstance(result, EngineError) for result in results) > 200
    engine.stop()


def test_without_determinism_min_p_holds_and_samples_differ(
    make_options, all_weights, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    engine = SglangEngine(make_options(tmp_path / "sglang.log", deterministic=False))
    model = AutoModelForCausalLM.from_pretrained(all_weights[0].path, dtype=torch.float32)
    with torch.no_grad():
        probs = torch.softmax(model(torch.tensor([PROMPTS[0]])).logits[0, -1], -1)
    least = 0.99 * float(probs.sort(descending=True).values[3] / probs.max())
    likely = set(torch.nonzero(probs >= least * probs.max()).flatten().tolist())
    assert 4 <= len(likely) <= 8
    request = Request(0, PROMPTS[0], tuple(range(64)))
    try:
        engine.start(all_weights[0])
        for min_p, only_likely in ((least, True), (0.0, False)):
            (group,) = ask_all(engine, [request], Sampling(1, min_p=min_p))
            assert ({c.tokens[0] for c in group} <= likely) == only_likely
            assert len({c.tokens[0] for c in group}) > 1
    finally:
        engine.stop()


def test_two_replicas_and_one_that_is_killed(make_options, all_weights, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Seeds make the server matter to nothing: what the lost one had is done by the other."""
    engine = SglangEngine(make_options(tmp_path / "sglang.log", replicas=2, concurrency=4))
    requests = [
        Request(g, PROMPTS[g % 3], (2 * g, 2 * g + 1), session="chat" if g % 4 == 0 else "")
        for g in range(12)
    ]
    try:
        engine.start(all_weights[0])
        undisturbed = ask_all(engine, requests, Sampling(48))
        loads = [ask_server(engine, i) for i in range(2)]
        assert min(loads) > 0, "both have worked"

        async def kill() -> list[list[Completion]]:
            running = [asyncio.ensure_future(engine.generate(r, Sampling(48))) for r in requests]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            os.kill(engine.servers[1].process.pid, signal.SIGKILL)
            return await asyncio.gather(*running)

        disturbed = asyncio.run(kill())
        assert [[c.tokens for c in g] for g in disturbed] == [
            [c.tokens for c in g] for g in undisturbed
        ]
        assert engine.metrics()["engine/servers_lost"] == 1
        lost = engine.servers[1].process
    finally:
        engine.stop()
    assert lost.processes() == []


def ask_server(engine: SglangEngine, index: int) -> int:
    """Tokens that a server has prefilled so far."""
    answer = engine.servers[index].call("GET", "/v1/loads?include=core", timeout_s=30)[1]
    return int(answer["loads"][0]["total_prefill_uncached_tokens"])


def test_a_server_over_two_nodes(make_options, all_weights, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Both on this host, by gloo: the second rank joins, computes half, and leaves with the first."""
    options = make_options(tmp_path / "sglang.log", num_nodes=2)
    options = dataclasses.replace(
        options,
        arguments={**options.arguments, "tp_size": 2},
        environment={**options.environment, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )
    errors: list[EngineError] = []

    def follow() -> None:
        try:
            serve_follower(options, all_weights[0], rank=1)
        except EngineError as error:
            errors.append(error)

    follower = threading.Thread(target=follow)
    follower.start()
    engine = SglangEngine(options)
    try:
        engine.start(all_weights[0])
        for group, completions in generate(engine).items():
            for completion in completions:
                expected = reference_logprobs(
                    all_weights[0], PROMPTS[group], completion.tokens, 1.0
                )
                np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
    finally:
        engine.stop()
        follower.join(60)
    assert not follower.is_alive()
    assert errors == []


def test_a_model_that_cannot_be_served_is_reported_with_the_log(
    make_options, all_weights, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    engine = SglangEngine(make_options(tmp_path / "log", start_timeout_s=120))
    config = {"model_type": "nonesuch", "architectures": ["NonesuchForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="ended with status") as caught:
        engine.start(Weights(tmp_path, 0, "xxh3:0", "run/v0/xxh3:0"))
    assert str(tmp_path / "log") in str(caught.value)


CRASHING = """
import sys, time
sys.path[:0] = [{here!r}, {shared!r}]
from pathlib import Path
import conftest
from slurm_rl.rollout.engine import Weights
from slurm_rl.rollout.sglang import SglangEngine, SglangOptions
import os
options = SglangOptions(conftest.CPU_ARGUMENTS, {{**os.environ, **conftest.CPU_ENVIRONMENT}}, Path({log!r}), python={python!r}, start_timeout_s=280)
engine = SglangEngine(options)
engine.start(Weights(Path({path!r}), 0, "xxh3:0", "run/v0/xxh3:0"))
process = engine.servers[0].process
print(process.pid, process._token, flush=True)
time.sleep(600)
"""


def test_the_server_does_not_outlive_us(sglang_python: str, all_weights, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    program = CRASHING.format(
        here=str(Path(__file__).parent),
        shared=str(Path(__file__).parents[1]),
        log=str(tmp_path / "log"),
        python=sglang_python,
        path=str(all_weights[0].path),
    )
    ours = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert ours.stdout is not None
    words = ours.stdout.readline().split()
    assert len(words) == 2, [path.read_text()[-2000:] for path in tmp_path.iterdir()]
    session, token = int(words[0]), words[1]
    assert len(watchdog.find_processes(session, token)) >= 2
    os.kill(ours.pid, signal.SIGKILL)
    ours.wait()
    ours.stdout.close()
    deadline = time.monotonic() + 60
    while watchdog.find_processes(session, token):
        assert time.monotonic() < deadline
        time.sleep(0.1)
