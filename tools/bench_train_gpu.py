"""Tokens a second of the train stage's updates, against a bare Megatron loop on the same model.

    python tools/bench_train_gpu.py                        on a machine with a GPU
    python tools/bench_train_gpu.py --cpu                  tiny, for a machine without a GPU

Makes a random Qwen3 of 0.6 B parameters (28 layers, hidden 1024, vocabulary 151,936; in `--model`,
if that is given and not there yet). One optimizer step over `--sequences` samples of `--length`
tokens each, by the trainer (packed under `--max-tokens`: advantages, clipped loss, entropy, checks,
report) and by the shortest loop that Megatron-core allows: the same model, wrapper and optimizer
without the trainer's fused kernels, padded micro-batches of `--micro-batch`, cross entropy of every
token by the model itself. Each goes `--rounds` times in turn after one that does not count; the
fastest of each counts. Wanted: a ratio of 0.95 at least.

The trainer's pass before the update (the proximal log-probs) is shown beside it: it is no part of
the update. `--set KEY=VALUE` gives Megatron-core an option, for both; `--plain` leaves the kernels
out of the trainer too. Exit code 1 if the ratio is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from bench_models import LETTERS, QWEN3_600M, TINY

from slurm_rl.config.schema import InitModel, Settings
from slurm_rl.rollout.samples import SampleBatch
from slurm_rl.stages.init import make_model
from slurm_rl.train import cpu

WANTED = 0.95


def make_samples(options: argparse.Namespace, vocab_size: int) -> SampleBatch:
    """Random tokens, every sample of the same length; groups of four."""
    g = np.random.default_rng(0)
    num, response = options.sequences, options.length - options.prompt
    total = num * response
    return SampleBatch(
        tokens=g.integers(0, vocab_size, num * options.length).astype(np.int32),
        prompt_lengths=np.full(num, options.prompt, np.int32),
        response_lengths=np.full(num, response, np.int32),
        rollout_logprobs=np.full(total, -np.log(vocab_size), np.float32),
        loss_mask=np.ones(total, np.uint8),
        token_versions=np.zeros(total, np.int32),
        rewards=g.random(num).astype(np.float32),
        group_index=np.arange(num, dtype=np.int64) // 4,
        sample_index=np.arange(num, dtype=np.int64) % 4,
        rollout_index=np.arange(num, dtype=np.int64) % 4,
        weights_version=np.zeros(num, np.int32),
        truncated=np.zeros(num, np.uint8),
    )


def make_settings(folder: Path, config: dict[str, Any], options: argparse.Namespace) -> Settings:
    extra = dict(word.split("=", 1) for word in options.set)
    return Settings.model_validate(
        {
            "run": {"name": "bench", "dir": str(folder)},
            "num_rollout": 1,
            "init_model": {"config": config, "characters": LETTERS},
            "rollout": {"prompt_data": "none", "rollout_batch_size": options.sequences // 4},
            "train": {
                "global_batch_size": options.sequences,
                "max_tokens_per_gpu": options.max_tokens,
                "check_first_ratio": 0.1,
                "fused_kernels": not options.plain,
                "megatron": {
                    "lr": 1e-6,
                    "clip_grad": 1.0,
                    **{name: json.loads(value) for name, value in extra.items()},
                },
            },
        }
    )


def bare_step(engine: Any, tokens: Any, *, micro_batch: int) -> None:
    """One optimizer step on next-token cross entropy, as short as Megatron-core lets it be."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward(batches: Iterator[Any], model: Any) -> Any:
        batch = next(batches)
        positions = torch.arange(batch.shape[1], device=batch.device).expand_as(batch)
        return model(batch, positions, None, labels=batch.roll(-1, 1)), loss

    def loss(losses: Any) -> Any:
        count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
        total = losses.float().sum()
        return total, count, {"loss": total.detach().clone()}

    engine.model.zero_grad_buffer()
    engine.optimizer.zero_grad()
    parts = tokens.split(micro_batch)
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(parts),
        model=[engine.model],
        num_microbatches=len(parts),
        seq_length=tokens.shape[1],
        micro_batch_size=micro_batch,
        forward_only=False,
    )
    engine.optimizer.step()


def make_bare(trainer: Any, weights: Path) -> Any:
    """The trainer's model and optimizer once more, by PyTorch's and Megatron's own operations."""
    from slurm_rl.train.loading import load_weights
    from slurm_rl.train.model import build_model, model_config, wrap_model
    from slurm_rl.train.optimizer import build_optimizer
    from slurm_rl.train.scopes import megatron_scope
    from slurm_rl.train.weights import read_layout

    options = dataclasses.replace(trainer.options, fused=False)
    with megatron_scope():
        config = model_config(trainer.geometry, options, deterministic=False)
        model = build_model(trainer.geometry, config)
        wrapped = wrap_model(model, options)
        optimizer = build_optimizer(wrapped, options)
        load_weights(model, geometry=trainer.geometry, folder=weights, layout=read_layout(weights))
        optimizer.reload_model_params()
    return SimpleNamespace(model=wrapped, optimizer=optimizer)


def time_bare(
    trainer: Any, engine: Any, samples: SampleBatch, options: argparse.Namespace
) -> float:
    """Seconds of one bare step."""
    import torch

    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    shape = (options.sequences, options.length)
    tokens = torch.from_numpy(samples.tokens.reshape(shape)).long().to(device)
    step = partial(bare_step, engine, tokens, micro_batch=options.micro_batch)
    with trainer._at_work():
        _wait()
        began = time.monotonic()
        step()
        _wait()
        return time.monotonic() - began


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(options: argparse.Namespace, folder: Path) -> float:
    """Print the rounds; the ratio of the trainer's rate to the bare loop's."""
    config = (TINY if options.cpu else QWEN3_600M) | {"max_position_embeddings": 8192}
    settings = make_settings(folder, config, options)
    weights = options.model or folder / "weights"
    if not weights.exists():
        weights.mkdir(parents=True)
        make_model(InitModel(config=config, characters=LETTERS), weights, seed=1)
    with cpu.megatron_imports():
        from slurm_rl.train.meter import find_peak, forward_flops
        from slurm_rl.train.step import Work
        from slurm_rl.train.trainer import Trainer
    import torch

    trainer = Trainer.build(settings, attempt_dir=folder, weights_dir=weights)
    trainer.load_weights(weights)
    bare_engine = make_bare(trainer, weights)
    samples = make_samples(options, config["vocab_size"])
    ours, bare = [], []
    for number in range(options.rounds + 1):
        metrics = trainer.step(Work(samples))
        seconds = time_bare(trainer, bare_engine, samples, options)
        if number:  # the first ones compile and allocate
            ours.append(metrics["perf/actor_train_time"])
            bare.append(seconds)
            print(f"round {number}: trainer {ours[-1]:.3f} s, bare {seconds:.3f} s, "
                  f"log-probs before it {metrics['perf/log_probs_time']:.3f} s")  # fmt: skip
    tokens = options.sequences * options.length
    flops = 3 * forward_flops(
        trainer.model.config, vocab_size=config["vocab_size"], samples=samples
    )
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    peak = find_peak(name)
    print(f"{name}, torch {torch.__version__}: {tokens} tokens a step")
    for what, times in (("trainer", ours), ("bare loop", bare)):
        best = min(times)
        tflops = flops / best / 1e12
        mfu = "" if peak is None else f", MFU {tflops / peak:.3f}"
        print(f"{what:10} {tokens / best:9,.0f} tokens/s, {tflops:6.1f} TFLOP/s{mfu}")
    if torch.cuda.is_available():
        print(f"memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    trainer.close()
    return min(bare) / min(ours)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="a tiny model")
    parser.add_argument("--model", type=Path, help="where its weights are, or are to be")
    parser.add_argument("--plain", action="store_true", help="train.fused_kernels: false")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of it that are not trained")
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.cpu:
        options.length, options.max_tokens = min(options.length, 128), 1024
    with tempfile.TemporaryDirectory() as folder:
        ratio = measure(options, Path(folder))
    print(f"ratio {ratio:.3f} (wanted: at least {WANTED})")
    return 0 if ratio >= WANTED or options.cpu else 1


if __name__ == "__main__":
    sys.exit(main())
