"""Safetensors directories: layouts, damage, and writing them again byte for byte."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from slurm_rl.errors import ModelError
from slurm_rl.train.weights import (
    INDEX,
    SINGLE,
    WeightsReader,
    plan_layout,
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
    with pytest.raises(ModelError, match=r"model-1\.safetensors does not hold d"):
        read_layout(sharded)


def test_files_are_cut_at_a_size_and_the_index_says_where_what_is(tmp_path):
    shapes = {"a": (4, 3), "b": (5,), "c": (100,), "d": (2, 2), "e": (1,)}
    dtypes = {name: torch.bfloat16 if name == "b" else torch.float32 for name in shapes}
    layout = plan_layout(shapes, dtypes, file_size_bytes=60)
    # 48 + 10 bytes fit; 400 are too many for any file; 16 + 4 fit.
    members = [("a", "b"), ("c",), ("d", "e")]
    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert layout.files == dict(zip(names, members, strict=True))
    tensors = {name: torch.full(shape, 1.0) for name, shape in shapes.items()}
    written = list(write_weights(tmp_path, tensors.items(), layout=layout))
    assert written == [*names, INDEX]
    assert read_layout(tmp_path) == layout
    assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"] == 478


def test_transformers_reads_what_is_cut(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=30,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    tensors = model.state_dict()
    config.save_pretrained(tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layout = plan_layout(shapes, dict.fromkeys(shapes, torch.float32), file_size_bytes=5000)
    assert len(layout.files) > 3
    list(write_weights(tmp_path, tensors.items(), layout=layout))
    found = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_model_that_fits_is_one_file_without_an_index():
    layout = plan_layout({"a": (2,)}, {"a": torch.float32})
    assert layout.files == {SINGLE: ("a",)} and layout.index_text is None


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    limit=st.integers(1, 120),
)
def test_no_file_is_larger_than_asked_unless_one_tensor_is(sizes, limit):
    shapes = {f"t{i}": (size,) for i, size in enumerate(sizes)}
    layout = plan_layout(shapes, dict.fromkeys(shapes, torch.float32), file_size_bytes=limit)
    for members in layout.files.values():
        assert len(members) == 1 or sum(shapes[m][0] * 4 for m in members) <= limit
    held = [m for members in layout.files.values() for m in members]
    assert sorted(held) == sorted(shapes)
