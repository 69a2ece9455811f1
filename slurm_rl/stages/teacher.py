"""The teacher stage: log-probabilities of a rollout under the model that the policy learns from.

By Megatron-core, on ranks of its own; or by SGLang, which serves a teacher of any family and size
once the policy's engines have gone. SGLang computes the log-probabilities of a given text at
temperature 1, whatever it samples at: the configuration allows it where the rollout's is 1, too.
The teacher is the init stage's, read and digested once; the commit names its digest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slurm_rl.config.schema import Settings
from slurm_rl.config.train_schema import Teacher
from slurm_rl.errors import ModelError
from slurm_rl.rollout.engine import Weights
from slurm_rl.rollout.samples import SampleBatch
from slurm_rl.seeds import derive_seed
from slurm_rl.stages.init import read_vocab_size
from slurm_rl.stages.rank import current_rank
from slurm_rl.stages.reference import read_rollout_samples
from slurm_rl.stages.serving import plan_other_server, read_versions
from slurm_rl.stages.signals import write_signals
from slurm_rl.stages.training import check_same, check_share, named
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
    from slurm_rl.train import cpu

    with cpu.megatron_imports():
        from slurm_rl.train.scorer import Scorer

    source = order.input("teacher")
    check_share(source, FOLDER, settings, "teacher")
    model, num = Path(source.path) / FOLDER, teacher.top_logprobs_num
    with Scorer.open(settings, kind="teacher", attempt_dir=Path(order.attempt_dir)) as scorer:
        if num is None:
            return {"teacher": scorer.logprobs(model, samples)}
        below = _policy_vocabulary(source, model)
        sampled_R, ids_RK, logprobs_RK = scorer.likeliest(model, samples, num=num, below=below)
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

    async def score(i: int) -> tuple[NDArray[Any], ...]:
        """Of the response: log-probs, and the likeliest tokens' ids and log-probs."""
        async with places:
            found = await engine.scores([int(t) for t in samples.sample_tokens(i)], top_num=num)
        start = int(samples.prompt_lengths[i]) - 1  # the first token has no log-prob
        return (
            np.array(found.logprobs[start:], np.float32),
            np.array(found.top_ids[start:], np.int64),
            np.array(found.top_logprobs[start:], np.float32),
        )

    try:
        engine.start(weights)
        scored = await asyncio.gather(*(score(i) for i in range(len(samples))))
    finally:
        engine.stop()
    kept_R = samples.loss_mask != 0

    def join(part: int) -> torch.Tensor:
        values = np.concatenate([one[part] for one in scored])
        # As the other backend has it: nothing where nothing is trained.
        values[~kept_R] = 0
        return torch.from_numpy(values)

    if not num:
        return {"teacher": join(0)}
    ids = join(1)
    _check_ids(order.input("teacher"), ids)
    return {"teacher": join(0), "top_ids": ids, "top_logprobs": join(2)}


def _check_ids(source: Input, ids: torch.Tensor) -> None:
    """ModelError for a token that the policy does not have: its log-prob would be of nothing."""
    below, largest = _policy_vocabulary(source, Path(source.path) / FOLDER), int(ids.max())
    if largest >= below:
        raise ModelError(
            f"the teacher finds token {largest} likely, but the policy has {below} tokens",
            hint="use backend: megatron, which leaves such tokens out",
        )


def _policy_vocabulary(source: Input, teacher: Path) -> int:
    """Tokens that the policy and the teacher both have: either may be padded."""
    folders = (teacher, Path(source.path) / "weights")
    sizes = [read_vocab_size(folder / "config.json") for folder in folders]
    return min(int(size) for size in sizes if size is not None)


def _make_engine(order: Order, settings: Settings, teacher: Teacher) -> SglangEngine:
    from slurm_rl.rollout.sglang import SglangEngine

    options = plan_other_server(order, settings, teacher.sglang)
    seed = derive_seed(settings.seed, "teacher", order.iteration)
    return SglangEngine(
        dataclasses.replace(
            options,
            deterministic=settings.deterministic,
            random_seed=seed,
            concurrency=teacher.concurrency,
        )
    )


def _describe(source: Input, order: Order) -> Weights:
    digest = source.content["teacher"]["digest"]
    folder = Path(source.files[f"{FOLDER}/config.json"]).parent
    return Weights(folder, version=0, digest=digest, label=f"{order.run_id}/teacher/{digest}")
