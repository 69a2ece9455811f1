"""What a job per step costs: from a COMMIT to the successor's first useful work, on a real Slurm.

    eval "$(tools/slurm_cluster.sh env)"        (or any Slurm that sbatch reaches)
    python tools/bench_slurm.py [--steps 6]

Two chains in turn on the same cluster, each of dependent jobs that start one Python program under
srun: *bare*, plain sbatch scripts with `--dependency=afterany`, and *ours*, a run with toy stages.
The program's first statement notes the time. Bare: from the end of a program to the start of the
next. Ours: from the COMMIT of a stage to the start of the next stage's program. Prints both medians
and their ratio.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

#: Both chains run this: it notes when it began and, for the bare one, when it ended.
_PROGRAM = """\
import time; began = time.time()
import sys, pathlib
sys.path.insert(0, {tests!r})
mode, *rest = sys.argv[1:]
from toy.program import main   # imports what a small stage program does
if mode == "bare":
    pathlib.Path(rest[0]).write_text(f"{{began}} {{time.time()}}")
else:
    pathlib.Path(rest[-1]).parent.joinpath("first-work").write_text(str(began))
    raise SystemExit(main(rest))
"""


def measure_bare(folder: Path, program: Path, num_jobs: int) -> list[float]:
    """Gaps of a chain of plain dependent jobs, in seconds."""
    python = shlex.quote(sys.executable)
    previous, marks = "", []
    for number in range(num_jobs):
        mark = folder / f"bare-{number}"
        marks.append(mark)
        script = f"#!/bin/bash\nsrun {python} {program} bare {mark}\n"
        argv = ["sbatch", "--parsable", "-o", "/dev/null", "-n1", "-t5"]
        argv += [f"--dependency=afterany:{previous}"] if previous else ["--begin=now+2"]
        done = subprocess.run(argv, input=script, capture_output=True, text=True, check=True)
        previous = done.stdout.strip()
    wait_for(marks[-1])
    times = [[float(word) for word in mark.read_text().split()] for mark in marks]
    return [after[0] - before[1] for before, after in itertools.pairwise(times)]


def measure_ours(folder: Path, program: Path, num_iterations: int) -> list[float]:
    """Gaps of a run's chain, in seconds."""
    from toy.model import write_model

    wrapper = folder / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {program} ours "$@"\n')
    wrapper.chmod(0o755)
    (folder / "prompts.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    stage = {"python": str(wrapper), "env": {"TOY_SECOND": 0.01}}
    config = {
        "run": {"name": "bench", "dir": str(folder)},
        "hf_checkpoint": str(write_model(folder / "model")),
        "num_rollout": num_iterations,
        "launcher": "slurm",
        "host_python": sys.executable,
        "slurm": {"time": "00:05:00"},
        "init": stage,
        "rollout": stage
        | {
            "engine": "embedded",
            "prompt_data": str(folder / "prompts.jsonl"),
            "label_key": "label",
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rm_type": "exact_match",
        },
        "train": stage | {"global_batch_size": 4, "megatron": {"lr": 1e-3}},
    }
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(config))
    program_name = Path(sys.executable).with_name("slurm-rl")
    subprocess.run([program_name, "submit", path], check=True, stdout=subprocess.DEVNULL)
    iterations = folder / "bench" / "iterations"
    stages = [
        iterations / f"{i:06d}" / f"{kind}.t0"
        for i in range(num_iterations)
        for kind in ("rollout", "train")
    ]
    wait_for(stages[-1] / "COMMIT")
    subprocess.run([program_name, "advance", folder / "bench"], check=True)
    gaps = []
    for before, after in itertools.pairwise(stages):
        committed = (before / "COMMIT").stat().st_mtime
        (first_work,) = after.glob("a0001-*/first-work")
        gaps.append(float(first_work.read_text()) - committed)
    return gaps


def wait_for(path: Path, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} did not appear")
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="iterations, of two jobs each")
    parser.add_argument("--dir", type=Path, help="a folder that the nodes see (default: temporary)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        folder.chmod(0o755)
        program = folder / "program.py"
        program.write_text(_PROGRAM.format(tests=str(ROOT / "tests")))
        bare = measure_bare(folder, program, 2 * options.steps)
        ours = measure_ours(folder, program, options.steps)
        bare += measure_bare(folder, program, 2 * options.steps)
    for label, gaps in (("bare dependent jobs", bare), ("COMMIT to first work", ours)):
        spread = f"{min(gaps):.2f} to {max(gaps):.2f}"
        print(f"{label}: median {statistics.median(gaps):.2f} s ({spread}, {len(gaps)} gaps)")
    ratio = statistics.median(ours) / statistics.median(bare)
    print(f"ratio {ratio:.2f} (wanted: at most 1.3)")


if __name__ == "__main__":
    main()
