import gc

import pytest

from slurm_rl.rollout.collecting import rare_collections


def test_cycles_are_looked_for_rarely_and_as_before_afterwards() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    made = [[] for _ in range(1000)]
    with pytest.raises(KeyError), rare_collections():
        assert gc.isenabled()
        assert gc.get_threshold()[0] > before[0]
        assert gc.get_freeze_count() >= frozen + len(made)
        raise KeyError
    assert gc.get_threshold() == before
    assert (gc.get_freeze_count() > 0) == (frozen > 0), "what others froze stays so"


def test_cycles_still_go() -> None:
    """What a rollout's failed tasks leave must not pile up."""
    gone = 0

    class Loop:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            nonlocal gone
            gone += 1

    with rare_collections():
        for _ in range(120_000):
            Loop()
        assert gone >= 50_000
