"""What every rank of a test imports, once, in the process that ranks are forked from.

Four seconds a rank otherwise. Not where there is a GPU: a forked process cannot use CUDA after
its parent has looked for one.
"""

from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    from slurm_rl.train.cpu import megatron_imports

    with megatron_imports():
        import slurm_rl.train.trainer  # noqa: F401
