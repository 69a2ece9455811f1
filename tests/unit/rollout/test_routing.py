"""Routing that is replayed: from an engine's answer to the file, and what is refused on the way."""

import asyncio
import base64
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load, save_file
from toy.orders import weights_input
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from slurm_rl.errors import CorruptError, EngineError, ModelError, RewardError
from slurm_rl.rollout.embedded import EmbeddedEngine
from slurm_rl.rollout.engine import Completion, Request, Sampling, Weights
from slurm_rl.rollout.groups import Finisher
from slurm_rl.rollout.journal import parse_head, parse_samples, render_line
from slurm_rl.rollout.routing import (
    Experts,
    check_routed,
    cover,
    find_experts,
    num_shared,
    parse_routed,
    read_experts,
    read_routed,
    write_routed,
)
from slurm_rl.rollout.samples import (
    RoutedSample,
    Sample,
    join_samples,
    pack_samples,
    read_samples,
    take_samples,
    write_samples,
)
from slurm_rl.rollout.sglang.wire import parse_answer, render_request
from slurm_rl.rollout.turns.session import Session
from slurm_rl.stages.rollout import run_rollout

LAYERS, PER_TOKEN, NUM = 3, 2, 6
EXPERTS = Experts(LAYERS, PER_TOKEN, NUM, frozenset({1}))
WEIGHTS = Weights(Path("/m"), 3, "xxh3:1", "run/v3/xxh3:1")


def draw_ids(seed: int, num_tokens: int) -> np.ndarray:  # type: ignore[type-arg]
    """Ids of that many tokens, as int32; layer 1 is dense."""
    scores = np.random.default_rng(seed).random((num_tokens, LAYERS, NUM))
    ids = np.argsort(scores, axis=2)[:, :, :PER_TOKEN].astype(np.int32)
    ids[:, 1] = 0
    return ids


def made(group: int, index: int, length: int, **changes: object) -> RoutedSample:
    prompt = tuple(range(group + 1))
    seed = 100 * group + index
    text = check_routed(draw_ids(seed, len(prompt) + length - 1), EXPERTS, what="x")
    sample = RoutedSample(
        group, index, prompt, (7,) * length, (-0.5,) * length, (1,) * length, routed_experts=text
    )
    return replace(sample, **changes)  # type: ignore[arg-type]


SIZES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=8)


@given(SIZES, st.data())
def test_routing_stays_with_its_tokens(tmp_path_factory, sizes, data) -> None:  # type: ignore[no-untyped-def]
    samples = [made(g, i, n) for i, (g, n) in enumerate(sizes)]
    cut = data.draw(st.integers(0, len(samples)))
    paths = []
    for part in (samples[:cut], samples[cut:]):
        root = tmp_path_factory.mktemp("part")
        write_samples(root, part)
        paths.append(root / "samples.safetensors")
    batch = read_samples(paths)
    ordered = sorted(samples, key=lambda s: (s.group_index, s.sample_index))
    order = data.draw(st.lists(st.sampled_from(range(len(samples))), min_size=1, max_size=8))
    for taken, wanted in (
        (batch, ordered),
        (take_samples(batch, np.array(order)), [ordered[i] for i in order]),
    ):
        assert taken.routed_experts is not None and taken.routed_experts.dtype == np.uint8
        assert len(taken.routed_experts) == len(taken.tokens)
        end = 0
        for sample in wanted:
            start, end = end, end + len(sample.tokens)
            rows = taken.routed_experts[start:end]
            seed = 100 * sample.group_index + sample.sample_index
            np.testing.assert_array_equal(rows[:-1], draw_ids(seed, len(rows) - 1))
            assert rows[-1].tolist() == [[0, 1], [0, 0], [0, 1]]


def test_samples_without_have_no_such_tensor(tmp_path: Path) -> None:
    write_samples(tmp_path, [Sample(0, 0, (1,), (2,), (-0.5,), (1,))])
    assert "routed_experts" not in load((tmp_path / "samples.safetensors").read_bytes())
    assert read_samples([tmp_path / "samples.safetensors"]).routed_experts is None


@pytest.mark.parametrize("changed", ["dtype", "rank", "rows"])
def test_a_tensor_of_another_form_is_refused(tmp_path: Path, changed: str) -> None:
    write_samples(tmp_path, [made(0, 0, 2)])
    path = tmp_path / "samples.safetensors"
    arrays = load(path.read_bytes())
    ids = arrays["routed_experts"]
    wrong = {"dtype": ids.astype(np.int32), "rank": ids[:, 0].copy(), "rows": ids[1:].copy()}
    save_file(arrays | {"routed_experts": wrong[changed]}, path)
    with pytest.raises(CorruptError, match=r"samples\.safetensors: .*(routed_experts|do not fit)"):
        read_samples([path])


def test_all_that_is_trained_on_has_it_or_nothing_has() -> None:
    plain = Sample(0, 1, (1,), (2,), (-0.5,), (1,))
    with pytest.raises(EngineError, match="have none, and are trained on"):
        pack_samples([made(0, 0, 1), plain])
    with pytest.raises(CorruptError, match="have none, and are trained on"):
        join_samples([pack_samples([made(0, 0, 1)]), pack_samples([plain])])
    with pytest.raises(EngineError, match="rows for"):
        pack_samples([made(0, 0, 2, response_tokens=(7,), rollout_logprobs=(0.0,), loss_mask=(1,))])
    idle = replace(plain, loss_mask=(0,))
    routed = pack_samples([made(0, 0, 1), idle]).routed_experts
    assert routed is not None and len(routed) == 4
    joined = join_samples([pack_samples([made(0, 0, 1)]), pack_samples([idle])])
    np.testing.assert_array_equal(joined.routed_experts, routed)


def test_the_journal_keeps_it_and_lines_without_stay_as_they_were() -> None:
    samples = [made(0, 0, 2), made(0, 1, 3)]
    line = render_line("k", samples).rstrip(b"\n")
    assert parse_head(line) is not None
    assert parse_samples(line) == samples
    assert b"routed" not in render_line("k", [Sample(0, 0, (1,), (2,), (-0.5,), (1,))])
    graded = samples[0].graded(0.5, {"a": 0.5})
    assert graded.routed_experts == samples[0].routed_experts and graded.reward == 0.5


@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=3, max_dims=3, max_side=4)))
def test_the_text_says_what_the_ids_are(ids: np.ndarray) -> None:  # type: ignore[type-arg]
    np.testing.assert_array_equal(read_routed(write_routed(ids)), ids)


# -- an answer of SGLang 0.5.17: base64 of int32[tokens - 1, layers, experts of a token]

REQUEST = Request(5, (1, 2, 3), (8,))


def answer(routed: object, *, finish: str = "length") -> bytes:
    meta = {
        "weight_version": WEIGHTS.label,
        "output_token_logprobs": [[-0.5, 3, None], [-1.5, 4, None]],
        "finish_reason": {"type": finish},
        "routed_experts": routed,
    }
    return orjson.dumps([{"output_ids": [3, 4], "meta_info": meta}])


def as_text(ids: np.ndarray) -> str:  # type: ignore[type-arg]
    return base64.b64encode(ids.astype("<i4").tobytes()).decode()


def parse(data: bytes) -> Completion:
    label = WEIGHTS.label
    found = parse_answer(data, REQUEST, Sampling(2), label=label, experts=EXPERTS)
    return found.completions[0]


def test_an_answer_of_sglang_is_understood() -> None:
    ids = draw_ids(0, 4)
    routed = read_routed(parse(answer(as_text(ids))).routed_experts)
    np.testing.assert_array_equal(routed[:-1], ids)
    assert routed.shape == (5, LAYERS, PER_TOKEN)
    assert parse(answer(None, finish="abort")).routed_experts == ""
    assert render_request(REQUEST, Sampling(2), routed=True)["return_routed_experts"] is True
    assert "return_routed_experts" not in render_request(REQUEST, Sampling(2))


def changed(value: int, *, layer: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    ids = draw_ids(0, 4)
    ids[2, layer, 0] = value
    return ids


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"no routed experts: int32\[4, 3, 2\] expected, nothing got"),
        ([1], "a list got"),
        ("?", "not base64"),
        (as_text(draw_ids(0, 5)), r"of 120 bytes, where int32\[4, 3, 2\] has 96"),
        (as_text(draw_ids(0, 3)), "of 72 bytes"),
        (as_text(changed(NUM)), "the expert 6 among"),
        (as_text(changed(-1)), "the expert -1 among"),
        (as_text(changed(int(draw_ids(0, 4)[2, 0, 1]))), "token 2 is sent twice .* in layer 0"),
    ],
)
def test_an_answer_that_cannot_be_is_refused_by_name(given: object, message: str) -> None:
    with pytest.raises(EngineError, match=f"answer 0 to group 5: .*{message}") as caught:
        parse(answer(given))
    assert "use_rollout_routing_replay" in caught.value.hint


def test_what_a_model_says_of_its_experts(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}
    assert find_experts(config) == Experts(4, 2, 8, frozenset())
    assert find_experts(config | {"first_k_dense_replace": 1}).dense == {0}
    assert find_experts(config | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}).dense == {
        0,
        1,
        2,
    }
    for wrong in ({"num_experts": 257}, {"num_experts": 0}, {"num_experts_per_tok": 9}):
        (tmp_path / "config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(ModelError, match=r"config\.json: says nothing of experts"):
            read_experts(tmp_path)


# -- conversations


class Scripted:
    """An engine that says one token, 9, and the routing of all but it, another one each time."""

    calls = -1

    async def generate(self, request: Request, sampling: Sampling) -> list[Completion]:
        self.calls += 1
        text = check_routed(draw_ids(self.calls, len(request.prompt_tokens)), EXPERTS, what="x")
        return [Completion((9,), (-0.5,), "stop", WEIGHTS.label, text)]


def talk(*contexts: tuple[int, ...]) -> Session:
    limits = SimpleNamespace(response=50, context=None, vocabulary=100)
    session = Session(
        Scripted(),  # type: ignore[arg-type]
        tokenizer=SimpleNamespace(decode=lambda tokens, **_: ""),
        weights=WEIGHTS,
        sampling=Sampling(50),
        limits=limits,  # type: ignore[arg-type]
        group_index=0,
        index=0,
        seed=1,
        prompt=contexts[0],
    )
    for context in contexts:
        asyncio.run(session.generate(context))
    return session


def test_each_token_keeps_the_choice_of_the_call_that_gave_it() -> None:
    """A later call reads the conversation again, and may choose otherwise; the log-probs are of the
    first. What came after the last call is anything."""
    session = talk((1, 2), (1, 2, 9, 5))
    first, second = draw_ids(0, 2), draw_ids(1, 4)
    assert (first != second[:2]).any()
    routed = read_routed(session.routing_of((1, 2, 9, 5, 9, 6, 6), num_needed=4))
    np.testing.assert_array_equal(routed[:4], np.concatenate([first, second[2:]]))
    assert routed[4:].tolist() == [[[0, 1], [0, 0], [0, 1]]] * 3
    part = read_routed(session.routing_of((1, 2, 9), num_needed=2))
    np.testing.assert_array_equal(part[:2], first)


def test_what_no_call_covers_is_refused() -> None:
    session = talk((1, 2), (1, 2, 9, 5))
    with pytest.raises(RewardError, match="known of the first 4 tokens of a sample, and 5 are"):
        session.routing_of((1, 2, 9, 5, 9, 6, 6), num_needed=5)
    with pytest.raises(RewardError, match="known of the first 1 tokens"):
        session.routing_of((1, 3, 9), num_needed=2)
    assert talk((1, 2)).routing_of((4, 4), num_needed=0) != ""


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_what_two_have_in_common(one: list[int], other: list[int]) -> None:
    num = num_shared(one, other)
    assert one[:num] == other[:num]
    assert num in (len(one), len(other)) or one[num] != other[num]


def test_cover_leaves_layers_without_experts_at_zero() -> None:
    text = check_routed(draw_ids(0, 3), EXPERTS, what="x")
    assert not read_routed(cover(text, known=2, num_tokens=9))[:, 1].any()


# -- the embedded engine, against transformers' own routers


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("moe")
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def routers_choice(path: Path, tokens: list[int]) -> dict[int, list[set[int]]]:
    """By layer, the experts of each token, from the router's input and weight alone."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    found: dict[int, list[set[int]]] = {}
    for number, layer in enumerate(model.model.layers):
        if not hasattr(layer.mlp, "gate"):
            continue

        def look(module, inputs, output, number=number) -> None:  # type: ignore[no-untyped-def]
            logits = inputs[0].reshape(len(tokens), -1) @ module.weight.T
            found[number] = [set(row) for row in logits.topk(2).indices.tolist()]

        layer.mlp.gate.register_forward_hook(look)
    with torch.inference_mode():
        model(torch.tensor([tokens]))
    return found


@pytest.mark.parametrize("prefixes", [(), ((5,), (), (6, 7))])
def test_the_embedded_engine_says_what_the_routers_chose(moe_model, tokenizer, prefixes) -> None:  # type: ignore[no-untyped-def]
    engine = EmbeddedEngine(tokenizer, routed=True)
    engine.start(Weights(moe_model, 0, "d", "v0"))
    request = Request(0, (1, 2, 3), (4, 5, 6), prefixes)
    try:
        completions = asyncio.run(engine.generate(request, Sampling(6)))
    finally:
        engine.stop()
    for i, completion in enumerate(completions):
        tokens = [*request.entry_tokens(i), *completion.tokens]
        routed = read_routed(completion.routed_experts)
        assert routed.shape == (len(tokens), 3, 2)
        chosen = routers_choice(moe_model, tokens)
        assert set(chosen) == {0, 2}
        for layer, sets in chosen.items():
            assert [set(row) for row in routed[:-1, layer].tolist()] == sets[:-1]
        assert not routed[:, 1].any()


def test_drawn_tokens_do_not_depend_on_whether_routing_is_said(moe_model, tokenizer) -> None:  # type: ignore[no-untyped-def]
    found = []
    for routed in (False, True):
        engine = EmbeddedEngine(tokenizer, routed=routed)
        engine.start(Weights(moe_model, 0, "d", "v0"))
        found.append(asyncio.run(engine.generate(Request(0, (1, 2), (4, 5)), Sampling(6))))
        engine.stop()
    assert [c.tokens for c in found[0]] == [c.tokens for c in found[1]]
    assert [c.logprobs for c in found[0]] == [c.logprobs for c in found[1]]
    assert {c.routed_experts for c in found[0]} == {""}


def test_a_finished_sample_takes_its_routing_along(tokenizer) -> None:  # type: ignore[no-untyped-def]
    prompt = SimpleNamespace(prompt="a", label=None, metadata={}, data_set="data")
    visit = SimpleNamespace(group_index=0, tokens=(1, 2), prompt=prompt)
    request = Request(0, (1, 2), (8,))
    group = SimpleNamespace(visit=visit, carried=(), request=request, group_index=0)
    text = check_routed(draw_ids(0, 2), EXPERTS, what="x")
    completion = Completion((9,), (-0.5,), "stop", WEIGHTS.label, text)
    (sample,) = Finisher(WEIGHTS, tokenizer).finish(group, [completion])  # type: ignore[arg-type]
    assert isinstance(sample, RoutedSample) and sample.routed_experts == text
    assert sample.data_set == "data" and len(sample.tokens) == 3


def test_parse_needs_a_row_for_each_token_that_was_fed() -> None:
    with pytest.raises(EngineError, match=r"int32\[2, 3, 2\]"):
        parse_routed(as_text(draw_ids(0, 3)), EXPERTS, num_tokens=3, what="x")


@pytest.mark.parametrize("turns", [{}, {"tools": ["calculator"]}])
def test_a_rollout_commits_what_the_routers_chose(  # type: ignore[no-untyped-def]
    moe_model, prompts, make_settings, make_order, tmp_path, turns
) -> None:
    weights = weights_input(moe_model, tmp_path / "moe")
    order = make_order(weights=weights)
    run_rollout(order, make_settings(use_rollout_routing_replay=True, **turns))
    batch = read_samples([Path(order.attempt_dir) / "samples.safetensors"])
    assert batch.routed_experts is not None
    assert batch.routed_experts.shape == (len(batch.tokens), 3, 2)
    end = 0
    for i in range(len(batch)):
        tokens = batch.sample_tokens(i).tolist()
        start, end = end, end + len(tokens)
        trained = np.flatnonzero(batch.loss_mask[batch.response_slice(i)])
        needed = int(batch.prompt_lengths[i]) + int(trained[-1]) if len(trained) else 0
        for layer, sets in routers_choice(moe_model, tokens).items():
            rows = batch.routed_experts[start : start + needed, layer].tolist()
            assert [set(row) for row in rows] == sets[:needed]
