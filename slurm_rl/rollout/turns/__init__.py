"""Several turns: custom generate functions, tools, environments."""

from slurm_rl.rollout.turns.custom import CustomSample
from slurm_rl.rollout.turns.generate import make_generate
from slurm_rl.rollout.turns.protocol import Environment, Step
from slurm_rl.rollout.turns.tools import ToolError, tool_schemas

__all__ = ["CustomSample", "Environment", "Step", "ToolError", "make_generate", "tool_schemas"]
