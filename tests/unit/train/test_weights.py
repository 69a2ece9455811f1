"""Safetensors directories: layouts, damage, and writing them again byte for byte."""

import json

import pytest
import torch
from safetensors.torch import save_file

from slurm_rl.errors import ModelError
from slurm_rl.train.weights import (
    INDEX,
    SINGLE,
    WeightsReader,
    read_layout,
    write_weights,
)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(4, 3, generator=generator),
        "b": torch.randn(5, generator=generator).bfloat16(),
        "c": torch.randn(2, 2, generator=generator).half(),
    }


@pytest.fixture
def sharded(tmp_path, tensors):
    folder = tmp_path / "model"
    folder.mkdir()
    homes = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    for name in set(homes.values()):
        part = {t: tensors[t] for t, home in homes.items() if home == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 66}, "weight_map": homes}))
    return folder


def test_written_again_the_bytes_are_the_same(sharded, tensors, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    # Handed over in float32 and in another order: dtypes and files are the layout's.
    stream = ((name, tensors[name].float()) for name in ("c", "b", "a"))
    names = list(write_weights(out, stream, layout=read_layout(sharded)))
    assert sorted(names) == sorted(path.name for path in sharded.iterdir())
    for name in names:
        assert (out / name).read_bytes() == (sharded / name).read_bytes(), name


def test_slices_are_read_from_the_right_file(sharded, tensors):
    with WeightsReader(sharded, read_layout(sharded)) as reader:
        assert torch.equal(reader.read("a", 0, 1, 3), tensors["a"][1:3])
        assert torch.equal(reader.read("a", 1, 0, 2), tensors["a"][:, 0:2])
        assert torch.equal(reader.read("b", None, 0, 0), tensors["b"])
        with pytest.raises(ModelError, match="tensor z is missing"):
            reader.read("z", None, 0, 0)


@pytest.mark.parametrize("keep", [0, 5, 40, 200])
def test_a_truncated_file_is_named(tmp_path, tensors, keep):
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    data = (tmp_path / SINGLE).read_bytes()
    assert keep < len(data)
    (tmp_path / SINGLE).write_bytes(data[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: ") as error:
        read_layout(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [b"\x04" + b"\0" * 7 + b"nope", b"\x02" + b"\0" * 7 + b"[]"])
def test_a_file_of_something_else_is_named(tmp_path, data):
    (tmp_path / SINGLE).write_bytes(data)
    with pytest.raises(ModelError, match="not a safetensors file"):
        read_layout(tmp_path)


def test_missing_files_are_named(tmp_path, sharded):
    with pytest.raises(ModelError, match=r"model\.safetensors: there is no such file"):
        read_layout(tmp_path)
    (sharded / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors: there is no such file"):
        read_layout(sharded)


def test_an_index_that_promises_more_is_refused(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["d"] = "model-1.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="do not hold d"):
        read_layout(sharded)
