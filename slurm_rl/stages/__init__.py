"""The stage programs: `python -m slurm_rl.stages <attempt>/order.json`, once per rank.

Each kind is a module here with one function, `run_<kind>(order, settings) -> Result`, which
writes below `order.attempt_dir` only and publishes nothing. `__main__` is the process around
it: it reads the order, logs, and leaves `result.json` or `failure.json`.
"""
