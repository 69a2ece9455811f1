"""The oracles are imported once and silently: what they warn of is not ours to mend.

They are needed, not optional: without them these tests fail. `make oracles` installs them.
"""

from __future__ import annotations

import os
import warnings

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")
# Before Triton is imported: its own functions are made for the interpreter too, or not.
os.environ["TRITON_INTERPRET"] = "1"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import trl  # noqa: F401
    from trl import GRPOTrainer, RLOOTrainer  # noqa: F401
    from trl.experimental.gkd import GKDTrainer  # noqa: F401
    from verl.trainer.ppo import core_algos, rollout_corr_helper  # noqa: F401
    from verl.workers.config import ActorConfig  # noqa: F401
