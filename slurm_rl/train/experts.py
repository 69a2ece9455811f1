"""What lets Megatron-core 0.16.1 run mixtures of experts without TransformerEngine.

Owns two corrections of its modules, made once, before a model with experts is built:

    moe_utils.te_general_gemm                  is asked for None, but is not there (NameError)
    token_dispatcher.maybe_move_tensor_to_cpu  leaves counts that are on the CPU as tensors, where
                                               the exchange of tokens wants lists
"""

from __future__ import annotations

from typing import Any

import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import torch


def install() -> None:
    """Make the corrections; more than once is no harm."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if token_dispatcher.maybe_move_tensor_to_cpu is moe_utils.maybe_move_tensor_to_cpu:
        token_dispatcher.maybe_move_tensor_to_cpu = _as_asked


def forget_pass(model: Any) -> None:
    """Drop what dispatchers keep of their last pass: the graph of its tensors leads back to the
    model by nodes of autograd, which no collector sees."""
    for module in model.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if dispatcher is not None:
            for name, value in vars(dispatcher).items():
                if torch.is_tensor(value) and value.grad_fn is not None:
                    setattr(dispatcher, name, None)


def _as_asked(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
        return tensor.numpy()
    return moe_utils.maybe_move_tensor_to_cpu(tensor, as_numpy, record_stream)
