"""A run of toy stages through the real commands and the local launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from slurm_rl.launch.build import open_run
from slurm_rl.launch.local import LocalScheduler, is_alive
from toy.interpreter import write_interpreter
from toy.model import write_model

PROGRAM = str(Path(sys.executable).with_name("slurm-rl"))


class ToyRun:
    """A configuration file, and the commands on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.yaml"
        self.root = folder / "runs" / "toy"

    def write(self, **changes: object) -> None:
        """The configuration; `section__key=value` changes a value."""
        python = str(write_interpreter(self.folder / "toy-python"))
        value: dict[str, object] = {
            "run": {"name": "toy", "dir": str(self.folder / "runs")},
            "hf_checkpoint": str(write_model(self.folder / "model")),
            "num_rollout": 3,
            "launcher": "local",
            "deterministic": True,
            "chain": {
                "heartbeat_s": 0.2,
                "lease_s": 2,
                "retry_delay_s": 0.1,
                "submit_deadline_s": 2,
            },
            "init": {"python": python},
            "rollout": {
                "engine": "embedded",
                "prompt_data": str(self.folder / "prompts.jsonl"),
                "label_key": "label",
                "rollout_batch_size": 2,
                "n_samples_per_prompt": 2,
                "rm_type": "exact_match",
                "python": python,
            },
            "train": {"global_batch_size": 4, "megatron": {"lr": 1e-3}, "python": python},
        }
        for name, change in changes.items():
            section, _, key = name.partition("__")
            target = value if not key else value[section]
            assert isinstance(target, dict)
            target[key or section] = change
        (self.folder / "prompts.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
        self.config.write_text(yaml.safe_dump(value))

    def command(self, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `slurm-rl ARGV` to its end."""
        env = {**os.environ, **environment}
        return subprocess.run(
            [PROGRAM, *argv], env=env, capture_output=True, text=True, timeout=120
        )

    def start(self, *argv: str, **environment: str) -> subprocess.Popen[str]:
        env = {**os.environ, **environment}
        pipe = subprocess.PIPE
        return subprocess.Popen([PROGRAM, *argv], env=env, stdout=pipe, stderr=pipe, text=True)

    def digests(self) -> dict[str, str]:
        """Slot -> content digest, of everything committed."""
        found = {}
        for path in sorted((self.root / "iterations").rglob("COMMIT")):
            name = str(path.parent.relative_to(self.root / "iterations"))
            found[name] = json.loads(path.read_bytes())["digest"]
        return found

    def running(self) -> list[int]:
        """Process ids of the live jobs."""
        scheduler = LocalScheduler(open_run(self.root).run, "toy")
        return [entry.pid for entry in scheduler.entries() if is_alive(entry)]

    def kill_jobs(self) -> int:
        """SIGKILL to every live job; how many."""
        pids = self.running()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return len(pids)


def wait_until(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    """Poll until `condition()`; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
