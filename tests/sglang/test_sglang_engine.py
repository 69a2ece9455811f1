"""The SGLang engine against a real SGLang 0.5.17 server on the CPU.

One server serves most tests, in the order of this file: starting one takes some 20 s.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slurm_rl.errors import EngineError
from slurm_rl.rollout import watchdog
from slurm_rl.rollout.engine import Completion, Request, Sampling, Weights
from slurm_rl.rollout.sglang import SglangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(300)]

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


def generate(
    engine: SglangEngine, sampling: Sampling = SAMPLING, *, seed: int = 0
) -> dict[int, list[Completion]]:
    requests = [
        Request(g, prompt, tuple(seed + 10 * g + k for k in range(4)))
        for g, prompt in enumerate(PROMPTS)
    ]
    found = {request.group_index: done for request, done in engine.generate(requests, sampling)}
    assert sorted(found) == [0, 1, 2]
    return found


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


def ask(engine: SglangEngine, path: str) -> dict[str, object]:
    connection = http.client.HTTPConnection("127.0.0.1", engine._port, timeout=30)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())  # type: ignore[no-any-return]
    finally:
        connection.close()


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


def test_stop_in_the_middle_leaves_nothing(engine) -> None:  # type: ignore[no-untyped-def]
    server = engine.server
    many = [Request(g, (1, 2, 3), (g,)) for g in range(3000)]
    running = engine.generate(many, Sampling(400))
    next(running)
    assert len(server.processes()) >= 2
    began = time.monotonic()
    engine.stop()
    assert server.processes() == []
    assert time.monotonic() - began < 12  # SIGTERM alone drains, and would need longer
    with pytest.raises(EngineError):
        list(running)
    engine.stop()


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
sys.path.insert(0, {here!r})
from pathlib import Path
import conftest
from slurm_rl.rollout.engine import Weights
from slurm_rl.rollout.sglang import SglangEngine, SglangOptions
import os
options = SglangOptions(conftest.CPU_ARGUMENTS, {{**os.environ, **conftest.CPU_ENVIRONMENT}}, Path({log!r}), python={python!r}, start_timeout_s=150)
engine = SglangEngine(options)
engine.start(Weights(Path({path!r}), 0, "xxh3:0", "run/v0/xxh3:0"))
print(engine.server.pid, engine.server._token, flush=True)
time.sleep(600)
"""


def test_the_server_does_not_outlive_us(sglang_python: str, all_weights, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    program = CRASHING.format(
        here=str(Path(__file__).parent),
        log=str(tmp_path / "log"),
        python=sglang_python,
        path=str(all_weights[0].path),
    )
    ours = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert ours.stdout is not None
    words = ours.stdout.readline().split()
    assert len(words) == 2, (tmp_path / "log").read_text()[-2000:]
    session, token = int(words[0]), words[1]
    assert len(watchdog.find_processes(session, token)) >= 2
    os.kill(ours.pid, signal.SIGKILL)
    ours.wait()
    ours.stdout.close()
    deadline = time.monotonic() + 15
    while watchdog.find_processes(session, token):
        assert time.monotonic() < deadline
        time.sleep(0.1)
