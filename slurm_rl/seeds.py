"""Every random choice derives from the config's seed and a path of names and numbers.

Nothing here keeps state, so that a stage that starts again draws what it drew before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import xxhash

#: Rounds of a permutation. Small sets need many: with 6, the 24 orders of four items are not yet
#: equally likely.
_NUM_ROUNDS = 8


def derive_seed(seed: int, *path: int | str) -> int:
    """A seed in [0, 2**31) from `seed` and a path such as ("sample", iteration, prompt, 3).

    31 bits, since that is what SGLang's `sampling_seed` and every generator accept.
    """
    return xxhash.xxh3_64_intdigest(_render_path(seed, path)) & 0x7FFFFFFF


def derive_seeds(seed: int, *path: int | str, num: int) -> tuple[int, ...]:
    """`derive_seed(seed, *path, k)` for each k below `num`.

    >>> derive_seeds(1, "x", num=2) == (derive_seed(1, "x", 0), derive_seed(1, "x", 1))
    True
    """
    base = _render_path(seed, path)
    return tuple([xxhash.xxh3_64_intdigest(b"%b/i%d" % (base, k)) & 0x7FFFFFFF for k in range(num)])


def _render_path(seed: int, path: tuple[int | str, ...]) -> bytes:
    return "/".join([str(seed), *(f"{type(p).__name__[0]}{p}" for p in path)]).encode()


class Permutation:
    """An order of `num_items` numbers that holds no table: `order[position]` is computed.

    A Feistel network over pairs (left, right) of a grid side × side that holds the items: each
    round adds a keyed digest of one half to the other, modulo `side`, which can be undone, so
    that no two positions meet. A number outside the items goes through again until it is one
    (cycle walking); the grid is hardly larger than the set, so this is rare.
    """

    __slots__ = ("_keys", "_num_items", "_side")

    def __init__(self, num_items: int, *, key: bytes) -> None:
        self._num_items = num_items
        # Even: on an odd side every round is an even permutation, and half of all orders of a
        # small set would never come up.
        side = math.isqrt(max(num_items - 1, 0)) + 1
        self._side = side + side % 2
        self._keys = tuple(
            xxhash.xxh3_64_intdigest(key + bytes([round_])) for round_ in range(_NUM_ROUNDS)
        )

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self._num_items:
            raise IndexError(position)
        side, digest = self._side, xxhash.xxh3_64_intdigest
        item = position
        while True:
            left, right = divmod(item, side)
            for key in self._keys:
                mixed = digest(right.to_bytes(8, "little"), key)
                left, right = right, (left + mixed) % side
            item = left * side + right
            if item < self._num_items:
                return item

    def __iter__(self) -> Iterator[int]:
        return (self[position] for position in range(self._num_items))


def permutation(num_items: int, *, seed: int, epoch: int) -> Permutation:
    """The order in which an epoch visits `num_items` prompts: a function of (seed, epoch)."""
    return Permutation(num_items, key=f"{seed}/epoch/{epoch}/".encode())
