"""What holds for all tests."""

from __future__ import annotations

import contextlib
import os
import signal

# Here one kernel sees every file at once: what is missing is missing. Read at import, also by
# the processes that tests start.
os.environ.setdefault("SLURM_RL_VISIBLE_S", "0.2")

# A shell lets what it starts in the background ignore Ctrl-C, and so would every program that a test
# starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ImportError):  # the tests on a GPU need pytest alone
    from hypothesis import settings

    # Properties take as long as a busy machine makes them take. They see the same examples as long
    # as the code is the same: others are looked for on purpose, by EXPLORE=1.
    settings.register_profile("fixed", deadline=None, derandomize="EXPLORE" not in os.environ)
    settings.load_profile("fixed")
