"""When the fused kernels are used: not without a GPU, Triton, or a compiler."""

import logging

import pytest
import torch

from slurm_rl.train import kernels


@pytest.fixture
def machine(monkeypatch):
    """`machine(gpu=, triton=, compilers=)`: as if this one had that."""

    def be(*, gpu=True, triton=True, compilers=("gcc",), problem=""):
        kernels._are_usable.cache_clear()
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: triton or None)
        found = kernels.shutil
        monkeypatch.setattr(found, "which", lambda name: name if name in compilers else None)
        monkeypatch.setattr(kernels.importlib, "import_module", lambda name: name)
        monkeypatch.setattr(kernels, "_try", lambda: problem)

    yield be
    kernels._are_usable.cache_clear()


def test_with_all_of_them(machine):
    machine()
    assert kernels.find_kernels("fused_vocab") == "slurm_rl.train.fused_vocab"


def test_a_compiler_of_ones_own(machine, monkeypatch):
    machine(compilers=("/opt/cc",))
    monkeypatch.setenv("CC", "/opt/cc")
    assert kernels.find_kernels("fused_layers")


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({"triton": False}, "the package triton is missing"),
        ({"problem": "a kernel cannot be built"}, "a kernel cannot be built: PyTorch"),
        ({"compilers": ()}, "a C compiler (CC, gcc or clang), which triton needs, is missing"),
    ],
)
def test_what_is_missing_is_said_once(machine, caplog, missing, said):
    machine(**missing)
    with caplog.at_level(logging.WARNING):
        assert kernels.find_kernels("fused_vocab") is None
        assert kernels.find_kernels("fused_layers") is None
    assert [record.message.startswith(said) for record in caplog.records] == [True]


def test_without_a_gpu_nothing_is_said(machine, caplog):
    machine(gpu=False, triton=False)
    assert kernels.find_kernels("fused_vocab") is None and not caplog.records


def test_what_a_kernel_fails_with_is_its_first_line(monkeypatch):
    """Without a GPU the trial itself fails: said, not raised."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    said = kernels._try()
    assert said.startswith("a kernel cannot be built or run (") and "\n" not in said
