"""Megatron's GPT model, asked for its output at some tokens only.

Nobody reads the logits of a prompt. The hidden states of the tokens that count are taken out before
the output layer, the largest product of a small model, and what is as large as the vocabulary is
made for them alone.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


class RowsModel(GPTModel):
    """GPTModel with one more argument, `rows_n`.

    int64 [n]: tokens of the flattened [b, s] input; the output is then [1, n, …], on the last
    pipeline rank. None: of all tokens, as Megatron's.
    """

    _rows_n: torch.Tensor | None = None

    def forward(self, *inputs: Any, rows_n: torch.Tensor | None = None, **more: Any) -> Any:
        self._rows_n = rows_n
        try:
            return super().forward(*inputs, **more)
        finally:
            self._rows_n = None

    def _postprocess(self, hidden_states: torch.Tensor, *inputs: Any, **more: Any) -> Any:
        """hidden_states [s, b, h]; under sequence parallelism this rank's part of them."""
        if self._rows_n is None or not self.post_process:
            return super()._postprocess(hidden_states, *inputs, **more)
        is_split = self.config.sequence_parallel
        if is_split:
            # The output layer sums the gradients of the ranks' columns; here it is but cut again.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        length, num = hidden_states.shape[:2]
        places_n = self._rows_n % length * num + self._rows_n // length
        chosen = hidden_states.flatten(0, 1).index_select(0, places_n).unsqueeze(1)
        self.output_layer.sequence_parallel = False
        try:
            return super()._postprocess(chosen, *inputs, **more)
        finally:
            self.output_layer.sequence_parallel = is_split
