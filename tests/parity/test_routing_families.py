"""Replayed experts: of every family, and of one model without the others in the process."""

import gc
import weakref

import family_models
import pytest
import torch
import trains
from test_routing_replay import SHAPE, replay_settings

from slurm_rl.train.solo import alone

FAMILIES = [name for name in family_models.MODELS if family_models.has_experts(name)]
SIZE = (3, 40)
MIXTRAL_NAMES = {
    "block_sparse_moe": "mlp",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class GivenRouter(torch.nn.Module):
    """A router of transformers with experts that are given; probabilities by the papers' formulas.

    DeepSeek-V3: sigmoid of each, without the bias, over the sum of the chosen, scaled. Others:
    softmax over all; over the sum of the chosen where the config says so, in Mixtral always.
    """

    def __init__(self, gate, config, ids):
        super().__init__()
        self.gate, self.config, self.ids = gate, config, ids

    def forward(self, hidden):
        logits = self.gate(hidden)[0].flatten(0, -2).float()
        config, is_sigmoid = self.config, hasattr(self.config, "routed_scaling_factor")
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
        chosen = scores.gather(1, self.ids)
        if getattr(config, "norm_topk_prob", True):
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return logits, chosen * getattr(config, "routed_scaling_factor", 1.0), self.ids


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        family_models.make_model(name, root / name)
    return root


def other_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def made_up_ids(geometry, seed=0):
    """uint8[b, S, L, K]: experts by chance, in any order."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*SIZE, geometry.num_layers, geometry.moe.num_experts)
    ids = torch.rand(shape, generator=generator).argsort(-1)
    return ids[..., : geometry.moe.top_k].to(torch.uint8)


def shown(model, ids, *, is_training=False):
    from slurm_rl.train.routing import replay_of

    replay_of(model).begin(is_training=is_training)
    replay_of(model).show(ids, None)


def logits_of(model):
    positions = torch.arange(SIZE[1]).expand(SIZE)
    return model(family_models.make_tokens(*SIZE), positions, None)[..., :100]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_the_same_experts_in_transformers(root, name):
    weights = torch.linspace(-1, 1, SIZE[0] * SIZE[1] * 100).reshape(*SIZE, 100)
    with alone():
        from slurm_rl.train import routing
        from slurm_rl.train.loading import local_rules
        from slurm_rl.train.shards import join_shards

        geometry, _, model = family_models.build_from(root / name)
        routing.install(model)
        ids = made_up_ids(geometry)
        shown(model, ids)
        found = logits_of(model)
        (found * weights).sum().backward()
        grads = {}
        for rule, parameter in local_rules(geometry, model):
            if isinstance(parameter, torch.nn.Parameter):
                grads |= join_shards(rule, [parameter.grad], geometry=geometry)
    other = other_model(root / name)
    unforced = other(family_models.make_tokens(*SIZE)).logits.detach()
    num_routers = 0
    for number, layer in enumerate(other.model.layers):
        block = getattr(layer, "mlp", None) or layer.block_sparse_moe
        if hasattr(block, "gate"):
            layer_ids = ids[:, :, number].flatten(0, 1).long()
            block.gate = GivenRouter(block.gate, other.config, layer_ids)
            num_routers += 1
    assert num_routers == len(routing.replay_of(model).routers) > 0
    wanted = other(family_models.make_tokens(*SIZE)).logits
    assert (wanted - unforced).abs().max() > 0.1 * wanted.abs().max()  # the experts do matter
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    (wanted * weights).sum().backward()
    expected = {k.replace("gate.gate.", "gate."): p for k, p in other.named_parameters()}
    compared = 0
    for key, grad in grads.items():
        for file_name, name_there in MIXTRAL_NAMES.items():
            key = key.replace(file_name, name_there)
        same = family_models.transformers_part(expected, key)
        if same.grad is None:
            assert not grad.any(), key
            continue
        assert (grad - same.grad).abs().max() < 1e-4 * max(1e-3, same.grad.abs().max()), key
        compared += same.grad.abs().max() > 1e-3
    assert compared > 0.8 * len(grads)


def test_models_of_one_process_do_not_disturb_each_other(root):
    folder = root / "qwen3-moe"
    with alone():
        from megatron.core.transformer.moe.router_replay import RouterReplay

        from slurm_rl.train import routing

        geometry, _, plain = family_models.build_from(folder)
        models = [family_models.build_from(folder)[2] for _ in range(2)]
        for model in models:
            routing.install(model)
        ids = [made_up_ids(geometry, seed) for seed in (1, 2)]
        with torch.no_grad():
            before = logits_of(plain)
            for model, own in zip(models, ids, strict=True):
                shown(model, own)
            first, second, after = map(logits_of, (*models, plain))
            shown(models[1], ids[0])
            assert torch.equal(logits_of(models[1]), first)
            assert torch.equal(logits_of(models[0]), first)
        assert torch.equal(before, after)
        assert not torch.equal(first, second) and not torch.equal(first, before)
        assert not RouterReplay.global_router_replay_instances


def test_an_aborted_pass_leaves_nothing_to_the_next(root):
    """Recomputed: what waits for a backward pass that never came."""
    with alone():
        from slurm_rl.train import routing

        folder = root / "qwen3-moe"
        geometry, _, model = family_models.build_from(folder, **FULL)
        routing.install(model.train())
        replay = routing.replay_of(model)
        ids = [made_up_ids(geometry, seed) for seed in (1, 2)]

        def gradient(*, aborted):
            model.zero_grad()
            if aborted:
                shown(model, ids[0], is_training=True)
                logits_of(model)
                assert all(len(router.waiting) == 1 for router in replay.routers)
            shown(model, ids[1], is_training=True)
            loss = logits_of(model).square().sum()
            replay.show(ids[0], None)  # another micro-batch went forward by then
            loss.backward()
            assert not any(router.waiting for router in replay.routers)
            return [p.grad.clone() for p in model.parameters()]

        assert all(map(torch.equal, gradient(aborted=False), gradient(aborted=True)))


def open_one(tmp_path, made_models, open_trainers, name, *, settings, samples):
    order = trains.train_order(tmp_path, made_models(settings), name)
    trainer = open_trainers(order, settings)
    metrics = trainer.step(trains.work(samples))
    return trainer, {k: v for k, v in metrics.items() if "perf/" not in k}


def switched(settings, value):
    rollout = settings.rollout.model_copy(update={"use_rollout_routing_replay": value})
    return settings.model_copy(update={"rollout": rollout})


def test_a_closed_trainer_is_freed(tmp_path, made_models, open_trainers):
    megatron = replay_settings(tmp_path).train.megatron | FULL
    settings = replay_settings(tmp_path, megatron=megatron)
    samples = trains.made_up_routing(trains.made_up_samples(0), layers=4, num=4, top_k=2)
    trainer, _ = open_one(
        tmp_path, made_models, open_trainers, "a", settings=settings, samples=samples
    )
    from slurm_rl.train import routing

    found = [weakref.ref(trainer.model), weakref.ref(routing.replay_of(trainer.model).routers[0])]
    open_trainers.close()
    del trainer
    gc.collect()
    gc.collect()  # routers, where activations are recomputed
    assert [ref() for ref in found] == [None, None]


def test_ids_are_ignored_where_they_are_not_asked_for(tmp_path, made_models, open_trainers):
    settings = switched(replay_settings(tmp_path), False)
    samples = trains.made_up_samples(0)
    routed = trains.made_up_routing(samples, layers=4, num=4, top_k=2)
    found = [
        open_one(tmp_path, made_models, open_trainers, name, settings=settings, samples=given)[1]
        for name, given in (("a", samples), ("b", routed))
    ]
    assert found[0] == found[1]
    assert SHAPE["mlp_only_layers"] == [0]
