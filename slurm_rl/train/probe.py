"""Log-probabilities of a fixed text, by which an engine is recognised.

The train stage computes them with the weights that it commits, and commits them with these
(`content["weights"]["probe"]`). An engine that serves other weights under the right name, or the
right weights wrongly, gives other numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from slurm_rl.errors import NumericsError
from slurm_rl.seeds import derive_seed
from slurm_rl.train import rng
from slurm_rl.train.batch import MicroBatch

LENGTH = 48
#: Finer than any engine agrees, coarse enough to be read.
_DECIMALS = 5


def probe_tokens(vocab_size: int, *, max_positions: int) -> list[int]:
    """The text: the same for every model of this vocabulary, whatever the run's seed."""
    length = min(LENGTH, max_positions)
    return [derive_seed(0, "probe", place) % vocab_size for place in range(length)]


def pack_probe(tokens: list[int], *, length_multiple: int) -> MicroBatch:
    """The text as a micro-batch in which every token but the first is to be predicted."""
    width = -(-len(tokens) // length_multiple) * length_multiple
    padded = torch.zeros((1, width), dtype=torch.int64)
    padded[0, : len(tokens)] = torch.tensor(tokens)
    num = len(tokens) - 1
    none = torch.zeros(num)
    return MicroBatch(
        tokens_bS=padded,
        position_N=torch.arange(num),
        targets_N=padded[0, 1 : len(tokens)].clone(),
        sequence_N=torch.zeros(num, dtype=torch.int64),
        weights_N=none,
        rollout_N=none,
        served_N=torch.zeros(num, dtype=torch.bool),
        denominator=0,
        num_sequences=1,
    )


def measure_probe(engine: Any, *, max_positions: int) -> dict[str, Any]:
    """`{"tokens": […], "logprobs": […]}`, one log-prob less than tokens; every rank calls it.

    At temperature 1, from float32 logits over the real vocabulary, dropout off; equal on all
    ranks. Random state and model are left as they were. Raises NumericsError if a log-prob is not
    finite: such weights must not be committed.
    """
    from slurm_rl.train.context import row_multiple
    from slurm_rl.train.forward import policy_logprobs

    tokens = probe_tokens(engine.vocab_size, max_positions=max_positions)
    multiple = row_multiple(engine.model.config)
    batch = pack_probe(tokens, length_multiple=multiple).to(torch.cuda.current_device())
    before, was_training = rng.capture(), engine.model.training
    engine.model.eval()
    try:
        found = policy_logprobs(engine, [batch], temperature=1.0)
    finally:
        engine.model.train(was_training)
        rng.restore(before)
    own = found[0].tolist() if found else None
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    # The last stage of the pipeline has them; its tensor, context and data ranks have the same.
    logprobs = next(values for values in gathered if values is not None)
    if not all(math.isfinite(value) for value in logprobs):
        raise NumericsError(
            "after the last optimizer step the model's log-probabilities are not finite; its "
            "weights are not committed",
            hint="lower the learning rate, or clip the gradient",
        )
    return {"tokens": tokens, "logprobs": [round(value, _DECIMALS) for value in logprobs]}
