"""Rewards: from a group of samples without reward to a graded one.

`Grader` is what the stages use. A reward is a built-in by name (`BUILT_IN`), or the user's
`function(args, sample) -> number`, plain or a coroutine, by dotted path; `args` has every setting
of `rollout` and of the top level as an attribute, `sample` is a `samples.Sample` whose reward is
still None. The user's code comes from the run's snapshot, which the stage's entry puts on
`sys.path`.
"""

from slurm_rl.rollout.rewards.functions import (
    BUILT_IN,
    BuiltIn,
    RewardFunction,
    describe,
    find_reward,
)
from slurm_rl.rollout.rewards.grader import Graded, Grader
from slurm_rl.rollout.rewards.plan import find_rewards

__all__ = [
    "BUILT_IN",
    "BuiltIn",
    "Graded",
    "Grader",
    "RewardFunction",
    "describe",
    "find_reward",
    "find_rewards",
]
