"""Experts that an engine chose, replayed: against transformers, and in every layout."""

import dataclasses

import layouts
import numpy as np
import pytest
import torch
import trains
from layouts import case

from slurm_rl.errors import DataError

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE_ONLY = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
ALONE = {
    "packed": {"packed": 40},
    "one-a-pass": {"packed": 1},
    "full-padded": {**FULL},
    "full": {"packed": 40, **FULL},
    "moe-only": {"packed": 40, **MOE_ONLY},
}
RANKS = {
    "data": {"packed": 40},
    "tensor": {"packed": 40, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tensor-padded": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"packed": 40, "pipeline_model_parallel_size": 2},
    "pipeline-full": {"packed": 20, "pipeline_model_parallel_size": 2, **FULL},
    **{
        # One of them has an odd number of micro-batches: the schedule adds one.
        f"interleaved-full-{budget}": {
            "packed": budget,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            **FULL,
        }
        for budget in (20, 40, 60)
    },
    "context": {"packed": 20, "context_parallel_size": 2},
    "context-padded-full": {"context_parallel_size": 2, **FULL},
    "experts": {"packed": 40, "expert_model_parallel_size": 2},
}
#: The first layer is dense: rows of layers are not those of routers.
SHAPE = layouts.MODEL | layouts.MOE | {"mlp_only_layers": [0]}


@pytest.fixture(scope="module")
def results(tmp_path_factory, made_models):
    root = tmp_path_factory.mktemp("replay")
    shape = {"family": "qwen3_moe", "tied": True, "model": SHAPE}
    models = {"moe": f"{made_models(trains.tiny_settings(root, **shape)).path}/weights"}
    own = {"model": "moe", "steps": (0, 1), "replay": True}
    cases = [case("one", **own), case("by-itself", **own | {"replay": False})]
    cases += [case(name, **own, **extra) for name, extra in ALONE.items()]
    found = layouts.run_cases(root, models, cases, num=1)
    cases = [case(name, **own, **extra) for name, extra in RANKS.items()]
    return found | layouts.run_cases(root, models, cases, num=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALONE, *RANKS])
def test_it_is_the_same_in_every_layout(results, name):
    for what in ("losses", "norms", "logprobs"):
        assert results[name][what] == pytest.approx(results["one"][what], rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "moe-only"])
def test_recomputation_changes_no_bit(results, name):
    for what in ("losses", "norms", "logprobs"):
        assert results[name][what] == results["packed"][what]


@pytest.mark.slow
def test_other_experts_give_other_numbers(results):
    for what in ("losses", "norms", "logprobs"):
        for mine, own in zip(results["one"][what], results["by-itself"][what], strict=True):
            assert abs(mine - own) > 1e-3 * abs(own)


def replay_settings(folder, **train):
    settings = trains.tiny_settings(
        folder,
        family="qwen3_moe",
        tied=True,
        model=SHAPE,
        train={"global_batch_size": 16, "entropy_coef": 0.0} | train,
    )
    rollout = settings.rollout.model_copy(update={"use_rollout_routing_replay": True})
    return settings.model_copy(update={"rollout": rollout})


class ForcedRouter(torch.nn.Module):
    """transformers' router with experts that are given: softmax over all, then over the chosen."""

    def __init__(self, gate):
        super().__init__()
        self.gate, self.ids = gate, None

    def forward(self, hidden):
        logits, _, _ = self.gate(hidden)
        chosen = logits.float().softmax(-1).gather(1, self.ids)
        return logits, chosen / chosen.sum(-1, keepdim=True), self.ids


@pytest.fixture
def hugging_face(tmp_path, made_models):
    """The model in transformers, and its routers by layer."""
    from transformers import AutoModelForCausalLM

    folder = f"{made_models(replay_settings(tmp_path)).path}/weights"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, {
        number: layer.mlp
        for number, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "gate")
    }


def spans(samples):
    ends = np.cumsum(samples.prompt_lengths.astype(int) + samples.response_lengths)
    return zip(np.append(0, ends[:-1]), ends, strict=True)


def test_forced_experts_are_those_of_another_implementation(
    tmp_path, made_models, open_trainers, hugging_face
):
    """Log-probs of each trained token, and the norm of the first step's gradient."""
    settings = replay_settings(tmp_path, normalize_advantages_std=False)
    samples = trains.made_up_routing(trains.made_up_samples(0), layers=4, num=4, top_k=2)
    model, blocks = hugging_face
    for block in blocks.values():
        block.gate = ForcedRouter(block.gate)
    assert set(blocks) == {1, 2, 3}
    rewards = samples.rewards.reshape(4, 4)
    advantages = (rewards - rewards.mean(1, keepdims=True)).flatten()
    logprobs, total = [], 0.0
    for i, (start, end) in enumerate(spans(samples)):
        tokens = torch.from_numpy(samples.tokens[start:end]).long()
        for number, block in blocks.items():
            block.gate.ids = torch.from_numpy(samples.routed_experts[start:end, number]).long()
        prompt, mask = int(samples.prompt_lengths[i]), samples.loss_mask[samples.response_slice(i)]
        every = (model(tokens[None]).logits[0, prompt - 1 : -1] / 0.8).log_softmax(-1)
        own = every.gather(1, tokens[prompt:, None])[:, 0][torch.from_numpy(mask) != 0]
        logprobs.append(own.detach())
        if len(own):
            total = total - float(advantages[i]) * own.mean() / 16
    total.backward()
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()

    order = trains.train_order(tmp_path, made_models(settings), "a")
    trainer = open_trainers(order, settings)
    metrics = trainer.step(trains.work(samples))
    assert metrics["train/grad_norm"] == pytest.approx(wanted, rel=2e-4)
    assert metrics["train/first_ratio_diff_max"] == 0.0
    gaps = torch.cat(logprobs).numpy() - samples.rollout_logprobs[samples.loss_mask != 0]
    name = "train/train_rollout_logprob_abs_diff"
    assert metrics[name] == pytest.approx(np.abs(gaps).mean(), rel=1e-4)


def test_the_routers_own_choices_change_no_bit(tmp_path, made_models, open_trainers, hugging_face):
    """Packed: padding would go elsewhere, and an expert's product be cut in another way."""
    model, blocks = hugging_face
    samples = trains.made_up_samples(0)
    routed = np.zeros((len(samples.tokens), 4, 2), np.uint8)
    said = {}
    for number, block in blocks.items():
        block.gate.register_forward_hook(
            lambda module, inputs, output, n=number: said.update({n: output[2].numpy()})
        )
    with torch.no_grad():
        for start, end in spans(samples):
            model(torch.from_numpy(samples.tokens[start:end]).long()[None])
            for number, ids in said.items():
                routed[start:end, number] = ids
    settings = replay_settings(tmp_path, max_tokens_per_gpu=40)
    off = settings.model_copy(
        update={
            "rollout": settings.rollout.model_copy(update={"use_rollout_routing_replay": False})
        }
    )
    found = []
    for own, given in (
        (off, samples),
        (settings, dataclasses.replace(samples, routed_experts=routed)),
    ):
        order = trains.train_order(tmp_path, made_models(settings), f"a-{len(found)}")
        trainer = open_trainers(order, own)
        metrics = trainer.step(trains.work(given))
        weights = [p.detach().clone() for p in trainer.model.parameters()]
        found.append(({k: v for k, v in metrics.items() if "perf/" not in k}, weights))
    (first, plain), (second, replayed) = found
    assert first == second and all(map(torch.equal, plain, replayed))


@pytest.mark.parametrize(
    ("routed", "said"),
    [
        (None, "it has no routed_experts"),
        ((3, 2), "2 experts of 3 layers for each token, the model 2 of 4"),
        ((4, 3), "3 experts of 4 layers for each token, the model 2 of 4"),
        ((4, 2), "it names expert 9, the model has 4"),
    ],
)
def test_ids_that_do_not_fit_are_refused_before_any_pass(
    tmp_path, made_models, open_trainers, routed, said
):
    settings = replay_settings(tmp_path)
    samples = trains.made_up_samples(0)
    if routed is not None:
        ids = np.zeros((len(samples.tokens), *routed), np.uint8)
        ids[-1, -1, -1] = 9 if routed == (4, 2) else 0
        samples = dataclasses.replace(samples, routed_experts=ids)
    order = trains.train_order(tmp_path, made_models(settings), "a")
    trainer = open_trainers(order, settings)
    with pytest.raises(DataError, match=said):
        trainer.step(trains.work(samples))
    assert trainer.schedule_step == 0
