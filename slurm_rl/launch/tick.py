"""The life of a tick: a job of one core whose only work is to advance the chain.

While the scheduler does not answer, or refuses, it tries again for a while: it may be the last
one, and then nobody else would.
"""

from __future__ import annotations

from collections.abc import Generator

from slurm_rl.chain.advance import Chain, advance
from slurm_rl.chain.scheduler import token_of

_TRIES = 10
_PAUSE_S = 30.0


def tick_life(chain: Chain, name: str) -> Generator[float, None, int]:
    """Advance once; again, up to five minutes, if the scheduler was of no use. Yields sleeps."""
    own = (token_of(name), None)
    for _ in range(_TRIES - 1):
        if advance(chain, own=own).is_settled:
            return 0
        yield _PAUSE_S
    advance(chain, own=own)
    return 0
