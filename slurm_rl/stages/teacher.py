"""The teacher stage: log-probabilities of a rollout under the model that the policy learns from.

By Megatron-core, on ranks of its own; or by SGLang, which serves a teacher of any family and size
once the policy's engines have gone. SGLang computes the log-probabilities of a given text at
temperature 1, whatever it samples at: the configuration allows it where the rollout's is 1, too.
The teacher is the init stage's, read and digested once; the commit names its digest.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slurm_rl.config.schema import Settings
from slurm_rl.config.train_schema import Teacher
from slurm_rl.rollout.engine import Weights
from slurm_rl.rollout.samples import SampleBatch
from slurm_rl.seeds import derive_seed
from slurm_rl.stages.rank import current_rank
from slurm_rl.stages.reference import read_rollout_samples
from slurm_rl.stages.serving import read_versions
from slurm_rl.stages.signals import write_signals
from slurm_rl.stages.training import check_same, named
from slurm_rl.storage.damage import check_inputs
from slurm_rl.types import Input, Order, Result

if TYPE_CHECKING:
    import torch

    from slurm_rl.rollout.sglang import SglangEngine

FOLDER = "teacher"


def run_teacher(order: Order, settings: Settings) -> Result:
    """Score the rollout; every rank runs it, rank 0's result holds the file.

    Raises CorruptError for a damaged input, ModelError, DataError, EngineError.
    """
    began = time.monotonic()
    teacher, source = settings.teacher, order.input("teacher")
    assert teacher is not None
    check_same(order, "the rollout's iteration", order.input("rollout").iteration, order.iteration)
    samples = read_rollout_samples(order)
    if teacher.backend == "megatron":
        signals = _by_megatron(order, settings, teacher, samples)
    else:
        check_inputs(source, named(source, f"{FOLDER}/"))
        signals = asyncio.run(_by_sglang(order, settings, teacher, samples))
    if current_rank(os.environ) != 0:
        return Result(files=[])
    return Result(
        files=write_signals(Path(order.attempt_dir), samples, signals),
        content={"teacher": source.content["teacher"]},
        metrics={"perf/teacher_time": time.monotonic() - began},
        provenance={"versions": read_versions()},
    )


def _by_megatron(
    order: Order, settings: Settings, teacher: Teacher, samples: SampleBatch
) -> dict[str, torch.Tensor]:
    from slurm_rl.config.roles import num_ranks
    from slurm_rl.train import cpu

    with cpu.megatron_imports():
        from slurm_rl.train.scorer import Scorer

    source = order.input("teacher")
    share = (current_rank(os.environ), num_ranks(settings, "teacher"))
    check_inputs(source, named(source, f"{FOLDER}/"), share=share)
    model, num = Path(source.path) / FOLDER, teacher.top_logprobs_num
    with Scorer.open(settings, kind="teacher", attempt_dir=Path(order.attempt_dir)) as scorer:
        if num is None:
            return {"teacher": scorer.logprobs(model, samples)}
        sampled_R, ids_RK, logprobs_RK = scorer.likeliest(model, samples, num)
    return {"teacher": sampled_R, "top_ids": ids_RK, "top_logprobs": logprobs_RK}


async def _by_sglang(
    order: Order, settings: Settings, teacher: Teacher, samples: SampleBatch
) -> dict[str, torch.Tensor]:
    """Each sample's text is scored as a whole; of that the response's part is kept."""
    import torch

    engine = _make_engine(order, settings, teacher)
    weights = _describe(order.input("teacher"), order)
    num = teacher.top_logprobs_num or 0
    places = asyncio.Semaphore(teacher.concurrency)

    async def score(i: int) -> Any:
        async with places:
            return await engine.scores([int(t) for t in samples.sample_tokens(i)], top_num=num)

    try:
        engine.start(weights)
        scored = await asyncio.gather(*(score(i) for i in range(len(samples))))
    finally:
        engine.stop()
    starts = samples.prompt_lengths.astype(np.int64) - 1  # the first token has no log-prob
    kept_R = torch.from_numpy(samples.loss_mask) != 0

    def join(lists: Sequence[Sequence[Any]], kind: Any) -> torch.Tensor:
        parts = [row for rows, start in zip(lists, starts, strict=True) for row in rows[start:]]
        values = torch.tensor(parts, dtype=kind)
        # As the other backend has it: nothing where nothing is trained.
        values[~kept_R] = 0
        return values

    found = {"teacher": join([one.logprobs for one in scored], torch.float32)}
    if num:
        found["top_ids"] = join([one.top_ids for one in scored], torch.int64)
        found["top_logprobs"] = join([one.top_logprobs for one in scored], torch.float32)
    return found


def _make_engine(order: Order, settings: Settings, teacher: Teacher) -> SglangEngine:
    from slurm_rl.rollout.sglang import SglangEngine, SglangOptions

    rollout = settings.rollout
    own = {name: str(value) for name, value in rollout.sglang_env.items()}
    return SglangEngine(
        SglangOptions(
            arguments=teacher.sglang,
            environment={**os.environ, **own},
            log_path=Path(order.attempt_dir) / "sglang.log",
            deterministic=settings.deterministic,
            random_seed=derive_seed(settings.seed, "teacher", order.iteration),
            concurrency=teacher.concurrency,
            start_timeout_s=rollout.server_start_timeout_s,
            request_timeout_s=rollout.request_timeout_s,
            python=rollout.sglang_python or sys.executable,
        )
    )


def _describe(source: Input, order: Order) -> Weights:
    digest = source.content["teacher"]["digest"]
    folder = Path(source.files[f"{FOLDER}/config.json"]).parent
    return Weights(folder, version=0, digest=digest, label=f"{order.run_id}/teacher/{digest}")
