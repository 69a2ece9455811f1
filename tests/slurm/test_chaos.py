"""A short run of tools/chaos.py: each kind of fault once, the same committed history in the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_kind_of_fault_once(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("a cluster of namespaces and a small file system need root")
    report = tmp_path / "report.txt"
    argv = [sys.executable, "tools/chaos.py", "--faults=16", "--iterations=6", "--seed=1"]
    argv += [f"--report={report}", f"--keep={tmp_path / 'kept'}"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    lines = [line.split() for line in report.read_text().splitlines()]
    assert ["all", "16", "16"] in lines, done.stdout
