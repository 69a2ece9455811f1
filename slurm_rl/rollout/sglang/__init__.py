"""SGLang servers as an engine."""

from slurm_rl.rollout.sglang.engine import SglangEngine
from slurm_rl.rollout.sglang.nodes import serve_follower
from slurm_rl.rollout.sglang.options import SglangOptions, plan_options

__all__ = ["SglangEngine", "SglangOptions", "plan_options", "serve_follower"]
