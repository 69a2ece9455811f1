"""Stages in a container that has no Slurm: a stand-in `apptainer` that empties PATH."""

from __future__ import annotations

import os
from pathlib import Path

from toy.commands import ToyRun
from toy.interpreter import write_interpreter

#: Runs what follows the image with a PATH that holds nothing, and notes what it was asked.
_APPTAINER = """#!/bin/bash
echo "$@" >> {log}
while [ "$1" != {image} ]; do shift; done
shift
export PATH={empty}
for name in sbatch squeue srun scontrol apptainer; do
  if command -v $name >/dev/null; then echo "found $name" >> {log}; exit 9; fi
done
exec "$@"
"""


def test_the_program_runs_inside_and_the_supervisor_outside(toy_run: ToyRun) -> None:
    folder = toy_run.folder
    log, image, empty = folder / "asked", folder / "image.sif", folder / "empty"
    image.touch()
    empty.mkdir()
    tools = folder / "bin"
    tools.mkdir()
    program = tools / "apptainer"
    program.write_text(_APPTAINER.format(log=log, image=image, empty=empty))
    program.chmod(0o755)
    python = str(write_interpreter(folder / "inside-python"))
    toy_run.write(
        num_rollout=1,
        container={"runtime": "apptainer", "image": str(image), "python": python},
        env={"TOY_SETTING": "from the config"},
        init={},
        rollout__python=None,
        train__python=None,
    )
    path = f"{tools}:{os.environ['PATH']}"
    done = toy_run.command("submit", str(toy_run.config), "--wait", PATH=path)
    assert done.returncode == 0, done.stderr
    asked = log.read_text().splitlines()
    assert len(asked) == 3 and not any("found" in line for line in asked)
    assert all(line.startswith("exec --bind") and python in line for line in asked)
    assert "from the config" not in log.read_text(), "values belong in the environment"
    assert all(str(Path(toy_run.root)) in line for line in asked)
