"""The parts of a model that one rank of an interleaved pipeline holds, asked as one.

A rank of any other layout holds one model, which is Megatron's own object. Under
`virtual_pipeline_model_parallel_size` it holds several chunks, in the order of their layers; this
list answers what the trainer asks of a model, so that only Megatron's schedule, its optimizer and
the checkpoint see them one by one.
"""

from __future__ import annotations

from typing import Any


class Chunks(list[Any]):
    """Model chunks of one rank, wrapped or not."""

    @property
    def config(self) -> Any:
        """Megatron's configuration, one for all."""
        return self[0].config

    @property
    def ddp_config(self) -> Any:
        """How gradients are reduced, the same for all."""
        return self[0].ddp_config

    @property
    def training(self) -> bool:
        return bool(self[0].training)

    def train(self, mode: bool = True) -> None:
        for chunk in self:
            chunk.train(mode)

    def eval(self) -> None:
        self.train(False)

    def zero_grad_buffer(self) -> None:
        for chunk in self:
            chunk.zero_grad_buffer()

    def start_param_sync(self, **options: Any) -> None:
        for chunk in self:
            chunk.start_param_sync(**options)

    def parameters(self) -> Any:
        """Of every chunk, in order."""
        return (parameter for chunk in self for parameter in chunk.parameters())


def model_chunks(model: Any) -> list[Any]:
    """The chunks of a rank: those of `Chunks`, or the one model."""
    return list(model) if isinstance(model, Chunks) else [model]
