"""Every random choice derives from the config's seed and a path of names and numbers.

Nothing here keeps state, so that a stage that starts again draws what it drew before.
"""

from __future__ import annotations

import random

import xxhash


def derive_seed(seed: int, *path: int | str) -> int:
    """A seed in [0, 2**31) from `seed` and a path such as ("sample", iteration, prompt, 3).

    31 bits, since that is what SGLang's `sampling_seed` and every generator accept.
    """
    text = "/".join([str(seed), *(f"{type(p).__name__[0]}{p}" for p in path)])
    return xxhash.xxh3_64_intdigest(text.encode()) & 0x7FFFFFFF


def permutation(num_items: int, *, seed: int, epoch: int) -> list[int]:
    """The order in which an epoch visits `num_items` prompts: a function of (seed, epoch)."""
    order = list(range(num_items))
    random.Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
    return order
