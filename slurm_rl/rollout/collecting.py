"""How often Python looks for cycles while a rollout makes and drops millions of small objects.

Owns the collector's settings for the time of a rollout. Samples have no cycles; they go when the
last one lets go of them. With the defaults the collector looks at all that was imported, and at
every sample in flight, many times a second: a quarter of the pipeline's time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects made and not dropped before the youngest are looked at, and how many such looks make an
#: older generation's turn. What cycles there are (a failed task with its traceback) wait for as
#: long; arrays in cycles that a user's reward makes, too: `gc.collect()` is theirs to call.
_THRESHOLDS = (50_000, 20, 20)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look rarely, and not at what is there already. Afterwards as often as before."""
    before, was_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not was_frozen:
            gc.unfreeze()
