"""Forward and backward passes of micro-batches, by Megatron's schedules.

Owns what a pass takes and gives: this rank's micro-batches, and log-probabilities and entropy of
their trained tokens, the same on tensor and context ranks. The loss is `objective.py`'s, the
optimizer's steps are `step.py`'s.

Legend: B samples, R response tokens of the rollout, N trained tokens of a micro-batch, n those
of this context rank, V vocabulary columns of this tensor rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from slurm_rl.train.batch import (
    MicroBatch,
    Samples,
    conversation_sizes,
    pack_microbatch,
    plan_steps,
    rollout_weights,
    sample_lengths,
)
from slurm_rl.train.chunks import model_chunks
from slurm_rl.train.context import (
    counts_here,
    gather_tokens,
    model_inputs,
    own_places,
    own_tokens,
    row_multiple,
    sequence_multiple,
)
from slurm_rl.train.fused import vocab_kernels
from slurm_rl.train.meter import Meter
from slurm_rl.train.packing import Budget, round_up, token_costs
from slurm_rl.train.regroup import regroup
from slurm_rl.train.routing import replay_of
from slurm_rl.train.vocab_parallel import logprobs_and_entropy


@dataclass(slots=True)
class Engine:
    """What a step works on: Megatron's objects, and the numbers that they go with.

    model: the wrapped model, or the chunks of an interleaved pipeline; vocab_size: without
    padding; temperature: the rollout's; per_token: how losses aggregate (`token_weights`).
    """

    model: Any
    optimizer: Any
    scheduler: Any
    vocab_size: int
    temperature: float
    per_token: bool
    optimizer_steps: int = 0
    meter: Meter = field(default_factory=Meter)

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Logits are divided by another temperature meanwhile."""
        before, self.temperature = self.temperature, temperature
        try:
            yield
        finally:
            self.temperature = before


def policy_logprobs(
    engine: Engine,
    microbatches: list[MicroBatch],
    *,
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> list[torch.Tensor]:
    """Log-probabilities float32[N] of each micro-batch's trained tokens, without gradient.

    Logits are divided by `temperature` (None: the rollout's) first. max_tokens: what a pass may
    hold on each rank, if the micro-batches are packed and others than they are to be passed.
    Empty except on the last pipeline rank.
    """
    asked = engine if temperature is None else replace(engine, temperature=temperature)

    def ask(batch: MicroBatch, logits_1nV: torch.Tensor) -> torch.Tensor:
        logprobs_N: torch.Tensor = predict(asked, batch, logits_1nV)[0]
        return logprobs_N

    return ask_model(engine, microbatches, ask, max_tokens=max_tokens)


def ask_model(
    engine: Engine,
    microbatches: list[MicroBatch],
    ask: Callable[[MicroBatch, torch.Tensor], torch.Tensor],
    *,
    max_tokens: int | None = None,
) -> list[torch.Tensor]:
    """What `ask(batch, output)` makes of the model's output, [N, …] of each micro-batch's trained
    tokens, without gradient. max_tokens: see `policy_logprobs`. Empty except on the last pipeline
    rank."""
    passes, put_back = microbatches, None
    if max_tokens is not None and microbatches[0].lengths is not None:
        config = engine.model.config
        passes, put_back = regroup(
            microbatches,
            max_tokens=max_tokens * config.context_parallel_size,
            multiple=row_multiple(config),
        )

    def report(batch: MicroBatch, output: torch.Tensor) -> Any:
        values_N = ask(batch, output)
        return values_N.sum() * 0, count(0, output), {"values": values_N}

    with torch.no_grad():
        parts = run_microbatches(engine.model, passes, report, forward_only=True)
    found = [part["values"] for part in parts]
    return put_back(found) if found and put_back is not None else found


def run_microbatches(
    model: Any,
    microbatches: list[MicroBatch],
    loss: Callable[..., Any],
    *,
    forward_only: bool = False,
) -> list[Any]:
    """Forward (and backward) passes by Megatron's schedule, with pipelines or without.

    `loss(batch, logits_1nV)` gives (sum to differentiate, denominator, report); the reports
    come back in order, on the last pipeline rank. Other ranks may have another number of
    micro-batches; where a schedule needs more of them, empty ones are passed too.
    """
    chunks, config = model_chunks(model), model.config
    # A bfloat16 wrapper would make a float32 copy of all logits; only some are needed.
    extra = {"fp32_output": False} if _is_float16_wrapped(chunks[0]) else {}
    with_te = config.transformer_impl == "transformer_engine"
    replay = replay_of(model)
    replay.begin(is_training=not forward_only)

    def forward(batches: Iterator[MicroBatch], module: Any) -> Any:
        batch = next(batches)
        replay.show(batch.routed_bSLK, own_places(batch))
        output = module(**model_inputs(batch, on_device=with_te), **extra)
        return output, _no_loss if batch is filler else partial(loss, batch)

    filler = _filler(microbatches[0], config)
    whole = microbatches + [filler] * _num_missing(len(microbatches), config)
    iterators = [iter(whole) for _ in chunks]
    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(whole),
        # With pipelines the shapes travel along (`variable_seq_lengths`).
        seq_length=whole[0].tokens_bS.shape[1],
        micro_batch_size=len(whole[0].tokens_bS),
        forward_only=forward_only,
    )
    return reports[: len(microbatches)]


def predict(engine: Engine, batch: MicroBatch, logits_1nV: torch.Tensor) -> Any:
    """Log-probability and entropy of every trained token, float32[N] each, with gradient."""
    _, own_n = own_tokens(batch)
    found = logprobs_and_entropy(
        logits_1nV[0],
        targets_N=batch.targets_N if own_n is None else batch.targets_N[own_n],
        temperature=engine.temperature,
        vocab_size=engine.vocab_size,
        group=parallel_state.get_tensor_model_parallel_group(),
        kernels=vocab_kernels(engine.model.config),
    )
    return gather_tokens(found, own_n, num=len(batch.targets_N))


def own_share(
    engine: Engine,
    samples: Samples,
    *,
    arrays_R: dict[str, torch.Tensor],
    global_batch_size: int,
    micro_batch_size: int,
    max_tokens: int | None = None,
    order: Sequence[int] | None = None,
    weights_R: torch.Tensor | None = None,
) -> list[list[MicroBatch]]:
    """This data-parallel rank's micro-batches of each optimizer step, on its device.

    max_tokens: tokens of a packed micro-batch on each rank; None: padded ones of
    `micro_batch_size` samples. order: of the conversations, theirs in the rollout if None.
    weights_R: of the response tokens in the loss; `rollout_weights` if None.
    """
    budget = None if max_tokens is None else _budget(engine, max_tokens)
    plan = plan_steps(
        conversation_sizes(samples).tolist(),
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        dp_size=parallel_state.get_data_parallel_world_size(),
        order=order,
        lengths=sample_lengths(samples).tolist(),
        budget=budget,
    )
    if weights_R is None:
        weights_R = rollout_weights(samples, per_token=engine.per_token)
    pack = partial(_pack, engine, samples, budget, arrays_R=arrays_R, weights_R=weights_R)
    rank, device = parallel_state.get_data_parallel_rank(), torch.cuda.current_device()
    return [[pack(members).to(device) for members in ranks[rank]] for ranks in plan]


def _pack(
    engine: Engine, samples: Samples, budget: Budget | None, members: list[int], **arrays: Any
) -> MicroBatch:
    """One micro-batch in the form that the engine's model takes."""
    return pack_microbatch(
        samples,
        members,
        per_token=engine.per_token,
        length_multiple=row_multiple(engine.model.config),
        sequence_multiple=None if budget is None else budget.sequence_multiple,
        routed_TLK=samples.routed_experts if replay_of(engine.model).is_on else None,
        **arrays,
    )


def count(value: int, like: torch.Tensor) -> torch.Tensor:
    """A denominator as Megatron takes it: it sums them over data and context ranks."""
    return torch.tensor(value if counts_here() else 0, dtype=torch.int, device=like.device)


def reports_here() -> bool:
    """Whether this rank's reports are counted where all ranks' are summed: tensor and context
    ranks have the same ones."""
    return parallel_state.get_tensor_model_parallel_rank() == 0 and counts_here()


def _budget(engine: Engine, max_tokens: int) -> Budget:
    config = engine.model.config
    linear, quadratic = token_costs(config, vocab_size=engine.vocab_size)
    return Budget(
        max_tokens=max_tokens * config.context_parallel_size,
        linear=linear,
        quadratic=quadratic,
        sequence_multiple=sequence_multiple(config),
    )


def _num_missing(num: int, config: Any) -> int:
    """How many micro-batches a schedule needs beyond this rank's `num`: an interleaved pipeline a
    multiple of its groups, experts as many as any rank that they are shared with."""
    wanted = num
    if config.expert_model_parallel_size > 1:
        most = torch.tensor(num, device=torch.cuda.current_device())
        group = parallel_state.get_expert_model_parallel_group()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        wanted = int(most)
    if config.virtual_pipeline_model_parallel_size is not None:
        wanted = round_up(wanted, config.microbatch_group_size_per_vp_stage)
    return wanted - num


def _filler(like: MicroBatch, config: Any) -> MicroBatch:
    """A micro-batch that adds nothing, of one sequence of padding. They come last, so that routers
    without ids for them take nobody else's."""
    none = torch.zeros(0, device=like.tokens_bS.device)
    width = row_multiple(config)
    return MicroBatch(
        tokens_bS=torch.zeros((1, width), dtype=torch.int64, device=none.device),
        position_N=none.long(),
        targets_N=none.long(),
        sequence_N=none.long(),
        weights_N=none,
        rollout_N=none,
        served_N=none.bool(),
        denominator=0,
        num_sequences=1,
        lengths=None if like.lengths is None else (width,),
    )


def _no_loss(logits_1nV: torch.Tensor) -> Any:
    # Nothing is summed, but every rank goes through the backward pass.
    return logits_1nV[..., :0].float().sum(), count(0, logits_1nV), {}


def _is_float16_wrapped(model: Any) -> bool:
    return type(getattr(model, "module", None)).__name__ == "Float16Module"
