"""What the tests here share: tiny models, made-up rollouts, orders, ranks; no pytest."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from slurm_rl.config.schema import Settings
from slurm_rl.rollout.samples import TENSORS_NAME, SampleBatch
from slurm_rl.storage.durable import seal_files
from slurm_rl.types import Input, Order, Result, dump_record, parse_order, parse_result

CHARACTERS = "0123456789+="
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    # Large enough that the logits differ from token to token.
    "initializer_range": 0.2,
}

#: Ranks are forked from a process that has imported what they need. It does not get `sys.path`, and
#: says nothing of a module that it does not find.
RANKS = multiprocessing.get_context("forkserver")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)
RANKS.set_forkserver_preload(["preload"])


def tiny_settings(
    folder: Path,
    *,
    family: str = "llama",
    tied: bool = False,
    train: dict[str, Any] | None = None,
    megatron: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> Settings:
    """Settings of a run in deterministic mode on a tiny model; 8 samples a step, 3 a pass."""
    config = {"model_type": family, "tie_word_embeddings": tied} | TINY | (model or {})
    return Settings.model_validate(
        {
            "run": {"name": "tiny", "dir": str(folder)},
            "num_rollout": 4,
            "deterministic": True,
            "init_model": {"config": config, "characters": CHARACTERS},
            "rollout": {
                "engine": "embedded",
                "prompt_data": "unused.jsonl",
                "rollout_batch_size": 4,
                "n_samples_per_prompt": 4,
                "rollout_temperature": 0.8,
            },
            "train": {
                "global_batch_size": 8,
                "micro_batch_size": 3,
                "entropy_coef": 0.01,
                "megatron": {"lr": 1e-3} | (megatron or {}),
            }
            | (train or {}),
        }
    )


def made_up_samples(iteration: int, *, num: int = 16) -> SampleBatch:
    """Samples of random lengths, tokens, masks and rewards, in groups of four."""
    g = np.random.default_rng(1000 + iteration)
    prompts, responses = (g.integers(low, 9, num).astype(np.int32) for low in (2, 1))
    num_tokens, num_trained = int((prompts + responses).sum()), int(responses.sum())
    return SampleBatch(
        # No padding token: its embedding is zero, where norms have enormous gradients.
        tokens=g.integers(0, len(CHARACTERS), num_tokens).astype(np.int32),
        prompt_lengths=prompts,
        response_lengths=responses,
        rollout_logprobs=-g.random(num_trained).astype(np.float32) * 3,
        loss_mask=(g.random(num_trained) < 0.9).astype(np.uint8),
        token_versions=np.full(num_trained, iteration, np.int32),
        rewards=g.random(num).astype(np.float32),
        group_index=(np.arange(num) // 4).astype(np.int64),
        sample_index=(np.arange(num) % 4).astype(np.int64),
        rollout_index=(np.arange(num) % 4).astype(np.int64),
        weights_version=np.full(num, iteration, np.int32),
        truncated=np.zeros(num, np.uint8),
    )


def made_up_routing(samples: SampleBatch, *, layers: int, num: int, top_k: int) -> SampleBatch:
    """The samples with random experts of each token, as an engine would have said them."""
    g = np.random.default_rng(int(samples.tokens.sum()))
    shuffled = g.random((len(samples.tokens), layers, num)).argsort(-1)
    return dataclasses.replace(samples, routed_experts=shuffled[..., :top_k].astype(np.uint8))


def as_input(role: str, iteration: int, kind: str, folder: Path, result: Result) -> Input:
    """A finished attempt, as the next stage gets it."""
    files = [dataclasses.asdict(entry) for entry in result.files]
    return Input(
        role=role,
        iteration=iteration,
        kind=kind,
        digest="unused",
        path=str(folder),
        files={entry.path: str(folder / entry.path) for entry in result.files},
        content=result.content | {"files": files},
    )


def make_order(root: Path, kind: str, iteration: int, inputs: dict[str, Input], name: str) -> Order:
    """An order whose attempt directory is `root/name`, made if it is not there."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    settings = str(root / "settings.json")
    return Order(str(root), "tiny", kind, iteration, 0, str(folder), settings, "", inputs)


def make_rollout(
    root: Path, weights: dict[str, Any], *, samples: SampleBatch | None = None, name: str = ""
) -> Input:
    """A committed rollout of the iteration that `weights` (version, digest) are for."""
    iteration = weights["version"]
    folder = root / (name or f"rollout-{iteration}-{weights['digest'][5:13]}")
    if not folder.exists():
        batch = samples if samples is not None else made_up_samples(iteration)
        arrays = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        folder.mkdir(parents=True)
        (folder / TENSORS_NAME).write_bytes(save(arrays))
    cursor = {"visits": 4 * (iteration + 1), "sets": {}, "data_fingerprint": "same"}
    content = {"weights": weights, "cursor": cursor}
    result = Result(files=seal_files(folder, [TENSORS_NAME]), content=content)
    return as_input("rollout", iteration, "rollout", folder, result)


def train_order(root: Path, before: Input, name: str, *, reference: Input | None = None) -> Order:
    """The order to train one iteration on from `before` (init or train)."""
    weights = before.content["weights"]
    inputs = {
        "rollout": make_rollout(root, weights),
        "checkpoint": dataclasses.replace(before, role="checkpoint"),
    }
    if reference is not None:
        inputs["reference"] = dataclasses.replace(reference, role="reference")
    return make_order(root, "train", weights["version"], inputs, name)


def trained(order: Order, result: Result) -> Input:
    """A finished train stage as an input."""
    return as_input("checkpoint", order.iteration, "train", Path(order.attempt_dir), result)


def transformers_logprobs(folder: str, tokens: list[int], *, temperature: float = 1.0) -> Any:
    """Log-probs of `tokens[1:]` under the weights in `folder/weights`, float32, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(f"{folder}/weights", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def assert_probe(order: Order, result: Result) -> None:
    """The probe is that of the weights which were exported beside it."""
    probe = result.content["weights"]["probe"]
    expected = transformers_logprobs(order.attempt_dir, probe["tokens"])
    assert np.abs(np.array(probe["logprobs"]) - expected).max() < 1e-4


def train_in_ranks(
    root: Path,
    settings: Settings,
    before: Input,
    *,
    num: int,
    name: str,
    iterations: int = 1,
    reference: Input | None = None,
    earlier: tuple[str, ...] = (),
    die_before: int | None = None,
) -> list[tuple[Order, Result]]:
    """Train `iterations` in `num` processes from `before`; what each gave.

    earlier: attempt directories to go on from. die_before: every rank ends without a word before
    that optimizer step of its first iteration; then nothing is given. AssertionError with the
    ranks' output if one of them fails.
    """
    (root / "settings.json").write_text(settings.model_dump_json())
    name_of_first = f"{name}-{before.content['weights']['version']}"
    first = train_order(root, before, name_of_first, reference=reference)
    first = dataclasses.replace(first, earlier_attempts=list(earlier))
    (Path(first.attempt_dir) / "order.json").write_bytes(dump_record(first))
    plan = {"name": name, "iterations": iterations, "die_before": die_before}
    logs = [root / f"{name}.rank-{rank}.log" for rank in range(num)]
    processes = [
        RANKS.Process(target=_be_rank, args=(rank, num, logs[rank], plan, first.attempt_dir))
        for rank in range(num)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=110)
        process.kill()  # one that still runs: its exit code says so
        process.join()
    codes = [process.exitcode for process in processes]
    outputs = [log.read_text() for log in logs]
    if die_before is not None:
        assert codes == [9] * num, "\n".join(outputs)
        return []
    assert not any(codes), "\n".join(outputs)
    done = []
    for i in range(first.iteration, first.iteration + iterations):
        folder = root / f"{name}-{i}"
        order = parse_order((folder / "order.json").read_bytes())
        done.append((order, parse_result((folder / "result.json").read_bytes())))
    return done


def _die_before(step: int) -> None:
    """Let this process end before an optimizer step, once the other ranks have come as far."""
    import torch.distributed as dist

    from slurm_rl.train import step as step_module

    real, taken = step_module.run_microbatches, []

    def run(*args: Any, forward_only: bool = False) -> list[Any]:
        if not forward_only:
            if len(taken) == step:
                dist.barrier()
                os._exit(9)
            taken.append(1)
        return real(*args, forward_only=forward_only)

    step_module.run_microbatches = run


def _be_rank(rank: int, num: int, log: Path, plan: dict[str, Any], attempt_dir: str) -> None:
    """A process of its own: train `plan["iterations"]` iterations from an order, and end."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num), "LOCAL_RANK": str(rank)}
    with log.open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    from slurm_rl.stages.train import open_trainer, train_iteration

    order = parse_order((Path(attempt_dir) / "order.json").read_bytes())
    settings = Settings.model_validate_json(Path(order.settings_path).read_bytes())
    trainer = open_trainer(order, settings)
    import torch.distributed as dist

    if plan["die_before"] is not None:
        _die_before(plan["die_before"])
    for _ in range(plan["iterations"]):
        results = [train_iteration(trainer, order)]
        dist.broadcast_object_list(results, src=0)
        trainer.weights_digest = results[0].content["weights"]["digest"]
        folder, root = Path(order.attempt_dir), Path(order.run_dir)
        if trainer.world.rank == 0:
            (folder / "order.json").write_bytes(dump_record(order))
            (folder / "result.json").write_bytes(dump_record(results[0]))
        before = trained(order, results[0])
        name = f"{plan['name']}-{order.iteration + 1}"
        if trainer.world.rank == 0:
            make_rollout(root, before.content["weights"])
        dist.barrier()
        order = train_order(root, before, name, reference=order.inputs.get("reference"))
    trainer.close()
    sys.stdout.flush()
    os._exit(0)


def work(samples: SampleBatch) -> Any:
    """One iteration's work on `samples` alone."""
    from slurm_rl.train.step import Work

    return Work(samples)


def facts(result: Result) -> tuple[Any, ...]:
    """What two runs must have in common: all but the times."""
    metrics = {name: v for name, v in result.metrics.items() if not name.startswith("perf/")}
    return result.files, result.content, metrics
