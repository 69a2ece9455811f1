from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers import AutoModelForCausalLM

from slurm_rl.errors import ModelError
from slurm_rl.rollout.embedded import EmbeddedEngine, truncate
from slurm_rl.rollout.engine import Request, Sampling, Weights

PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 11)]


def weights(path: Path, label: str = "v0") -> Weights:
    return Weights(path, 0, "d", label)


@pytest.fixture
def engine(tiny_model, tokenizer):  # type: ignore[no-untyped-def]
    engine = EmbeddedEngine(tokenizer)
    engine.start(weights(tiny_model))
    return engine


def requests(num_samples: int = 4) -> list[Request]:
    return [
        Request(g, p, tuple(range(10 * g, 10 * g + num_samples))) for g, p in enumerate(PROMPTS)
    ]


def test_logprobs_are_those_of_a_plain_forward_after_temperature(engine, tiny_model) -> None:  # type: ignore[no-untyped-def]
    sampling = Sampling(max_new_tokens=12, temperature=0.7, top_k=5)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for request, completions in engine.generate(requests(), sampling):
        for completion in completions:
            tokens = torch.tensor([request.prompt_tokens + completion.tokens])
            with torch.no_grad():
                logprobs = torch.log_softmax(model(tokens).logits[0].float() / 0.7, -1)
            start = len(request.prompt_tokens) - 1
            expected = logprobs[start:-1].gather(1, tokens[0, start + 1 :, None])[:, 0]
            np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=2e-5)


def test_a_group_does_not_depend_on_what_else_runs(engine) -> None:  # type: ignore[no-untyped-def]
    sampling = Sampling(max_new_tokens=12)
    together = dict(engine.generate(requests(), sampling))
    for request in reversed(requests()):
        alone = next(iter(engine.generate([request], sampling)))[1]
        assert alone == together[request]


def test_threads_are_pinned_while_it_computes_and_restored(engine) -> None:  # type: ignore[no-untyped-def]
    seen = []
    engine._model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            results.append(list(engine.generate(requests(), Sampling(max_new_tokens=12))))
            assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
    assert results[0] == results[1]


def test_same_seed_same_sample_and_other_seeds_differ(engine) -> None:  # type: ignore[no-untyped-def]
    sampling = Sampling(max_new_tokens=12)
    group = Request(0, (1, 2, 3), (5, 6, 5, 7))
    ((_, samples),) = engine.generate([group], sampling)
    assert samples[0].tokens == samples[2].tokens
    assert len({sample.tokens for sample in samples}) == 3


def test_global_rng_is_untouched(engine, other_model) -> None:  # type: ignore[no-untyped-def]
    state, np_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    engine.load_weights(weights(other_model))
    list(engine.generate(requests(), Sampling(max_new_tokens=4)))
    assert torch.equal(state, torch.get_rng_state())
    assert (np_state == np.random.get_state()[1]).all()


def test_samples_follow_the_distribution(engine, tiny_model) -> None:  # type: ignore[no-untyped-def]
    num = 4000
    group = Request(0, (1, 2, 3), tuple(range(num)))
    ((_, samples),) = engine.generate([group], Sampling(max_new_tokens=1))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        probs = torch.softmax(model(torch.tensor([[1, 2, 3]])).logits[0, -1].double(), -1).numpy()
    counts = np.bincount([sample.tokens[0] for sample in samples], minlength=len(probs))
    # Five standard deviations of a binomial.
    assert (np.abs(counts - num * probs) <= 5 * np.sqrt(num * probs * (1 - probs)) + 1).all()


def test_generation_ends_at_stop_token_stop_text_and_length(engine, tokenizer) -> None:  # type: ignore[no-untyped-def]
    group = Request(0, (1, 2, 3), tuple(range(16)))
    ((_, free),) = engine.generate([group], Sampling(max_new_tokens=8))
    assert all((s.finish == "length") == (s.tokens[-1] != tokenizer.eos_token_id) for s in free)
    longest = max(free, key=lambda s: len(s.tokens))
    assert len(longest.tokens) == 8
    token, text = longest.tokens[3], tokenizer.decode(longest.tokens[2:4])
    i = free.index(longest)
    for sampling in (
        Sampling(max_new_tokens=8, stop_token_ids=(token,)),
        Sampling(max_new_tokens=8, stop=(text,)),
    ):
        ((_, stopped),) = engine.generate([group], sampling)
        assert stopped[i].finish == "stop"
        assert stopped[i].tokens == longest.tokens[: len(stopped[i].tokens)]
        assert len(stopped[i].tokens) <= 4


def test_other_weights_give_other_samples_and_their_own_label(
    engine, tiny_model, other_model
) -> None:  # type: ignore[no-untyped-def]
    sampling = Sampling(max_new_tokens=12)
    first = list(engine.generate(requests(), sampling))
    engine.load_weights(weights(other_model, "v1"))
    second = list(engine.generate(requests(), sampling))
    assert {c.label for _, group in second for c in group} == {"v1"}
    assert [[c.tokens for c in g] for _, g in first] != [[c.tokens for c in g] for _, g in second]
    engine.load_weights(weights(tiny_model))
    assert list(engine.generate(requests(), sampling)) == first


def test_weights_that_cannot_be_loaded_leave_the_old_ones(engine, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelError, match="cannot load"):
        engine.load_weights(weights(tmp_path, "v1"))
    ((_, samples),) = engine.generate(requests()[:1], Sampling(max_new_tokens=1))
    assert samples[0].label == "v0"


@given(
    hnp.arrays(np.float64, (2, 7), elements=st.floats(0.001, 1)),
    st.integers(1, 7),
    st.floats(0.05, 1.0),
)
def test_truncation_keeps_the_smallest_likeliest_set(weights, top_k: int, top_p: float) -> None:  # type: ignore[no-untyped-def]
    probs = weights / weights.sum(-1, keepdims=True)
    kept = truncate(probs.copy(), Sampling(1, top_k=top_k, top_p=top_p))
    for before, after in zip(probs, kept, strict=True):
        mask = after > 0
        assert 1 <= mask.sum() <= top_k
        assert (after[mask] == before[mask]).all()
        assert mask.all() or before[mask].min() >= before[~mask].max()
        within = np.sort(before)[::-1][:top_k].sum()
        assert mask.sum() == top_k or after.sum() >= top_p * within - 1e-12
        # Without its least likely member it would fall short.
        assert after.sum() - after[mask].min() < top_p * within + 1e-12
