"""Headers of weights: what safetensors itself would refuse is one line, and nothing else is refused."""

import json
import struct

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from slurm_rl.errors import ModelError
from slurm_rl.models.headers import INDEX, SINGLE, read_headers

GOOD = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [8, 12]},
}


def write(folder, header, size=12):
    text = header if isinstance(header, str) else json.dumps(header)
    data = text.encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(data)) + data + bytes(size))


def is_taken_by_safetensors(path):
    try:
        with safe_open(path, framework="numpy") as file:
            file.keys()
            return True
    except SafetensorError:
        return False


def test_what_safetensors_writes_is_read(tmp_path):
    tensors = {"x": numpy.zeros((3, 2), "float16"), "y": numpy.zeros(0, "float32")}
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "np"})
    found = read_headers(tmp_path)
    assert found.shapes == {"x": (3, 2), "y": (0,)}
    assert found.metadata == {SINGLE: {"format": "np"}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": ["F32"]}, "a has dtype"),
        ({"dtype": "I8"}, "a has dtype I8, and F64, F32, F16, BF16 are known"),
        ({"data_offsets": [0, "8"]}, "not a safetensors file"),
        ({"data_offsets": [0, None]}, "not a safetensors file"),
        ({"data_offsets": [0, 4]}, "a lies from 0 to 4, where 0 to 8 is"),
        ({"data_offsets": [4, 12]}, "lies from"),
        ({"shape": [-2]}, r"a has shape \[-2\]"),
        ({"shape": [2.0]}, r"a has shape \[2.0\]"),
        ({"shape": 2}, "not a safetensors file"),
    ],
)
def test_an_entry_that_is_none(tmp_path, changes, said):
    write(tmp_path, GOOD | {"a": GOOD["a"] | changes})
    with pytest.raises(ModelError, match=said) as error:
        read_headers(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / SINGLE}: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", "3", '{"a": 1}', '{"__metadata__": 3}'])
def test_a_header_that_is_none(tmp_path, text):
    write(tmp_path, text)
    with pytest.raises(ModelError, match=SINGLE):
        read_headers(tmp_path)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ModelError, match="not an index"):
        read_headers(tmp_path)


def test_an_index_names_the_file_of_each_tensor(tmp_path):
    write(tmp_path, GOOD)
    save_file({"c": numpy.zeros(1, "float32")}, tmp_path / "other.safetensors")
    homes = {"a": SINGLE, "b": SINGLE, "c": "other.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": homes}))
    assert set(read_headers(tmp_path).shapes) == {"a", "b", "c"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": homes | {"b": "other.safetensors"}}))
    with pytest.raises(ModelError, match=r"other\.safetensors does not hold b"):
        read_headers(tmp_path)


SIZES = st.integers(-1, 3)


@given(
    shape=st.lists(SIZES, max_size=2),
    offsets=st.lists(st.integers(-1, 13), min_size=1, max_size=3),
    size=st.integers(0, 13),
)
def test_it_takes_what_safetensors_takes(tmp_path_factory, shape, offsets, size):
    folder = tmp_path_factory.mktemp("weights")
    write(folder, {"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}, size)
    try:
        read_headers(folder)
        is_taken = True
    except ModelError:
        is_taken = False
    assert is_taken == is_taken_by_safetensors(folder / SINGLE)
