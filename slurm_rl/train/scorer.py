"""Log-probabilities of a rollout under models that are not trained: reference, teacher.

    with Scorer.open(...) as scorer:     ranks meet
        scorer.logprobs(folder, samples)    one model after the other, each dropped again

No optimizer, no gradients, no checkpoint: a model is read from its Hugging Face files.
Legend: R response tokens of the rollout, K likeliest tokens at each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slurm_rl.config.roles import fuses_kernels, num_ranks, role, role_megatron
from slurm_rl.config.schema import Settings
from slurm_rl.config.train_schema import Forward
from slurm_rl.models.geometry import read_geometry
from slurm_rl.train import distributed
from slurm_rl.train.batch import Samples, check_samples, conversation_sizes
from slurm_rl.train.distributed import World
from slurm_rl.train.forward import Engine, own_share, policy_logprobs
from slurm_rl.train.options import MegatronOptions, split_megatron
from slurm_rl.train.others import load_other
from slurm_rl.train.scopes import deterministic_scope, megatron_scope, prepare_determinism
from slurm_rl.train.step import whole_rollout
from slurm_rl.train.top_logprobs import likeliest_tokens


class Scorer:
    """See the module. Every rank of the job has one, and all call the same methods."""

    def __init__(self, settings: Settings, section: Forward, options: MegatronOptions) -> None:
        self._settings = settings
        self._section = section
        self._options = options

    @classmethod
    @contextmanager
    def open(cls, settings: Settings, *, kind: str, attempt_dir: Path) -> Iterator[Scorer]:
        """Meet the other ranks; part again in the end. kind: whose layout and batches are used.

        Raises ConfigError (layout, ranks).
        """
        megatron, fused = role_megatron(settings, kind), fuses_kernels(settings, kind)
        options = split_megatron(megatron, trains=False, fused=fused)
        if settings.deterministic:
            prepare_determinism()
        world: World = distributed.read_world(os.environ, expected=num_ranks(settings, kind))
        with megatron_scope():
            distributed.join(
                world, attempt_dir=attempt_dir, settings=settings, layout=options.layout
            )
            try:
                yield cls(settings, role(settings, kind), options)
                dist.barrier()
            except BaseException:
                # Of several ranks the others may wait in a collective: there the process must end.
                if world.size == 1:
                    distributed.leave()
                raise
            distributed.leave()

    def tell(self, value: Any) -> Any:
        """Rank 0's value, on every rank; all wait for it."""
        said = [value]
        dist.broadcast_object_list(said, src=0)
        return said[0]

    def logprobs(self, folder: Path, samples: Samples) -> torch.Tensor:
        """Of the response tokens under the model in `folder`, at the rollout's temperature:
        float32[R] on every rank, 0 where masked. Raises ModelError and DataError."""
        return self._score(folder, samples, policy_logprobs, num_columns=1)[0]

    def likeliest(
        self, folder: Path, samples: Samples, *, num: int, below: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same, and the `num` likeliest tokens below `below` at each: (logprobs float32[R], ids
        int64[R, K], their logprobs float32[R, K])."""
        ask = partial(likeliest_tokens, num=num, below=below)
        sampled_R, *columns = self._score(folder, samples, ask, num_columns=2 * num + 1)
        ids = torch.stack(columns[:num], dim=1).round().long()
        return sampled_R, ids, torch.stack(columns[num:], dim=1)

    def _score(
        self, folder: Path, samples: Samples, ask: Any, *, num_columns: int
    ) -> list[torch.Tensor]:
        """What `ask(engine, microbatches)` gives for the tokens, float[N] or float[N, C], as one
        float32[R] a column."""
        engine, section = self._load(folder, samples), self._section
        (passes,) = own_share(
            engine,
            samples,
            arrays_R={"index": torch.arange(len(samples.loss_mask))},
            global_batch_size=len(conversation_sizes(samples)),
            micro_batch_size=section.micro_batch_size,
            max_tokens=section.max_tokens_per_gpu,
        )
        with deterministic_scope() if self._settings.deterministic else nullcontext():
            found = ask(engine, passes)
        columns = [part.reshape(len(part), num_columns).unbind(1) for part in found]
        return [
            whole_rollout(samples, passes, [part[c] for part in columns])
            for c in range(num_columns)
        ]

    def _load(self, folder: Path, samples: Samples) -> Engine:
        """The model in `folder`, once the samples fit it."""
        geometry = read_geometry(folder)
        check_samples(
            samples,
            vocab_size=geometry.vocab_size,
            max_positions=geometry.max_positions,
            is_graded=False,
        )
        model = load_other(
            folder,
            geometry=geometry,
            options=self._options,
            deterministic=self._settings.deterministic,
        )
        return Engine(
            model=model,
            optimizer=None,
            scheduler=None,
            vocab_size=geometry.vocab_size,
            temperature=self._settings.rollout.rollout_temperature,
            per_token=False,
        )
