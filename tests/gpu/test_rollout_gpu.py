"""The rollout stage on a GPU costs next to nothing against the server alone; graphs are captured.

`tools/bench_rollout_gpu.py` is what runs, a concurrency at a time; its figures are in
docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(580)


@pytest.mark.parametrize("concurrency", [256, 1024])
def test_the_stage_keeps_up_with_the_server(
    concurrency: int, tmp_path: Path, device_name: str
) -> None:
    argv = [sys.executable, str(ROOT / "tools" / "bench_rollout_gpu.py")]
    argv += ["--concurrency", str(concurrency), "--folder", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    print(done.stdout[-3000:], done.stderr[-3000:])
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, "the benchmark came to no result"
    result = json.loads(lines[-1])
    print(f"{device_name}: {result}")
    assert result["graphs_up_to"] >= concurrency
    assert result["ratio"] >= 0.95
    assert done.returncode == 0
