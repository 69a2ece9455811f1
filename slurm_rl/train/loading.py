"""A rank's parameters and the Hugging Face tensors that they are made of.

`load_weights` fills every parameter of this rank or raises; it reads only what the rank holds. The
rules are `families.py`'s, the files `weights.py`'s.
"""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from slurm_rl.errors import ModelError
from slurm_rl.train.families import Rule, check_tensors, list_rules, read_shard
from slurm_rl.train.geometry import Geometry
from slurm_rl.train.weights import WeightsLayout, WeightsReader


def local_rules(geometry: Geometry, model: GPTModel) -> list[tuple[Rule, torch.nn.Parameter]]:
    """The rules whose parameters this rank holds, in the model's order.

    With tied embeddings the last pipeline rank holds the embedding too, as `output_layer`.
    """
    offset = model.decoder.layers[0].layer_number - 1
    parameters = dict(model.named_parameters())
    found = []
    for rule in list_rules(geometry):
        name = rule.local_name(offset)
        if rule.hf == ("model.embed_tokens.weight",) and name not in parameters and geometry.tied:
            name = "output_layer.weight"
        mine = rule.layer is None or 0 <= rule.layer - offset < len(model.decoder.layers)
        if mine and name in parameters:
            found.append((rule, parameters.pop(name)))
    assert not parameters, f"no rule for {sorted(parameters)}"
    return found


@torch.no_grad()
def load_weights(
    model: GPTModel, *, geometry: Geometry, folder: Path, layout: WeightsLayout
) -> None:
    """Fill every parameter of this rank from the Hugging Face files; other ranks do theirs.

    Reads only the slices that this rank needs. Raises ModelError if a tensor is missing, has
    another shape, or if the files hold one that the model does not have.
    """
    check_tensors(geometry, folder=folder, layout=layout)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    with WeightsReader(folder, layout) as reader:
        for rule, parameter in local_rules(geometry, model):
            shard = read_shard(
                rule, reader.read, geometry=geometry, tp_rank=tp_rank, tp_size=tp_size
            )
            if shard.shape != parameter.shape:
                raise ModelError(
                    f"{folder}: {', '.join(rule.hf)} give a shard of {tuple(shard.shape)}, but "
                    f"config.json makes it {tuple(parameter.shape)}"
                )
            parameter.copy_(shard)


def mark_split_parameters(model: GPTModel, geometry: Geometry) -> None:
    """Tell Megatron which parameters are split over tensor ranks.

    It marks them while it initialises them, which we skip. Without the marks the norm of the
    gradient would count only tensor rank 0's part, and clipping would differ by layout.
    """
    for rule, parameter in local_rules(geometry, model):
        if rule.kind != "whole" and not hasattr(parameter, "tensor_model_parallel"):
            axis = 1 if rule.kind == "columns" else 0
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)
