"""Adam in the form that Megatron's distributed optimizer can save and load.

Megatron-core 0.16 expects TransformerEngine's or Apex's FusedAdam: moments in the state, the
step in the parameter group. With torch's own AdamW its checkpoint cannot be resumed (an
assertion, then `KeyError: 'step'`). Without TE and Apex, `install` puts this class, which
keeps its state as FusedAdam does and computes with torch's fused kernel, in their place.
"""

from __future__ import annotations

from typing import Any

import megatron.core.optimizer as megatron_optimizer
import megatron.core.optimizer.distrib_optimizer as distributed_optimizer
import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class PlainFusedAdam(torch.optim.Optimizer):
    """AdamW (or Adam with L2) with `step` in the parameter group, on CPU and GPU.

    Source: arXiv 1412.6980; decoupled decay arXiv 1711.05101.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self._update = adamw if adam_w_mode else adam

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params)

    def _step_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        # The kernel adds 1 to each; the step tensors must be on the parameters' device.
        before = float(group["step"] - 1)
        self._update(
            params,
            [p.grad for p in params if p.grad is not None],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [torch.tensor(before, device=p.device) for p in params],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def install() -> None:
    """Use `PlainFusedAdam` where neither TransformerEngine nor Apex is installed."""
    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    megatron_optimizer.Adam = PlainFusedAdam
    distributed_optimizer.Adam = PlainFusedAdam
    distributed_optimizer.HAVE_APEX_OR_TE = True
    distributed_optimizer.USING_APEX_OPTIMIZER = True
