"""A rank's parameters and the Hugging Face tensors that they are made of.

`load_weights` fills every parameter of this rank or raises; it reads only what the rank holds. The
rules are `models/tensors.py`'s, the files `weights.py`'s. Which layers and experts a rank holds is
asked of its modules, so that any pipeline and any number of model chunks will do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from slurm_rl.errors import ModelError
from slurm_rl.models.geometry import Geometry
from slurm_rl.models.tensors import Rule, check_tensors, list_rules
from slurm_rl.train.chunks import model_chunks
from slurm_rl.train.shards import read_shard
from slurm_rl.train.weights import WeightsLayout, WeightsReader

#: A GPTModel, not wrapped, or this rank's `Chunks` of one in interleaved pipelines.
Model = Any
#: Buffers that are weights: they are in the files, and training may leave them as they are.
_WEIGHT_BUFFERS = ("expert_bias",)


def local_rules(geometry: Geometry, model: Model) -> list[tuple[Rule, torch.Tensor]]:
    """The rules whose parameters this rank holds, with these, in the rules' order.

    With tied embeddings the last pipeline rank holds the embedding too, as `output_layer`.
    """
    return [pair for chunk in model_chunks(model) for pair in _chunk_rules(geometry, chunk)]


def _chunk_rules(geometry: Geometry, model: GPTModel) -> list[tuple[Rule, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors |= {n: b for n, b in model.named_buffers() if n.endswith(_WEIGHT_BUFFERS)}
    layers = {layer.layer_number - 1: i for i, layer in enumerate(model.decoder.layers)}
    experts = {
        number: [int(e) for e in getattr(model.decoder.layers[i].mlp, "local_expert_indices", ())]
        for number, i in layers.items()
    }
    found = []
    for rule in list_rules(geometry):
        names: tuple[str, ...]
        if rule.layer is None:
            names = rule.local_names()
        elif rule.layer not in layers:
            continue
        elif rule.expert is None:
            names = rule.local_names(layers[rule.layer])
        elif rule.expert in experts[rule.layer]:
            names = rule.local_names(layers[rule.layer], experts[rule.layer].index(rule.expert))
        else:
            continue
        if geometry.tied and rule.megatron.startswith("embedding."):
            names = (*names, "output_layer.weight")
        held = next((name for name in names if name in tensors), None)
        if held is not None:
            found.append((rule, tensors.pop(held)))
    assert not tensors, f"no rule for {sorted(tensors)}"
    return found


def tensor_place(rule: Rule) -> tuple[int, int]:
    """This rank among those that a parameter is split over, and their number."""
    if rule.expert is not None:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


@torch.no_grad()
def load_weights(model: Model, *, geometry: Geometry, folder: Path, layout: WeightsLayout) -> None:
    """Fill every parameter of this rank from the Hugging Face files; other ranks do theirs.

    Reads only the slices that this rank needs. Raises ModelError if a tensor is missing, has
    another shape, or if the files hold one that the model does not have.
    """
    check_tensors(geometry, folder=folder, shapes=layout.shapes)
    with WeightsReader(folder, layout) as reader:
        for rule, parameter in local_rules(geometry, model):
            rank, size = tensor_place(rule)
            shard = read_shard(rule, reader.read, geometry=geometry, tp_rank=rank, tp_size=size)
            if shard.shape != parameter.shape:
                raise ModelError(
                    f"{folder}: {', '.join(rule.hf)} give a shard of {tuple(shard.shape)}, but "
                    f"the layout makes it {tuple(parameter.shape)}"
                )
            parameter.copy_(shard)


def mark_split_parameters(model: Model, geometry: Geometry) -> None:
    """Tell Megatron which parameters are split over tensor ranks.

    It marks them while it initialises them, which we skip. Without the marks the norm of the
    gradient would count only tensor rank 0's part, and clipping would differ by layout.
    """
    for rule, parameter in local_rules(geometry, model):
        if rule.kind != "whole" and not hasattr(parameter, "tensor_model_parallel"):
            axis = 1 if rule.kind == "columns" else 0
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)
