"""Tokens a second through the rollout stage, against the same requests sent straight to the server.

    python tools/bench_rollout_gpu.py                        on a machine with a GPU and SGLang
    python tools/bench_rollout_gpu.py --cpu                  tiny, for a machine without a GPU

Makes a random Qwen3 of 0.6 B parameters (28 layers, hidden 1024, vocabulary 151,936), starts one
server for each concurrency, and lets the rollout stage itself (engine, pipeline, journal, reward)
answer `--requests` samples. The bodies that its engine sent are kept, and sent again by a raw
client on plain sockets that reads the answers and parses nothing. Each goes `--rounds` times in
turn, with the cache flushed before; the fastest of each counts. Wanted: a ratio of 0.95 at least.

SLURM_RL_SGLANG_PYTHON and SLURM_RL_SGLANG_PYTHONPATH name an environment of the server alone, as in
tests/gpu. Exit code 1 if the ratio is missed or CUDA graphs were not captured for the concurrency.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from bench_models import LETTERS, QWEN3_600M, TINY

from slurm_rl.config.schema import InitModel, Settings
from slurm_rl.rollout.engine import Completion, Request, Sampling, Weights
from slurm_rl.rollout.sglang import SglangEngine, plan_options
from slurm_rl.rollout.sglang.wire import render_request
from slurm_rl.rollout.weights import describe_weights
from slurm_rl.stages.init import make_model
from slurm_rl.stages.rollout import run_rollout
from slurm_rl.storage.digest import digest_entries
from slurm_rl.storage.durable import list_files, seal_files
from slurm_rl.types import Input, Order

WANTED = 0.95
HERE = Path(__file__).resolve().parent
GPU_ARGUMENTS = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_server_warmup": True,
    "mem_fraction_static": 0.7,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One way of sending all requests once."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Recording:
    """The engine, and what it was asked."""

    def __init__(self, inner: SglangEngine) -> None:
        self._inner = inner
        self.asked: list[tuple[Request, Sampling]] = []

    @property
    def concurrency(self) -> int:
        return self._inner.concurrency

    def start(self, weights: Weights) -> None:
        self._inner.start(weights)

    def load_weights(self, weights: Weights) -> None:
        self._inner.load_weights(weights)

    async def generate(self, request: Request, sampling: Sampling) -> list[Completion]:
        self.asked.append((request, sampling))
        return await self._inner.generate(request, sampling)

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        return await self._inner.logprobs(tokens)

    async def abort(self) -> None:
        await self._inner.abort()

    def metrics(self) -> dict[str, float]:
        return self._inner.metrics()

    def stop(self) -> None:
        self._inner.stop()


def main() -> int:
    options = parse_options()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        source = make_weights(root / "init", TINY if options.cpu else QWEN3_600M)
        write_prompts(root / "prompts.jsonl", options)
        results = [measure(root, source, options, size) for size in options.concurrency]
    for result in results:
        print(json.dumps(result))
    good = all(r["ratio"] >= WANTED and (options.cpu or r["graphs"]) for r in results)
    print(f"ratio {min(r['ratio'] for r in results):.3f} at the least; wanted: {WANTED}")
    return 0 if good else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="a tiny model and few requests")
    parser.add_argument("--concurrency", type=int, nargs="+", help="default: 256 1024")
    parser.add_argument("--requests", type=int, help="samples; default: 2048")
    parser.add_argument("--group", type=int, help="samples of a prompt; default: 8")
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--response-tokens", type=int)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sglang", type=json.loads, default={}, help="more arguments, as JSON")
    parser.add_argument("--folder", type=Path, help="scratch folder")
    options = parser.parse_args()
    sizes = ([4], 16, 2, 16, 24) if options.cpu else ([256, 1024], 2048, 8, 128, 512)
    names = ("concurrency", "requests", "group", "prompt_tokens", "response_tokens")
    for field, default in zip(names, sizes, strict=True):
        if getattr(options, field) is None:
            setattr(options, field, default)
    return options


def make_weights(attempt: Path, config: dict[str, Any]) -> Input:
    """A random model as an init stage would have committed it."""
    (attempt / "weights").mkdir(parents=True)
    make_model(InitModel(characters=LETTERS, config=config), attempt / "weights", seed=0)
    names = [f"weights/{name}" for name in list_files(attempt / "weights")]
    entries = seal_files(attempt, names)
    content = {
        "files": [dataclasses.asdict(entry) for entry in entries],
        "weights": {"version": 0, "digest": digest_entries(entries)},
    }
    files = {name: str(attempt / name) for name in names}
    return Input("weights", 0, "init", "xxh3:init", str(attempt), files, content)


def write_prompts(path: Path, options: argparse.Namespace) -> None:
    """One prompt for each group; a token is a character."""
    lines = []
    for number in range(options.requests // options.group):
        head = f"{number} "
        text = (head * options.prompt_tokens)[: options.prompt_tokens]
        lines.append(json.dumps({"prompt": text, "label": "a"}))
    path.write_text("\n".join(lines))


def make_settings(root: Path, options: argparse.Namespace, concurrency: int) -> Settings:
    cpu = json.loads((HERE / "sglang_cpu.json").read_text())
    arguments = (cpu["arguments"] if options.cpu else GPU_ARGUMENTS) | options.sglang
    python = os.environ.get("SLURM_RL_SGLANG_PYTHON", sys.executable)
    env = {"HF_HUB_OFFLINE": "1"} | (cpu["environment"] if options.cpu else {})
    if not options.cpu:
        env["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
    if "SLURM_RL_SGLANG_PYTHONPATH" in os.environ:
        env["PYTHONPATH"] = os.environ["SLURM_RL_SGLANG_PYTHONPATH"]
    return Settings.model_validate(
        {
            "run": {"name": "bench", "dir": str(root)},
            "hf_checkpoint": "unused",
            "num_rollout": 1,
            "launcher": "local",
            "rollout": {
                "engine": "sglang",
                "prompt_data": str(root / "prompts.jsonl"),
                "label_key": "label",
                "rm_type": "prefix_match",
                "rollout_batch_size": options.requests // options.group,
                "n_samples_per_prompt": options.group,
                "rollout_max_response_len": options.response_tokens,
                "concurrency": concurrency,
                "sglang": arguments,
                "sglang_python": python,
                "sglang_env": env,
            },
            "train": {"global_batch_size": options.requests},
        }
    )


def measure(
    root: Path, source: Input, options: argparse.Namespace, concurrency: int
) -> dict[str, Any]:
    """Both ways, in turn, on one server."""
    settings = make_settings(root, options, concurrency)
    log_path = root / f"sglang-{concurrency}.log"
    plan = plan_options(settings, environment=os.environ, log_path=log_path, random_seed=1)
    engine = SglangEngine(plan)
    began = time.monotonic()
    engine.start(describe_weights(source, run_id="bench"))
    print(
        f"concurrency {concurrency}: server up after {time.monotonic() - began:.0f} s", flush=True
    )
    try:
        staged, direct = [], []
        warm_up(engine)
        for number in range(options.rounds):
            recording = Recording(engine)
            staged.append(through_stage(root, source, settings, recording, number))
            engine.servers[0].call("POST", "/flush_cache", {}, timeout_s=60)
            direct.append(straight(engine, recording.asked, concurrency))
            print(
                f"  stage {staged[-1].rate:.0f}, straight {direct[-1].rate:.0f} tokens/s",
                flush=True,
            )
        graphs = captured_up_to(engine, log_path)
    finally:
        engine.stop()
    best_staged, best_direct = max(r.rate for r in staged), max(r.rate for r in direct)
    return {
        "concurrency": concurrency,
        "stage_tokens_per_s": round(best_staged),
        "straight_tokens_per_s": round(best_direct),
        "ratio": round(best_staged / best_direct, 4),
        "graphs_up_to": graphs,
        "graphs": graphs >= concurrency,
        "tokens": staged[-1].tokens,
    }


def warm_up(engine: SglangEngine) -> None:
    """Kernels are compiled at their first use."""

    async def ask() -> None:
        requests = [Request(g, (1, 2, 3), tuple(range(8))) for g in range(8)]
        await asyncio.gather(*(engine.generate(r, Sampling(32)) for r in requests))

    asyncio.run(ask())


def through_stage(
    root: Path, source: Input, settings: Settings, engine: Recording, number: int
) -> Round:
    """The rollout stage as a job runs it; the time is that from its first request to its close."""
    attempt = root / f"rollout-{settings.rollout.concurrency}-{number}" / "a0001-0"
    attempt.mkdir(parents=True)
    order = Order(
        run_dir=str(root),
        run_id="bench",
        kind="rollout",
        iteration=0,
        timeline=0,
        attempt_dir=str(attempt),
        settings_path="",
        code_dir="",
        inputs={"weights": source},
    )
    metrics = run_rollout(order, settings, engine=engine).metrics
    seconds = metrics["perf/generate_time"]
    return Round(round(metrics["perf/tokens_per_s"] * seconds), seconds)


def straight(
    engine: SglangEngine, asked: Sequence[tuple[Request, Sampling]], concurrency: int
) -> Round:
    """The same bodies by plain sockets; answers are counted when the clock has stopped."""
    port = engine.servers[0].port
    bodies = [orjson.dumps(render_request(request, sampling)) for request, sampling in asked]
    group = len(asked[0][0].seeds)
    began = time.monotonic()
    answers = asyncio.run(send_all(port, bodies, max(1, concurrency // group)))
    seconds = time.monotonic() - began
    tokens = sum(len(result["output_ids"]) for data in answers for result in orjson.loads(data))
    return Round(tokens, seconds)


async def send_all(port: int, bodies: Sequence[bytes], num_connections: int) -> list[bytes]:
    waiting = list(reversed(bodies))
    answers: list[bytes] = []

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        while waiting:
            body = waiting.pop()
            head = (
                "POST /generate HTTP/1.1\r\nHost: localhost\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            status = await reader.readuntil(b"\r\n\r\n")
            found = re.search(rb"content-length: (\d+)", status.lower())
            assert b" 200 " in status.splitlines()[0] and found, status
            answers.append(await reader.readexactly(int(found[1])))
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(work() for _ in range(num_connections)))
    return answers


def captured_up_to(engine: SglangEngine, log_path: Path) -> int:
    """The largest batch that runs as a CUDA graph; 0 if none was captured."""
    _, info = engine.servers[0].call("GET", "/server_info", timeout_s=60)
    memory = info["internal_states"][0]["memory_usage"]["graph"]
    decode = info["cuda_graph_config"]["decode"]
    seen = re.findall(r"cuda graph: (True|False)", log_path.read_text(errors="replace"))
    print(f"  decode batches by graph: {seen.count('True')} of {len(seen)}; memory {memory}")
    if decode["backend"] == "disabled":
        return 0
    return max(decode["bs"] or [0])


if __name__ == "__main__":
    sys.exit(main())
