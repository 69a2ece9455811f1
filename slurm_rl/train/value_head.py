"""A critic: Megatron's GPT model with one number a token in place of logits.

Owns the head and its place in checkpoints. Each tensor-parallel rank has the whole head, and
computes the same values. Parameters are zeros until they are loaded; nothing here draws a head
(`stages/critic_model.py` does, once).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from slurm_rl.train.rows import RowsModel


class ValueHead(torch.nn.Module):
    """`weight` [1, hidden] and `bias` [1]; values float32 [s, b, 1], in float32 whatever the model.

    Called as Megatron calls its output layer.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        kind = {"dtype": config.params_dtype, "device": device}
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **kind))
        self.bias = torch.nn.Parameter(torch.zeros(1, **kind))
        self.sequence_parallel = bool(config.sequence_parallel)

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """input_ [s, b, hidden]; under sequence parallelism this rank's part of the sequence."""
        assert weight is None, "a value head shares no weight with the embedding"
        if self.sequence_parallel:
            # Every rank computes the same loss: the gradient is to be cut, not summed.
            input_ = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False)
        values = functional.linear(input_.float(), self.weight.float(), self.bias.float())
        return values, None


class ValueModel(RowsModel):
    """RowsModel with a ValueHead as `output_layer`, on the last pipeline rank."""

    def __init__(self, **arguments: Any) -> None:
        assert not arguments["share_embeddings_and_output_weights"]
        super().__init__(**arguments)
        if self.post_process:
            self.output_layer = ValueHead(self.config)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Megatron's, but a checkpoint with a head of another shape does not fit.

        Megatron lets the output layer differ, for paddings of the vocabulary: of a language
        model's checkpoint the head would be the first row of the logits'.
        """
        sharded: dict[str, Any] = super().sharded_state_dict(*args, **kwargs)
        for key, tensor in sharded.items():
            if key.endswith(("output_layer.weight", "output_layer.bias")):
                tensor.allow_shape_mismatch = False
        return sharded
