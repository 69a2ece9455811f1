"""Ranks from the environment, ports, addresses: and nothing is ever guessed."""

import socket
import threading

import pytest

from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError
from slurm_rl.train import distributed
from slurm_rl.train.distributed import (
    World,
    bind_free_port,
    interface_address,
    reachable_address,
    read_world,
)


def settings_with(**top):
    return Settings.model_validate(
        {
            "run": {"name": "t", "dir": "/x"},
            "num_rollout": 1,
            "rollout": {"prompt_data": "p", "rollout_batch_size": 1},
            "train": {"global_batch_size": 1},
        }
        | top
    )


def test_the_launchers_variables_come_before_sruns():
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "SLURM_PROCID": "0"}
    assert read_world(env, expected=2) == World(1, 2, 1)


def test_sruns_variables():
    env = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "99",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_NODES": "2",
    }
    assert read_world(env, expected=8) == World(5, 8, 1, num_nodes=2)


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    ],
)
def test_a_world_of_another_size_is_refused_with_both_numbers(env):
    with pytest.raises(ConfigError, match=r"= 1, but the configuration makes 4 ranks"):
        read_world(env, expected=4)


def test_a_missing_environment_is_never_a_world_of_one():
    with pytest.raises(ConfigError, match="4 ranks are expected"):
        read_world({}, expected=4)
    assert read_world({}, expected=1) == World(0, 1, 0)


def test_the_port_is_below_the_ephemeral_range_and_already_bound():
    listeners = [bind_free_port() for _ in range(5)]
    try:
        ports = [listener.getsockname()[1] for listener in listeners]
        assert len(set(ports)) == 5
        assert all(distributed.LOWEST_PORT <= port < 32768 for port in ports)
        with socket.socket() as second, pytest.raises(OSError):
            second.bind(("", ports[0]))
    finally:
        for listener in listeners:
            listener.close()


def test_addresses():
    assert reachable_address(settings_with(), num_nodes=1) == "127.0.0.1"
    assert interface_address("lo") == "127.0.0.1"
    assert reachable_address(settings_with(network_interface="lo"), num_nodes=3) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"'nonesuch0' has no IPv4 address.*there are"):
        reachable_address(settings_with(network_interface="nonesuch0"), num_nodes=2)
    with pytest.raises(ConfigError, match="does not resolve"):
        reachable_address(settings_with(hostname_suffix=".nowhere.invalid"), num_nodes=2)


def test_two_ranks_meet_through_the_file(tmp_path):
    """The second rank waits for the file, and reads a port that is already served."""
    settings, stores = settings_with(), {}

    def meet(rank):
        world = World(rank, 2, rank)
        stores[rank] = distributed._meet(world, attempt_dir=tmp_path, settings=settings)

    late = threading.Thread(target=meet, args=(1,))
    late.start()
    meet(0)
    late.join(timeout=30)
    address, port = (tmp_path / distributed.RENDEZVOUS).read_text().strip().rsplit(":", 1)
    assert address == "127.0.0.1" and int(port) < 32768
    stores[1].set("key", "value")
    assert stores[0].get("key") == b"value"
