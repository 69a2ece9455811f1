"""The trainer on Megatron-core: model, step, checkpoint, export. See `trainer.py` first.

It knows nothing of rollout engines, commits or Slurm; `stages/train.py` brings those together.
"""
