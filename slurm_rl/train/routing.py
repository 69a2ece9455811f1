"""Routing replay: each token goes to the experts that the engine sent it to, in every pass.

Owns which rows of a rollout's `routed_experts` a router gets, and when. The choice is the engine's;
the probabilities, and so the gradient, are the router's own. Megatron-core has a class of this
name, which keeps a list for the whole process; here the ids belong to one model, and to the
micro-batch that passes through it.

A layer whose activations are recomputed runs twice: first without gradients, and again, with them,
in the backward pass of the same micro-batch. By then other micro-batches may have gone forward, but
the backward passes come in the order of the forward ones, in each layer. So each router keeps the
ids of first runs in a queue. Fine for what is not recomputed, too: that runs once, with gradients,
and finds its queue empty.

Legend: T tokens of a rollout, [b, S] those of a micro-batch, t those of this rank in a router's
order, L all layers of the model, K experts of each token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from numpy.typing import NDArray

from slurm_rl.errors import DataError
from slurm_rl.models.geometry import Geometry
from slurm_rl.train.chunks import model_chunks


class Replay:
    """The ids of the micro-batch that goes forward now; one for a model. It may be on though this
    rank has no routers: all ranks check and cut alike."""

    def __init__(self) -> None:
        self.rows_tLK: torch.Tensor | None = None
        self.is_on = False
        self.is_training = False
        self.routers: list[RouterReplay] = []

    def begin(self, *, is_training: bool) -> None:
        """A pass over micro-batches begins; what an aborted one left is dropped."""
        self.rows_tLK, self.is_training = None, is_training
        for router in self.routers:
            router.waiting.clear()

    def show(self, routed_bSLK: torch.Tensor | None, places_s: torch.Tensor | None) -> None:
        """The next micro-batch goes forward. places_s: this context rank's tokens of a row, None
        for all. None for the ids: routers choose by themselves."""
        self.rows_tLK = None
        if routed_bSLK is None or not self.is_on:
            return
        if places_s is not None:
            routed_bSLK = routed_bSLK.index_select(1, places_s)
        rows_sbLK = routed_bSLK.transpose(0, 1)
        size = parallel_state.get_tensor_model_parallel_world_size()
        if size > 1:  # with experts always under sequence parallelism
            rows_sbLK = rows_sbLK.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
        self.rows_tLK = rows_sbLK.flatten(0, 1)


class RouterReplay:
    """What a router asks for its experts; in the place of Megatron's class of this name."""

    def __init__(self, replay: Replay, *, layer: int) -> None:
        """layer: of the whole model, from 0."""
        self._replay = replay
        self._layer = layer
        self.waiting: deque[torch.Tensor] = deque()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and ids of the experts, [t, K] each, of scores [t, experts]."""
        ids_tK = self._next_ids()
        if ids_tK is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        assert ids_tK.shape == (len(scores), topk), (ids_tK.shape, scores.shape, topk)
        return scores.gather(1, ids_tK), ids_tK

    def _next_ids(self) -> torch.Tensor | None:
        replay = self._replay
        if self.waiting and torch.is_grad_enabled():
            return self.waiting.popleft()
        if replay.rows_tLK is None:
            return None
        ids_tK = replay.rows_tLK[:, self._layer].long()
        if replay.is_training and not torch.is_grad_enabled():
            self.waiting.append(ids_tK)
        return ids_tK


def install(model: Any) -> None:
    """Have the routers of `model`, unwrapped, take their experts from its `Replay`."""
    replay = Replay()
    replay.is_on = True
    for chunk in model_chunks(model):
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                router = RouterReplay(replay, layer=int(module.layer_number) - 1)
                module.router_replay = router
                replay.routers.append(router)
    setattr(model_chunks(model)[0].config, "routing_replay", replay)  # noqa: B010


def replay_of(model: Any) -> Replay:
    """What `install` gave a model, wrapped or not; one that is off for any other."""
    found: Replay = getattr(model_chunks(model)[0].config, "routing_replay", _NONE)
    return found


_NONE = Replay()


def check_routed(routed_TLK: NDArray[np.uint8] | None, geometry: Geometry) -> None:
    """DataError unless the ids are there and fit the model."""
    moe = geometry.moe
    wrong = "the rollout cannot be trained on with rollout.use_rollout_routing_replay"
    if moe is None:
        raise DataError(f"{wrong}: the model has no experts", hint="take the setting out")
    if routed_TLK is None:
        raise DataError(
            f"{wrong}: it has no routed_experts",
            hint="the setting must be on when the rollout is made",
        )
    expected = geometry.num_layers, moe.top_k
    if routed_TLK.shape[1:] != expected:
        layers, top_k = routed_TLK.shape[1:]
        raise DataError(
            f"{wrong}: it has {top_k} experts of {layers} layers for each token, the model "
            f"{moe.top_k} of {geometry.num_layers}"
        )
    largest = int(routed_TLK.max(initial=0))
    if largest >= moe.num_experts:
        raise DataError(f"{wrong}: it names expert {largest}, the model has {moe.num_experts}")
