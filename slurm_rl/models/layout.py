"""How a model is laid out over the ranks of its job: the sizes that Megatron's groups have.

Pure, and imports neither torch nor Megatron: it is read on login nodes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurm_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes. What is left of the ranks is data-parallel.

    experts: ranks that a layer's experts are shared out to; they are taken from those of the other
    axes, so that they need none of their own. expert_tensor: ranks that each expert is cut over,
    `tensor` if None. chunks: parts of the model on each pipeline rank (interleaving).

    Example: Layout(tensor=2, pipeline=2, chunks=2).
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    experts: int = 1
    expert_tensor: int | None = None
    chunks: int = 1

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_size(self) -> int:
        """Ranks that hold one copy of all experts."""
        return (self.expert_tensor or self.tensor) * self.experts * self.pipeline


def read_layout_sizes(megatron: Mapping[str, Any]) -> Layout:
    """The layout that `train.megatron`, or another role's, asks for."""

    def size(name: str) -> int:
        return int(megatron.get(name) or 1)

    own = megatron.get("expert_tensor_parallel_size")
    return Layout(
        tensor=size("tensor_model_parallel_size"),
        pipeline=size("pipeline_model_parallel_size"),
        context=size("context_parallel_size"),
        experts=size("expert_model_parallel_size"),
        expert_tensor=None if own is None else int(own),
        chunks=size("virtual_pipeline_model_parallel_size"),
    )


def check_ranks(layout: Layout, *, num_ranks: int) -> None:
    """ConfigError unless the ranks can be laid out so."""
    if num_ranks % layout.model_size:
        raise ConfigError(
            f"{num_ranks} ranks cannot be split into tensor_model_parallel_size {layout.tensor} × "
            f"pipeline_model_parallel_size {layout.pipeline} × "
            f"context_parallel_size {layout.context}",
            hint="their product must divide the ranks",
        )
    if num_ranks % layout.expert_size:
        raise ConfigError(
            f"{num_ranks} ranks cannot be split into expert_tensor_parallel_size "
            f"{layout.expert_tensor or layout.tensor} × expert_model_parallel_size "
            f"{layout.experts} × pipeline_model_parallel_size {layout.pipeline}",
            hint="their product must divide the ranks; expert_tensor_parallel_size is "
            "tensor_model_parallel_size unless it is set",
        )
    if layout.chunks > 1 and layout.pipeline == 1:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size = {layout.chunks} has no effect with "
            "pipeline_model_parallel_size = 1",
            hint="raise that, or take it out",
        )
