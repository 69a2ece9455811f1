"""One real Slurm for all tests of this folder: started once, wiped at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.cluster import Cluster, running

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs the cluster."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.getuid() != 0:
        pytest.skip("a cluster of namespaces needs root")
    with running(Cluster(tmp_path_factory.mktemp("slurm"))) as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, whole and with an empty queue."""
    yield running_cluster
    running_cluster.tool("start")
    running_cluster.clear()
