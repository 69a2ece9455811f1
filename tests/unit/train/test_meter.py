"""Times, rates and memory: what is counted, and in which unit."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from toy.batches import batch_of

from slurm_rl.errors import ConfigError
from slurm_rl.train import cpu
from slurm_rl.train.host_memory import check_host_memory, free_memory

with cpu.megatron_imports():
    from slurm_rl.train.meter import Meter, find_peak, forward_flops

CONFIG = SimpleNamespace(
    num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, kv_channels=4,
    num_query_groups=1, num_moe_experts=None, moe_router_topk=None, moe_ffn_hidden_size=None,
)  # fmt: skip


def test_flops_of_a_forward_pass_by_hand():
    """Each weight of a matrix is 2 FLOPs a token; each pair of tokens in causal attention 4 a
    channel (half of them seen)."""
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16  # q; k and v; output; MLP
    lengths = [5, 4]  # with a prompt of one token each
    linear = 2 * (2 * layer + 8 * 11)
    attention = 2 * sum(length**2 for length in lengths) * 2 * 8
    found = forward_flops(CONFIG, vocab_size=11, samples=batch_of([4, 3]))
    assert found == linear * sum(lengths) + attention


def test_phases_add_up_and_are_taken_once():
    meter = Meter()
    for _ in range(2):
        with meter.phase("a"):
            pass
    with pytest.raises(KeyError), meter.phase("b"):
        raise KeyError
    assert set(meter.take()) == {"perf/a_time", "perf/b_time"}
    assert meter.take() == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("some other device", None),
    ],
)
def test_the_peak_of_a_device(name, peak):
    assert find_peak(name) == peak


def test_memory_is_the_least_that_host_and_groups_leave(tmp_path: Path):
    own, group = tmp_path / "cgroup", tmp_path / "root" / "job" / "step"
    group.mkdir(parents=True)
    own.write_text("0::/job/step\n")
    whole = free_memory(root=tmp_path / "root", own=own)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    (group.parent / "memory.max").write_text("3000000\n")
    (group.parent / "memory.current").write_text("2900000\n")
    assert free_memory(root=tmp_path / "root", own=own) == 100_000
    # What is cached of files is given back.
    (group.parent / "memory.stat").write_text("anon 7\nactive_file 30\ninactive_file 500000\n")
    assert free_memory(root=tmp_path / "root", own=own) == 600_030
    assert whole > 600_030
    assert free_memory(root=tmp_path / "root", own=tmp_path / "none") > 600_030


def test_memory_in_a_group_of_the_first_version(tmp_path: Path):
    own, group = tmp_path / "cgroup", tmp_path / "root" / "memory" / "slurm" / "job_1"
    group.mkdir(parents=True)
    own.write_text("5:cpu,cpuacct:/other\n4:memory:/slurm/job_1\n")
    (group / "memory.limit_in_bytes").write_text("1000\n")
    (group / "memory.usage_in_bytes").write_text("400\n")
    assert free_memory(root=tmp_path / "root", own=own) == 600


def test_too_little_memory_is_said_before_the_work():
    check_host_memory(10, free_bytes=10, kind="train")
    with pytest.raises(
        ConfigError, match=r"saving takes 2\.0 GB on this node, and 1\.0 GB"
    ) as error:
        check_host_memory(2 * 10**9, free_bytes=10**9, kind="critic")
    assert "critic.slurm.mem" in str(error.value)
