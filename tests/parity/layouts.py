"""Ranks that train one model in layout after layout, and say what they found; no pytest.

Below the stages: a model, its optimizer and its checkpoint, and a loss that is written down here.
The processes are started once for many layouts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import stand_in_kernels
import trains

MODEL = {"num_hidden_layers": 4}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LR = 1e-3


def case(
    name: str,
    *,
    packed: int | None = None,
    load: str = "",
    steps: tuple[int, ...] = (0, 1),
    save: tuple[int, ...] = (),
    micro_batch_size: int = 3,
    model: str = "dense",
    fused: bool = False,
    replay: bool = False,
    **megatron: Any,
) -> dict[str, Any]:
    """One layout of `model`: the steps to take, from the checkpoint of case `load` after its step 0
    if there is one; those to save after. packed: the budget of a micro-batch, None if padded. fused: by `stand_in_kernels.py`. replay:
    made-up experts of each token, in place of the routers' own."""
    own = {"lr": LR, "weight_decay": 0.1, "clip_grad": 0.5} | megatron
    parts = {"packed": packed, "load": load, "steps": steps, "save": save, "model": model}
    parts |= {"fused": fused, "replay": replay}
    return {"name": name, "megatron": own, "micro_batch_size": micro_batch_size, **parts}


def run_cases(
    root: Path, models: dict[str, str], cases: list[dict[str, Any]], *, num: int
) -> dict[str, Any]:
    """What each case gave: `{"losses", "norms", "logprobs", "digests", "num_attentions"}`, or
    `{"refused": …}`, by its name. models: folders of weights.

    AssertionError with the ranks' output if one of them fails.
    """
    plan = {"root": str(root), "models": models, "cases": cases, "num": num}
    logs = [root / f"rank-{num}-{rank}.log" for rank in range(num)]
    processes = [trains.RANKS.Process(target=_be_rank, args=(r, plan, logs[r])) for r in range(num)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=110)
        process.kill()
        process.join()
    codes = [process.exitcode for process in processes]
    assert not any(codes), f"{codes}\n" + "\n".join(log.read_text()[-2500:] for log in logs)
    return {c["name"]: json.loads((root / f"{c['name']}.json").read_text()) for c in cases}


def _be_rank(rank: int, plan: dict[str, Any], log: Path) -> None:
    num = plan["num"]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num), "LOCAL_RANK": str(rank)}
    with log.open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    import torch

    from slurm_rl.train import cpu

    with cpu.megatron_imports():
        import slurm_rl.train.checkpoint
        import slurm_rl.train.forward
        import slurm_rl.train.model
        import slurm_rl.train.optimizer  # noqa: F401
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with cpu.stand_ins():
        for one in plan["cases"]:
            print(one["name"], f"{time.process_time():.1f} s", flush=True)
            _run_case(one, plan)
    os._exit(0)


def _run_case(one: dict[str, Any], plan: dict[str, Any]) -> None:
    from slurm_rl.train import distributed

    root = Path(plan["root"])
    settings = trains.tiny_settings(root, train={"num_ranks": plan["num"]})
    world = distributed.read_world(os.environ, expected=plan["num"])
    from slurm_rl.train.options import split_megatron

    options = split_megatron(one["megatron"])
    attempt = root / one["name"]
    attempt.mkdir(exist_ok=True)
    distributed.join(world, attempt_dir=attempt, settings=settings, layout=options.layout)
    try:
        with stand_in_kernels.used(one["fused"]) as calls:
            found = _train(one, root, Path(plan["models"][one["model"]]), options, settings)
        found["num_kernel_calls"] = dict(calls)
        if world.rank == 0:
            (root / f"{one['name']}.json").write_text(json.dumps(found))
    finally:
        distributed.leave()


def build(weights: Path, options: Any, settings: Any, *, load: bool = True) -> Any:
    """An engine of the model in `weights`, and its unwrapped model, in the layout of this process
    group."""
    from slurm_rl.models.geometry import read_geometry
    from slurm_rl.train.forward import Engine
    from slurm_rl.train.loading import load_weights
    from slurm_rl.train.model import build_model, model_config, wrap_model
    from slurm_rl.train.optimizer import build_optimizer, build_scheduler
    from slurm_rl.train.weights import read_layout

    geometry = read_geometry(weights)
    model = build_model(geometry, model_config(geometry, options, deterministic=True))
    wrapped = wrap_model(model, options)
    optimizer = build_optimizer(wrapped, options)
    if load:
        load_weights(model, geometry=geometry, folder=weights, layout=read_layout(weights))
        optimizer.reload_model_params()
    scheduler = build_scheduler(optimizer, settings.train, options)
    return model, Engine(
        model=wrapped,
        optimizer=optimizer,
        scheduler=scheduler,
        vocab_size=geometry.vocab_size,
        temperature=0.8,
        per_token=False,
    )


def _train(
    one: dict[str, Any], root: Path, weights: Path, options: Any, settings: Any
) -> dict[str, Any]:
    import torch.distributed as dist

    from slurm_rl.errors import ConfigError
    from slurm_rl.train import checkpoint, rng, routing

    model, engine = build(weights, options, settings)
    if one["replay"]:
        routing.install(model)
    state = rng.seeded_state(7)
    rng.restore(state)
    if one["load"]:
        folder = root / one["load"] / "checkpoint-0"
        parts = {"optimizer": engine.optimizer, "scheduler": engine.scheduler}
        try:
            checkpoint.load(folder, model=model, **parts)
        except ConfigError as error:
            return {"refused": str(error)}
    found: dict[str, Any] = {"losses": [], "norms": [], "logprobs": [], "digests": []}
    calls = _count_attentions(model)
    for step in one["steps"]:
        loss, norm, logprobs = train_step(engine, step, one)
        found["losses"].append(loss)
        found["norms"].append(norm)
        found["logprobs"].append(logprobs)
        if step in one["save"]:
            folder = root / one["name"] / f"checkpoint-{step}"
            if dist.get_rank() == 0:
                folder.mkdir()
            dist.barrier()
            checkpoint.save(
                folder,
                model=model,
                optimizer=engine.optimizer,
                scheduler=engine.scheduler,
                rng=state,
                progress=checkpoint.Progress(optimizer_steps=step + 1),
            )
            dist.barrier()
            found["digests"].append(_digest(folder))
    return found | {"num_attentions": len(calls)}


def _count_attentions(model: Any) -> list[int]:
    """A list that grows with each call of an attention of this rank."""
    from slurm_rl.train.attention import CausalAttention
    from slurm_rl.train.chunks import model_chunks

    calls: list[int] = []
    for chunk in model_chunks(model):
        for module in chunk.modules():
            if isinstance(module, CausalAttention):
                module.register_forward_hook(lambda *_: calls.append(1))
    return calls


def train_step(engine: Any, step: int, one: dict[str, Any]) -> tuple[float, float, float]:
    """One optimizer step on the made-up rollout `step`: loss, norm of the gradient, and the sum of
    the log-probabilities of its tokens before the step."""
    import torch
    import torch.distributed as dist

    from slurm_rl.train.forward import (
        count,
        own_share,
        policy_logprobs,
        predict,
        reports_here,
        run_microbatches,
    )

    samples = trains.made_up_samples(step)
    if one["replay"]:
        samples = trains.made_up_routing(samples, layers=4, num=4, top_k=2)
    advantages_R = torch.from_numpy(samples.rewards).repeat_interleave(
        torch.from_numpy(samples.response_lengths).long()
    )
    (batches,) = own_share(
        engine,
        samples,
        arrays_R={"advantages": advantages_R - 0.4},
        global_batch_size=16,
        micro_batch_size=one["micro_batch_size"],
        max_tokens=one["packed"],
    )
    # In other micro-batches than those of the step, where they are packed.
    before = policy_logprobs(engine, batches, max_tokens=one["packed"] and 3 * one["packed"])

    def loss(batch: Any, logits_1nV: Any) -> Any:
        logprobs_N, entropy_N = predict(engine, batch, logits_1nV)
        # Of whole sequences too, as GSPO's ratio is.
        sums_B = torch.zeros(batch.num_sequences).index_add(0, batch.sequence_N, logprobs_N)
        each_N = -batch.arrays["advantages"] * logprobs_N - 0.01 * entropy_N
        each_N = each_N + 1e-3 * sums_B[batch.sequence_N] * logprobs_N
        total = (batch.weights_N * each_N).sum()
        report = torch.stack([total.detach().clone(), torch.tensor(float(batch.denominator))])
        return total, count(batch.denominator, logits_1nV), report

    engine.model.zero_grad_buffer()
    engine.optimizer.zero_grad()
    reports = run_microbatches(engine.model, batches, loss)
    sums = torch.zeros(3, dtype=torch.float64)
    if reports and reports_here():
        assert len(reports) == len(batches) == len(before)
        sums[:2] = torch.stack(reports).double().sum(0)
        for batch, logprobs_N in zip(batches, before, strict=True):
            assert logprobs_N.shape == batch.targets_N.shape
            sums[2] += (logprobs_N * batch.weights_N).double().sum()
    dist.all_reduce(sums)
    _, norm, _ = engine.optimizer.step()
    engine.scheduler.step(increment=1)
    return float(sums[0] / sums[1]), float(norm), float(sums[2])


def _digest(folder: Path) -> dict[str, str]:
    from slurm_rl.storage.digest import digest_file

    return {path.name: digest_file(path) for path in sorted(folder.iterdir())}
