"""Layouts: read by Megatron's names, and refused with both numbers where ranks do not fit."""

import pytest

from slurm_rl.errors import ConfigError
from slurm_rl.models.layout import Layout, check_ranks, read_layout_sizes


def test_sizes_are_one_unless_they_are_set() -> None:
    assert read_layout_sizes({}) == Layout()
    assert read_layout_sizes({"virtual_pipeline_model_parallel_size": None}) == Layout()
    assert read_layout_sizes({"context_parallel_size": 4}).context == 4


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (Layout(), 1),
        (Layout(tensor=2, pipeline=2, context=2), 8),
        (Layout(pipeline=2, chunks=3), 4),
        # Experts take their ranks from the others'.
        (Layout(tensor=2, experts=2, expert_tensor=1), 2),
        (Layout(context=2, experts=4), 4),
    ],
)
def test_layouts_that_fit(layout: Layout, ranks: int) -> None:
    check_ranks(layout, num_ranks=ranks)


@pytest.mark.parametrize(
    ("layout", "ranks", "said"),
    [
        (Layout(tensor=2), 1, "1 ranks cannot be split into tensor_model_parallel_size 2"),
        (Layout(context=3), 4, "× context_parallel_size 3"),
        (Layout(experts=4), 2, "2 ranks cannot be split into expert_tensor_parallel_size 1 × exp"),
        (Layout(tensor=2, experts=2), 2, "expert_tensor_parallel_size 2 × expert_model_parallel"),
        (Layout(chunks=2), 2, "virtual_pipeline_model_parallel_size = 2 has no effect"),
    ],
)
def test_layouts_that_do_not(layout: Layout, ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_ranks(layout, num_ranks=ranks)
