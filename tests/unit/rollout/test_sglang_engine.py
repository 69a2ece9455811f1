"""The SGLang engine against servers that misbehave: real processes that speak its HTTP badly."""

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_rl.errors import ConfigError, EngineError, ModelError
from slurm_rl.rollout.engine import Completion, Request, Sampling, Weights
from slurm_rl.rollout.routing import read_routed
from slurm_rl.rollout.sglang import SglangEngine, SglangOptions

FAKE = Path(__file__).parent / "fake_sglang.py"
SAMPLING = Sampling(max_new_tokens=6)

Make = Callable[..., SglangEngine]


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"architectures": ["X"], "dtype": "float32"}')
    return Weights(path, 3, "xxh3:1", "run/v3/xxh3:1")


@pytest.fixture
def make(tmp_path: Path, weights: Weights) -> Iterator[Make]:
    """An engine of fake servers: `make({"0": {…}}, replicas=2)`; started unless told not to."""
    made: list[SglangEngine] = []
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {FAKE} "$@"\n')
    program.chmod(0o755)

    def make_engine(
        behaviour: dict[str, Any] | None = None, *, starts: bool = True, **changes: Any
    ) -> SglangEngine:
        facts = {"FAKE": json.dumps(behaviour or {}), "FAKE_FOLDER": str(tmp_path)}
        options = SglangOptions(
            {"device": "cpu"},
            {**os.environ, **facts},
            tmp_path / "sglang.log",
            python=str(program),
            concurrency=8,
            start_timeout_s=30,
            request_timeout_s=20,
        )
        engine = SglangEngine(dataclasses.replace(options, **changes))
        made.append(engine)
        if starts:
            engine.start(weights)
        return engine

    yield make_engine
    for engine in made:
        engine.stop()


def counts(folder: Path, server: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"counts-{server}.json").read_text())
    return found


def draw(seed: int, position: int) -> tuple[int, float]:
    """The fake's rule, written out again."""
    return (seed * 31 + position * 7) % 997, -0.25 - (seed + position) % 16 / 16


def expected(request: Request, sampling: Sampling = SAMPLING) -> list[Completion]:
    found = []
    for i, seed in enumerate(request.seeds):
        first, num = len(request.entry_tokens(i)), request.max_new_tokens(i, sampling)
        drawn = [draw(seed, first + k) for k in range(num)]
        tokens, logprobs = zip(*drawn, strict=True)
        found.append(Completion(tokens, logprobs, "length", "run/v3/xxh3:1"))
    return found


def requests(num: int, *, size: int = 2, session: str = "") -> list[Request]:
    return [
        Request(g, (1, 2, 3), tuple(range(10 * g, 10 * g + size)), session=session)
        for g in range(num)
    ]


def generate(
    engine: SglangEngine, asked: list[Request], sampling: Sampling = SAMPLING
) -> list[list[Completion]]:
    async def ask() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.generate(request, sampling) for request in asked))

    return asyncio.run(ask())


def all_expected(asked: list[Request]) -> list[list[Completion]]:
    return [expected(request) for request in asked]


def gone(engine: SglangEngine) -> bool:
    return all(not server.process.processes() for server in engine.servers)


# -- what should work


def test_answers_come_back_in_seed_order_from_all_servers(make: Make, tmp_path: Path) -> None:
    engine = make(replicas=2)
    asked = requests(12)
    assert generate(engine, asked) == all_expected(asked)
    sent = [counts(tmp_path, i)["seeds"] for i in range(2)]
    assert sorted(sent[0] + sent[1]) == sorted(s for r in asked for s in r.seeds)
    assert min(map(len, sent)) >= 8, "both work"


def test_no_more_samples_than_the_concurrency_are_at_a_server(make: Make, tmp_path: Path) -> None:
    engine = make({"*": {"delay_s": 0.05}}, replicas=2, concurrency=4)
    asked = requests(20)
    assert engine.concurrency == 8
    assert generate(engine, asked) == all_expected(asked)
    assert [counts(tmp_path, i)["most"] for i in range(2)] == [4, 4]
    assert engine.metrics()["engine/queue_time_mean"] > 0.05
    # A group that is larger than the room there is still goes somewhere.
    (large,) = requests(1, size=9)
    assert generate(engine, [large]) == [expected(large)]


def test_a_session_stays_on_its_server_and_sessions_spread(make: Make, tmp_path: Path) -> None:
    engine = make(replicas=2)
    homes: dict[str, set[int]] = {}
    for turn in range(3):
        for name in "abcdefgh":
            before = [counts(tmp_path, i)["generate"] for i in range(2)]
            generate(engine, requests(1, size=1 + turn, session=name))
            after = [counts(tmp_path, i)["generate"] for i in range(2)]
            homes.setdefault(name, set()).update(i for i in range(2) if after[i] > before[i])
    assert all(len(home) == 1 for home in homes.values())
    assert {next(iter(home)) for home in homes.values()} == {0, 1}


def test_prefixes_and_limits_differ_by_entry(make: Make) -> None:
    engine = make()
    (whole,) = generate(engine, [Request(0, (1, 2), (5, 6, 7))])
    prefixes = tuple(c.tokens[:n] for c, n in zip(whole, (0, 2, 5), strict=True))
    (rest,) = generate(engine, [Request(0, (1, 2), (5, 6, 7), prefixes)])
    for before, after, prefix in zip(whole, rest, prefixes, strict=True):
        assert prefix + after.tokens == before.tokens
        assert after.logprobs == before.logprobs[len(prefix) :]


def test_routing_is_asked_for_and_comes_with_each_sample(make: Make, weights: Weights) -> None:
    config = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 1}
    config |= {"architectures": ["X"], "dtype": "float32"}
    (weights.path / "config.json").write_text(json.dumps(config))
    request = Request(0, (1, 2, 3), (4, 5), ((6,), ()))
    (found,) = generate(make(routed=True), [request])
    for i, completion in enumerate(found):
        num = len(request.entry_tokens(i)) + len(completion.tokens)
        rows = [[[k % 4], [(k + 1) % 4]] for k in range(num - 1)]
        assert read_routed(completion.routed_experts).tolist() == [*rows, [[0], [0]]]
    (plain,) = generate(make(), [request])
    assert {c.routed_experts for c in plain} == {""}


def test_a_model_without_experts_is_refused_before_a_server_starts(make: Make) -> None:
    with pytest.raises(ModelError, match="says nothing of experts"):
        make(routed=True)


def test_what_would_end_the_server_is_not_sent(make: Make, tmp_path: Path) -> None:
    engine = make(deterministic=True)
    with pytest.raises(ConfigError, match=r"rollout_min_p = 0\.1 cannot be with"):
        generate(engine, requests(1), Sampling(6, min_p=0.1))
    assert counts(tmp_path, 0)["generate"] == 0


def test_a_text_is_scored_by_one_and_by_each(make: Make) -> None:
    engine = make({"1": {"probe_off": 2.0}}, replicas=2)
    assert asyncio.run(engine.logprobs((1, 2, 3))) == [-1.0, -1.0]
    assert asyncio.run(engine.logprobs_of_each((1, 2, 3))) == [[-1.0, -1.0], [-3.0, -3.0]]


def test_abort_brings_back_what_there_is_and_sends_nothing_more(
    make: Make, tmp_path: Path, weights: Weights
) -> None:
    engine = make({"*": {"token_s": 0.01}}, replicas=2, concurrency=2)
    asked, sampling = requests(6), Sampling(2000)

    async def cut() -> list[list[Completion]]:
        running = [asyncio.ensure_future(engine.generate(r, sampling)) for r in asked]
        while sum(counts(tmp_path, i)["generate"] for i in range(2)) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        await engine.abort()
        assert all(task.done() for task in running[:2])
        return await asyncio.gather(*running, engine.generate(asked[0], sampling))

    began = time.monotonic()
    groups = asyncio.run(cut())
    assert time.monotonic() - began < 18, "all of it takes a minute"
    for request, group in zip([*asked, asked[0]], groups, strict=True):
        for completion, whole in zip(group, expected(request, sampling), strict=True):
            num = len(completion.tokens)
            assert completion.finish == "abort"
            assert completion.tokens == whole.tokens[:num]
            assert completion.logprobs == whole.logprobs[:num]
    assert all(c.tokens for group in groups[:2] for c in group)
    assert all(not c.tokens for group in groups[2:] for c in group)
    assert sum(counts(tmp_path, i)["generate"] for i in range(2)) == 2
    engine.load_weights(weights)
    assert generate(engine, asked[:1]) == [expected(asked[0])]


def test_metrics_say_what_was_seen(make: Make) -> None:
    engine = make(replicas=2)
    generate(engine, requests(5))
    metrics = engine.metrics()
    assert metrics["engine/requests"] == 5
    assert metrics["engine/cached_token_share"] == pytest.approx(1 / 3)
    assert 0 < metrics["engine/latency_mean"] < 10
    assert metrics["engine/cache_hit_rate"] == 0.5
    assert metrics["engine/server_waiting"] == 2
    assert (metrics["engine/servers_lost"], metrics["engine/retries"]) == (0, 0)


def test_gpus_are_divided_among_replicas(make: Make, tmp_path: Path) -> None:
    make(
        arguments={"tp_size": 2},
        replicas=2,
        gpus=("4", "5", "6", "7"),
    )
    seen = [counts(tmp_path, i)["env"]["CUDA_VISIBLE_DEVICES"] for i in range(2)]
    assert seen == ["4,5", "6,7"]


def test_weights_are_loaded_everywhere_or_nowhere(
    make: Make, weights: Weights, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    later = dataclasses.replace(weights, path=other, label="run/v4/xxh3:2")
    engine = make({"1": {"no_load": True}}, replicas=2)
    with pytest.raises(EngineError, match=r"did not load .*other: Failed to load"):
        engine.load_weights(later)
    assert generate(engine, requests(4)) == all_expected(requests(4))
    engine = make(replicas=2)
    with pytest.raises(EngineError, match=r"did not load .*none: Failed to load"):
        engine.load_weights(dataclasses.replace(later, path=tmp_path / "none"))
    assert generate(engine, requests(4)) == all_expected(requests(4))
    engine.load_weights(later)
    labels = {c.label for group in generate(engine, requests(4)) for c in group}
    assert labels == {"run/v4/xxh3:2"}


# -- starting


@pytest.mark.slow
def test_servers_start_at_once_and_late_ones_are_waited_for(make: Make) -> None:
    began = time.monotonic()
    engine = make({"*": {"late_s": 3.0}}, replicas=3)
    assert 3.0 <= time.monotonic() - began < 9.0, "not in turn"
    assert generate(engine, requests(3)) == all_expected(requests(3))


def test_one_that_dies_at_start_is_named_and_ends_the_others(make: Make) -> None:
    engine = make({"1": {"die_at_start": True}}, replicas=2, starts=False)
    kept = []
    with pytest.raises(EngineError, match="ended with status 1: ValueError: no such attention"):
        start_and_keep(engine, kept)
    assert len(kept) == 2
    assert all(not process.processes() for process in kept)


def start_and_keep(engine: SglangEngine, kept: list[Any]) -> None:
    weights = Weights(engine._options.log_path.parent / "model", 3, "xxh3:1", "run/v3/xxh3:1")
    servers: list[Any] = []
    make_server = engine._make_server

    def spy(*args: Any) -> Any:
        servers.append(make_server(*args))
        return servers[-1]

    engine._make_server = spy  # type: ignore[method-assign]
    try:
        engine.start(weights)
    finally:
        kept += [server.process for server in servers]


@pytest.mark.slow
def test_one_that_is_never_healthy_is_given_up_with_its_last_words(
    make: Make, weights: Weights
) -> None:
    engine = make({"*": {"hang_at_start": True}}, starts=False, start_timeout_s=1.5)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"did not answer within .* s: ready to roll") as caught:
        engine.start(weights)
    assert time.monotonic() - began < 60
    assert "sglang.log" in str(caught.value)


def test_a_port_that_was_taken_is_not_the_end(make: Make, tmp_path: Path) -> None:
    engine = make({"0": {"port_taken": True}})
    assert (tmp_path / "once-0").exists()
    assert generate(engine, requests(1)) == all_expected(requests(1))


def test_another_server_on_the_port_is_not_taken_for_ours(
    make: Make, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same run, with the same weights and label, as a second shard on the node may be."""
    first = make()
    port = first.servers[0].port
    second = make({"0": {"die_at_start": True}}, starts=False)
    monkeypatch.setattr("slurm_rl.rollout.sglang.server.find_free_port", lambda avoid: port)
    with pytest.raises(EngineError, match="ended with status 1"):
        second.start(weights)


def test_one_that_serves_something_else_is_refused(make: Make, weights: Weights) -> None:
    engine = make({"0": {"serves": "/another/model"}}, starts=False)
    with pytest.raises(EngineError, match="serves run/v3/xxh3:1 from /another/model, not"):
        engine.start(weights)


# -- in the middle


@pytest.mark.parametrize("when", [0, 2])
def test_the_only_server_dies(make: Make, when: int) -> None:
    engine = make({"0": {"die_after": when}})
    with pytest.raises(EngineError, match="ended with status 3: RuntimeError: CUDA error") as e:
        generate(engine, requests(8))
    assert "sglang.log" in str(e.value)


@pytest.mark.parametrize(
    "fault", [{"die_after": 2}, {"hang_after": 2}, {"die_after": 0}, {"hang_after": 0}]
)
def test_the_others_do_what_a_lost_one_had(
    make: Make, fault: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make({"1": fault}, replicas=3, request_timeout_s=1.0)
    lost = engine.servers[1]
    asked = requests(30)
    asked[3] = dataclasses.replace(asked[3], session="b")
    assert generate(engine, asked) == all_expected(asked)
    assert engine.metrics()["engine/servers_lost"] == 1
    assert "its requests go to the other 2" in caplog.text
    assert not lost.process.processes(), "it must not hold on to the GPU"
    assert generate(engine, asked) == all_expected(asked)


def test_the_last_one_that_is_lost_is_the_end(make: Make) -> None:
    engine = make({"*": {"die_after": 3}}, replicas=2)
    with pytest.raises(EngineError, match="ended with status 3"):
        generate(engine, requests(40))
    with pytest.raises(EngineError, match="ended with status 3"):
        generate(engine, requests(1))


def test_a_request_that_takes_too_long_everywhere_is_the_end(make: Make) -> None:
    engine = make({"*": {"hang_after": 0}}, replicas=3, request_timeout_s=0.5)
    with pytest.raises(EngineError, match=r"gave no answer within 0\.5 s.*request_timeout_s"):
        generate(engine, requests(1))
    assert engine.metrics()["engine/servers_lost"] <= 2


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "fault", [{"fail_after": 1}, {"reset_after": 1}, {"reset_after": 1, "truncate": True}]
)
def test_one_failure_is_tried_again(make: Make, replicas: int, fault: dict[str, int]) -> None:
    engine = make({"0": fault | {"fail_times": 1}}, replicas=replicas)
    asked = requests(6)
    assert generate(engine, asked) == all_expected(asked)
    metrics = engine.metrics()
    assert (metrics["engine/retries"], metrics["engine/servers_lost"]) == (1, 0)


def test_failures_all_the_time_end_it_with_what_was_said(make: Make) -> None:
    engine = make({"*": {"fail_after": 0}}, replicas=2)
    with pytest.raises(EngineError, match=r"answered 500 to a request: .*scheduler is unwell"):
        generate(engine, requests(1))
    assert engine.metrics()["engine/retries"] == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"results": 1}, "gave 1 results for 2 samples"),
        ({"results": 2}, "gave 0 results for 2 samples"),
        ({"ids": True}, "log-probs are of other tokens than its output: 6 and 5"),
        ({"extra": 1}, "gave 7 tokens where 6 were the most"),
        ({"label": "run/v2/xxh3:0"}, "answered with the weights run/v2/xxh3:0, not run/v3/xxh3:1"),
        ({"logprob": None}, "gave the log-prob NaN"),
        ({"logprob": 0.5}, r"gave the log-prob 0\.5"),
        ({"json": True}, "answered with what is not JSON"),
        ({"form": True}, "has not the form of version"),
        ({"reason": "abort"}, "cut a sample off by itself: no memory"),
        ({"reason": "tired"}, "ended a sample for the reason 'tired'"),
        ({"empty": True}, "an answer without a token"),
    ],
)
def test_a_wrong_answer_is_the_end_and_never_a_sample(
    make: Make, bad: dict[str, Any], message: str
) -> None:
    engine = make({"1": {"bad": bad}}, replicas=2)
    with pytest.raises(EngineError, match=message):
        generate(engine, requests(4))


def test_stop_in_the_middle_leaves_nothing_and_ends_who_waits(make: Make) -> None:
    engine = make({"*": {"delay_s": 30}}, replicas=2, concurrency=2)
    processes = [server.process for server in engine.servers]

    async def stop() -> list[Any]:
        running = [asyncio.ensure_future(engine.generate(r, SAMPLING)) for r in requests(6)]
        await asyncio.sleep(0.3)
        engine.stop()
        return await asyncio.gather(*running, return_exceptions=True)

    began = time.monotonic()
    results = asyncio.run(stop())
    assert time.monotonic() - began < 28
    assert all(isinstance(result, EngineError) for result in results)
    assert all(not process.processes() for process in processes)
    engine.stop()


def test_a_caller_who_leaves_gives_the_room_back(make: Make) -> None:
    engine = make({"*": {"delay_s": 0.3}}, concurrency=2)

    async def leave() -> list[list[Completion]]:
        tasks = [asyncio.ensure_future(engine.generate(r, SAMPLING)) for r in requests(4)]
        await asyncio.sleep(0.1)
        for task in tasks[:3]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in done[:3])
        return [await engine.generate(requests(1)[0], SAMPLING), done[3]]  # type: ignore[list-item]

    assert asyncio.run(leave()) == [expected(requests(1)[0]), expected(requests(4)[3])]
    assert engine.metrics()["engine/running"] == 0
