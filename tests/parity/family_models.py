"""A tiny model of each family, with every feature that its entry names; no pytest.

Norms, biases and buffers are random: fresh ones, of ones and zeros, would hide a wrong mapping.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trains

_BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

#: Every model that is compared with transformers, in one process.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": _LLAMA3},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3-moe": _QWEN3_MOE | {"norm_topk_prob": True, "mlp_only_layers": [0]},
    "qwen3-moe-plain": _QWEN3_MOE | {"norm_topk_prob": False, "decoder_sparse_step": 2},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "glm4": {"model_type": "glm4", "head_dim": 8},
    "glm4-plain": {"model_type": "glm4", "head_dim": 16, "attention_bias": False},
    "glm4-moe": {
        "model_type": "glm4_moe",
        "head_dim": 16,
        "use_qk_norm": True,
        "attention_bias": True,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "routed_scaling_factor": 1.5,
        "num_nextn_predict_layers": 0,
    },
    "deepseek": _DEEPSEEK,
    "deepseek-yarn": _DEEPSEEK
    | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": _YARN},
}


def make_model(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """The model `name` as transformers saves it, in `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = _BASE | MODELS[name]
    config = AutoConfig.for_model(**fields, dtype=dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)  # routers too, as on the hub
        with torch.no_grad():
            for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.dim() == 1 and not key.endswith("inv_freq"):
                    tensor += (torch.randn(tensor.shape) * 0.3).to(tensor.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder


def make_tokens(num: int = 3, length: int = 40) -> torch.Tensor:
    # No padding token: transformers gives its embedding no gradient.
    return torch.randint(1, 100, (num, length), generator=torch.Generator().manual_seed(0))


def build_from(folder: Path, **megatron: Any) -> tuple[Any, Any, Any]:
    """Geometry, layout and this rank's part of the model in `folder`, loaded."""
    from slurm_rl.models.geometry import read_geometry
    from slurm_rl.train.loading import load_weights
    from slurm_rl.train.model import build_model, model_config
    from slurm_rl.train.options import split_megatron
    from slurm_rl.train.weights import read_layout

    geometry, layout = read_geometry(folder), read_layout(folder)
    options = split_megatron({"lr": 1.0} | megatron)
    model = build_model(geometry, model_config(geometry, options, deterministic=False))
    load_weights(model, geometry=geometry, folder=folder, layout=layout)
    model.eval()
    return geometry, layout, model


def forward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What the model gives for each token [b, s, …], without gradient."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        return model(tokens, positions, None)


def run_ranks(target: Callable[..., None], root: Path, *arguments: Any) -> None:
    """`target(rank, 2, log, root, *arguments)` in two processes; AssertionError with what they
    wrote if one fails."""
    logs = [root / f"rank-{rank}.log" for rank in (0, 1)]
    start = trains.RANKS.Process
    ranks = [start(target=target, args=(r, 2, logs[r], root, *arguments)) for r in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=100)
        rank.kill()  # one that still runs: its exit code says so
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0], "\n".join(log.read_text() for log in logs)


#: Layouts of two ranks: what Megatron's groups get, and what `train.megatron` says besides.
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tensor": ({"tensor_model_parallel_size": 2}, {"sequence_parallel": True}),
    "pipeline": ({"pipeline_model_parallel_size": 2}, {}),
    "chunks": (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {},
    ),
    "experts": ({"expert_model_parallel_size": 2}, {}),
    "tensor-experts": (
        {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
        {"sequence_parallel": True},
    ),
}


#: What is laid out over ranks: each kind of rule, and tied embeddings.
IN_RANKS = ("qwen3", "qwen2-moe", "qwen3-moe", "glm4", "deepseek")


def names_of(layout: str) -> list[str]:
    """The models that are laid out so."""
    return [name for name in IN_RANKS if "experts" not in layout or has_experts(name)]


def has_experts(name: str) -> bool:
    return any("experts" in key for key in MODELS[name])


def export_in_ranks(rank: int, num: int, log: Path, root: Path) -> None:
    """A process of its own, one of `num` that meet in a file: in each layout load each model
    `root/<model>` and export it as `root/<layout>/<model>`; where there is no pipeline write its
    logits beside, as `<model>.pt`."""
    with log.open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    from slurm_rl.train import cpu

    with cpu.megatron_imports():
        import torch.distributed as dist
        from megatron.core import parallel_state

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with warnings.catch_warnings(), cpu.stand_ins():
        warnings.simplefilter("ignore")
        store = dist.FileStore(str(root / f"meeting-{num}"), num)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num)
        for name, (sizes, others) in LAYOUTS.items():
            parallel_state.initialize_model_parallel(**sizes)
            (root / name).mkdir(exist_ok=True)
            for model in names_of(name):
                _export_one(root, name, model, sizes | others)
            parallel_state.destroy_model_parallel()
    print("done", flush=True)
    os._exit(0)


def _export_one(root: Path, layout_name: str, name: str, megatron: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    from slurm_rl.train import rng
    from slurm_rl.train.export import export_weights, read_companions

    rng.restore(rng.seeded_state(0))  # sequence parallelism asks for it, and draws nothing
    geometry, layout, model = build_from(root / name, **megatron)
    export_weights(
        root / layout_name / name,
        model=model,
        geometry=geometry,
        layout=layout,
        companions=read_companions(root / name),
    )
    if "pipeline_model_parallel_size" not in megatron:
        logits = gather_from_tensor_model_parallel_region(forward(model, make_tokens()))
        if torch.distributed.get_rank() == 0:
            torch.save(logits[..., : geometry.vocab_size], root / layout_name / f"{name}.pt")


def enlarge_head(folder: Path) -> None:
    """Give a critic's head numbers that show."""
    from safetensors.torch import load_file, save_file

    path = max(folder.glob("model-*.safetensors"))
    head = load_file(path)
    head = {"score.weight": head["score.weight"] * 20, "score.bias": head["score.bias"] + 0.7}
    save_file(head, path, metadata={"format": "pt"})


def value_gradients(folder: Path, **megatron: Any) -> dict[str, torch.Tensor]:
    """Values of a critic, and the gradients of a loss of them, of whole parameters only."""
    from slurm_rl.train import rng

    rng.restore(rng.seeded_state(0))
    _, _, model = build_from(folder, **megatron)
    tokens = make_tokens()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    values = model(tokens, positions, None)
    loss = (values * torch.linspace(-1, 1, values.numel()).reshape(values.shape)).pow(2).sum()
    loss.backward()
    grads = {
        "head": model.output_layer.weight.grad,
        "bias": model.output_layer.bias.grad,
        "norm": model.decoder.final_layernorm.weight.grad,
        "first": model.decoder.layers[0].input_layernorm.weight.grad,
    }
    if megatron.get("sequence_parallel"):  # Megatron sums these when it finishes the gradients
        for name in ("norm", "first"):
            torch.distributed.all_reduce(grads[name])
    return {"values": values.detach(), **grads}


def value_gradients_in_ranks(rank: int, num: int, log: Path, root: Path, models: list[str]) -> None:
    """A process of its own: `value_gradients` of critics over tensor ranks, written down."""
    with log.open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    from slurm_rl.train import cpu

    with cpu.megatron_imports():
        import torch.distributed as dist
        from megatron.core import parallel_state

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sizes: dict[str, Any] = {"tensor_model_parallel_size": num}
    with warnings.catch_warnings(), cpu.stand_ins():
        warnings.simplefilter("ignore")
        store = dist.FileStore(str(root / f"meeting-{num}"), num)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num)
        parallel_state.initialize_model_parallel(**sizes)
        for name in models:
            for kind in ("plain", "sequence"):
                found = value_gradients(
                    root / name, **sizes, **({"sequence_parallel": True} if kind != "plain" else {})
                )
                torch.save(found, root / f"{name}-{kind}-{rank}.pt")
    os._exit(0)


def transformers_part(parameters: dict[str, Any], key: str) -> Any:
    """The parameter that transformers has for a tensor of a file, with its gradient; of experts,
    which it keeps in one tensor, the expert's part."""
    if key in parameters:
        return parameters[key]
    before, _, after = key.partition(".experts.")
    expert, name, _ = after.split(".")
    fused = "down_proj" if name == "down_proj" else "gate_up_proj"
    grad = parameters[f"{before}.experts.{fused}"].grad[int(expert)]
    half = grad.shape[0] // 2
    parts = {"down_proj": grad, "gate_proj": grad[:half], "up_proj": grad[half:]}
    part = torch.nn.Parameter(torch.zeros_like(parts[name]))
    part.grad = parts[name]
    return part
