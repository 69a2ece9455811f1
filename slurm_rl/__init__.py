"""slurm-rl: reinforcement learning of language models, each training step a separate Slurm job."""

__version__ = "0.1.0"
