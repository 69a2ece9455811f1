"""What holds for all tests."""

from __future__ import annotations

import os

# Here one kernel sees every file at once: what is missing is missing. Read at import, also by
# the processes that tests start.
os.environ.setdefault("SLURM_RL_VISIBLE_S", "0.2")
