"""The life of a tick: a job of one core that advances the chain, and tidies up behind it.

While the scheduler does not answer, or refuses, or the file system fails, it tries again for a
while: it may be the last one, and then nobody else would. Where no other tick is pending it looks
once more when a second one may be submitted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator

from slurm_rl.chain.advance import Chain, Outcome, advance, replace_tick
from slurm_rl.chain.plan_ticks import TICK_SPACING_S
from slurm_rl.chain.scheduler import token_of
from slurm_rl.errors import CorruptError, StorageError

logger = logging.getLogger(__name__)

_TRIES = 10
_PAUSE_S = 30.0
#: As of a link that did not do its work.
_EXIT_UNFINISHED = 75


def tick_life(
    chain: Chain, name: str, *, collect: Callable[[], object] = lambda: None
) -> Generator[float, None, int]:
    """Advance once; again, up to five minutes, if that was of no use. Yields sleeps; the exit
    status is 0 only if it was of use in the end.

    collect: a pass of garbage collection, after the run has been moved on. Raises CorruptError, and
    what the file system answered if it fails to the end: a tick that could not even read the run
    leaves another in its place, so that the run outlives the outage.
    """
    own = (token_of(name), None)
    outcome: Outcome | None = None
    for is_last in (*[False] * (_TRIES - 1), True):
        try:
            outcome = advance(chain, own=own)
            if outcome.is_settled:
                break
        except CorruptError:
            raise
        except (StorageError, OSError) as error:
            logger.warning("advance: %s", error)
            if is_last:
                replace_tick(chain)
                raise
        if not is_last:
            yield _PAUSE_S
    collect()
    if outcome is None or not outcome.is_settled:
        return _EXIT_UNFINISHED
    if outcome.plan.lacks_tick:
        yield TICK_SPACING_S + 1.0
        _advance_quietly(chain, own)
    return 0


def _advance_quietly(chain: Chain, own: tuple[str, int | None]) -> None:
    """For the second tick; the first has been submitted."""
    try:
        advance(chain, own=own)
    except CorruptError:
        raise
    except (StorageError, OSError) as error:
        logger.warning("advance: %s", error)
