"""An executable that stands in for a stage's `python`: whatever it is asked, it runs the toy."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def write_interpreter(path: Path, *, python: str = sys.executable) -> Path:
    """Make `path`: `<path> -u -m slurm_rl.stages ORDER.json` runs the toy program on ORDER.json."""
    program = Path(__file__).parent / "program.py"
    command = shlex.join([python, "-u", str(program)])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path
