"""Tests that need a GPU. Each says what it ran on; without a GPU they fail, they do not skip.

The SGLang server may live in an environment of its own:

    SLURM_RL_SGLANG_PYTHON      its interpreter (default: this one)
    SLURM_RL_SGLANG_PYTHONPATH  a PYTHONPATH for the server alone
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device_name() -> str:
    """The card's name."""
    import torch

    assert torch.cuda.is_available(), "no GPU: run these on a machine with one"
    name = torch.cuda.get_device_name()
    print(f"\nGPU: {name}, torch {torch.__version__}")
    return str(name)
