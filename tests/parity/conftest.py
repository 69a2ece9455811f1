"""Tiny models made once, and trainers that are closed again."""

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import trains

from slurm_rl.stages.init import run_init


@pytest.fixture(scope="session")
def made_models(tmp_path_factory):
    """`made_models(settings)`: the init commit of a model, made once per shape."""
    known = {}

    def make(settings):
        key = settings.init_model.model_dump_json()
        if key not in known:
            root = tmp_path_factory.mktemp("init")
            order = trains.make_order(root, "init", 0, {}, "a0001-init")
            result = run_init(order, settings)
            known[key] = trains.as_input("checkpoint", 0, "init", Path(order.attempt_dir), result)
        return known[key]

    return make


@pytest.fixture(autouse=True)
def collected():
    """A trainer lies in circles; until they are collected its groups keep fifty threads."""
    yield
    gc.collect()


@pytest.fixture
def open_trainers():
    """`open_trainers(order, settings)` opens a trainer; it is closed when another is opened,
    by `open_trainers.close()`, or when the test ends."""
    from slurm_rl.stages.train import open_trainer

    opened = []

    def close():
        while opened:
            opened.pop().close()

    def open_one(order, settings):
        # One process has one set of process groups, so one trainer at a time.
        close()
        opened.append(open_trainer(order, settings))
        return opened[-1]

    open_one.close = close
    yield open_one
    close()
