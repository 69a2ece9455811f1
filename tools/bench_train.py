"""Wall time of a resumed train process, imports included: what a job per step pays for training.

    python tools/bench_train.py [RUN]        (default: runs/quickstart, after `make demo`)

Runs the train stage of iteration 1 again, in a scratch directory, with the order it had: a process
that starts Python, loads the checkpoint, trains on the same samples, saves, and exits.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slurm_rl.types import dump_record, parse_order, parse_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    orders = sorted(options.run.glob("iterations/000001/train.t0/a*/order.json"))
    if not orders:
        raise SystemExit(f"{options.run}: no train stage of iteration 1; run `make demo` first")
    order = parse_order(orders[-1].read_bytes())
    walls, work = [], []
    for _ in range(options.repeat):
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "order.json"
            path.write_bytes(dump_record(dataclasses.replace(order, attempt_dir=name)))
            argv = [sys.executable, "-u", "-m", "slurm_rl.stages", str(path)]
            began = time.perf_counter()
            subprocess.run(argv, check=True, capture_output=True, env=os.environ)
            walls.append(time.perf_counter() - began)
            result = parse_result((Path(name) / "result.json").read_bytes())
            work.append(float(result.provenance["train_s"]))
    print(f"resumed train process: median {statistics.median(walls):.2f} s of wall time")
    print(f"  of which training and saving {statistics.median(work):.2f} s")
    print(f"  {min(walls):.2f} to {max(walls):.2f} s in {options.repeat} runs (wanted: below 6)")


if __name__ == "__main__":
    main()
