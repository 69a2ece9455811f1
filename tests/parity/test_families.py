"""Each family in Megatron gives transformers' logits, and exports the bytes that it was made of."""

import functools

import family_models
import pytest
import torch

from slurm_rl.train.solo import alone


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    for name in family_models.MODELS:
        family_models.make_model(name, root / name)
    return root


@functools.cache
def transformers_logits(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(family_models.make_tokens()).logits


def assert_same_files(found, expected):
    assert {p.name for p in found.iterdir()} == {p.name for p in expected.iterdir()}
    for path in expected.iterdir():
        assert (found / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("name", family_models.MODELS)
def test_logits_and_bytes(root, tmp_path, name):
    tokens = family_models.make_tokens()
    expected = transformers_logits(root / name)
    assert expected.std() > 0.5  # logits that say something
    with alone():
        from slurm_rl.train.export import export_weights, read_companions

        geometry, layout, model = family_models.build_from(root / name)
        found = family_models.forward(model, tokens)[..., : geometry.vocab_size]
        companions = read_companions(root / name)
        out = tmp_path / "out"
        export_weights(out, model=model, geometry=geometry, layout=layout, companions=companions)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert_same_files(out, root / name)


@pytest.mark.parametrize("name", ["llama", "qwen2-moe", "glm4", "deepseek"])
def test_gradients_are_those_of_transformers(root, name):
    """Of every parameter, experts and routers too, by the names of the table."""
    from transformers import AutoModelForCausalLM

    tokens = family_models.make_tokens()
    weights = torch.linspace(-1, 1, 3 * 40 * 100).reshape(3, 40, 100)
    other = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32).eval()
    (other(tokens).logits * weights).sum().backward()
    expected = dict(other.named_parameters())
    with alone():
        from slurm_rl.train.loading import local_rules
        from slurm_rl.train.shards import join_shards

        geometry, _, model = family_models.build_from(root / name)
        logits = model(tokens, torch.arange(40).expand(3, -1), None)[..., :100]
        (logits * weights).sum().backward()
        found = {}
        for rule, parameter in local_rules(geometry, model):
            if isinstance(parameter, torch.nn.Parameter):
                found |= join_shards(rule, [parameter.grad], geometry=geometry)
    compared = 0
    for key, grad in found.items():
        same = family_models.transformers_part(expected, key)
        assert (grad - same.grad).abs().max() < 1e-4 * max(1e-3, same.grad.abs().max()), key
        compared += same.grad.abs().max() > 1e-3
    assert compared > 0.9 * len(found)


@pytest.fixture(scope="module")
def exported(root):
    """`root`, with every layout of two ranks exported; the ranks are started once for all."""
    family_models.run_ranks(family_models.export_in_ranks, root)
    return root


@pytest.mark.parametrize("layout", family_models.LAYOUTS)
def test_each_layout_exports_the_bytes_that_it_read(exported, layout):
    for name in family_models.names_of(layout):
        assert_same_files(exported / layout / name, exported / name)


@pytest.mark.parametrize("layout", ["tensor", "experts", "tensor-experts"])
def test_layouts_without_a_pipeline_give_the_same_logits(exported, layout):
    for name in family_models.names_of(layout):
        expected = transformers_logits(exported / name)
        found = torch.load(exported / layout / f"{name}.pt")
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max(), name


def test_a_routers_bias_keeps_its_float32_in_a_bfloat16_model(tmp_path):
    """Megatron's bf16 wrapper rounds it, which would choose other experts for some tokens."""
    source = family_models.make_model("deepseek", tmp_path / "source", dtype=torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    with alone():
        from slurm_rl.train.export import export_weights, read_companions
        from slurm_rl.train.loading import load_weights
        from slurm_rl.train.model import wrap_model
        from slurm_rl.train.options import split_megatron

        geometry, layout, model = family_models.build_from(source)
        assert layout.dtypes[name] == torch.float32
        wrap_model(model, split_megatron({"lr": 1.0}))
        load_weights(model, geometry=geometry, folder=source, layout=layout)
        assert next(model.parameters()).dtype == torch.bfloat16
        with torch.no_grad():
            model(family_models.make_tokens(), torch.arange(40).expand(3, -1), None)
        out, companions = tmp_path / "out", read_companions(source)
        export_weights(out, model=model, geometry=geometry, layout=layout, companions=companions)
    assert_same_files(out, source)


@pytest.mark.parametrize("order", [1, -1])
def test_files_are_gathered_one_after_the_other(order):
    """Whatever order their makers had: rank 0 holds one, and what is cut by the next one's start."""
    with alone():
        from slurm_rl.models.geometry import parse_model_config
        from slurm_rl.models.tensors import hf_shapes, list_rules
        from slurm_rl.train.export import _by_file
        from slurm_rl.train.weights import plan_layout

    fields = family_models._BASE | family_models.MODELS["qwen3-moe"]
    geometry = parse_model_config(fields, where="x")
    # Files by names: layer 1's experts 10 and 2 apart, all norms together.
    names = sorted(hf_shapes(geometry), key=lambda name: (name.split(".")[-2], name))[::order]
    shapes = {name: hf_shapes(geometry)[name] for name in names}
    layout = plan_layout(shapes, dict.fromkeys(shapes, torch.float32), file_size_bytes=9000)
    left = {name: set(members) for name, members in layout.files.items()}
    home = {tensor: name for name, members in layout.files.items() for tensor in members}
    rules = list(list_rules(geometry))

    def most_open(rules):
        waiting = {name: set(members) for name, members in left.items()}
        most = 0
        for rule in rules:
            for tensor in rule.hf:
                waiting[home[tensor]].discard(tensor)
            begun = [n for n, rest in waiting.items() if rest and rest != left[n]]
            most = max(most, len(begun))
        return most

    assert sorted(_by_file(rules, layout), key=str) == sorted(rules, key=str)
    assert len(layout.files) > 6
    assert most_open(_by_file(rules, layout)) < most_open(rules)
