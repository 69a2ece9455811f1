import datetime
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from slurm_rl.errors import DataError
from slurm_rl.rollout.data.columns import FolderSource, ParquetSource
from slurm_rl.rollout.data.rows import Keys

#: Written by `datasets` itself (5.2, `save_to_disk` with two shards).
FOLDER = Path(__file__).parents[4] / "tests" / "golden" / "datasets-folder"
KEYS = Keys("data", "q", "a")


def rows_of(num: int) -> list[dict[str, Any]]:
    return [
        {
            "q": [{"role": "user", "content": f"é{k}"}],
            "a": k,
            "m": {"level": k % 3, "tag": None},
            "t": json.dumps([{"type": "function"}]) if k % 2 else None,
            "unused": "x" * 50,
        }
        for k in range(num)
    ]


def write(path: Path, rows: list[dict[str, Any]], *, group: int = 7) -> str:
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return str(path)


def save(folder: Path, rows: list[dict[str, Any]], *, batch: int = 3, files: int = 2) -> str:
    """As `datasets` lays a folder out."""
    folder.mkdir()
    table = pa.Table.from_pylist(rows)
    names, size = [], -(-len(rows) // files)
    for k in range(files):
        names.append({"filename": f"data-{k:05}-of-{files:05}.arrow"})
        with pa.ipc.new_stream(str(folder / names[-1]["filename"]), table.schema) as writer:
            writer.write_table(table.slice(k * size, size), max_chunksize=batch)
    (folder / "state.json").write_text(json.dumps({"_data_files": names}))
    return str(folder)


def open_either(
    kind: str, tmp_path: Path, rows: Any, wanted: slice = slice(None), keys: Keys = KEYS
):  # type: ignore[no-untyped-def]
    if kind == "parquet":
        return ParquetSource(write(tmp_path / "x.parquet", rows), wanted, keys)
    return FolderSource(save(tmp_path / "folder", rows), wanted, keys)


both = pytest.mark.parametrize("kind", ["parquet", "folder"])


@both
@pytest.mark.parametrize("wanted", [slice(None), slice(5, -4), slice(-3, None), slice(0, 1)])
def test_any_row_in_any_order_is_that_of_the_table(
    tmp_path: Path, kind: str, wanted: slice
) -> None:
    rows = rows_of(40)
    source = open_either(kind, tmp_path, rows, wanted, Keys("d", "q", "a", "m", "t"))
    expected = rows[wanted]
    order = list(range(source.num_rows))
    random.Random(0).shuffle(order)
    assert len(order) == len(expected)
    for row in order:
        prompt = source.read(row)
        assert (prompt.row, prompt.prompt) == (row, expected[row]["q"])
        assert (prompt.label, prompt.metadata) == (expected[row]["a"], expected[row]["m"])
        assert prompt.tools == ([{"type": "function"}] if expected[row]["t"] else None)
    source.check()
    source.close()


@both
def test_fingerprints_follow_the_bytes_and_the_slice(tmp_path: Path, kind: str) -> None:
    def fingerprint(name: str, rows: Any, wanted: slice = slice(None)) -> str:
        (tmp_path / name).mkdir()
        return str(open_either(kind, tmp_path / name, rows, wanted).fingerprint)

    whole = fingerprint("a", rows_of(20))
    assert fingerprint("b", rows_of(20)) == whole
    assert fingerprint("c", rows_of(20), slice(0, 20)) == whole
    part = fingerprint("d", rows_of(20), slice(3, None))
    assert part != whole
    assert fingerprint("e", rows_of(20), slice(3, 20)) == part
    changed = rows_of(20)
    changed[11]["a"] = 12
    assert fingerprint("f", changed) != whole


@both
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (datetime.datetime(2020, 1, 1), "row 3: holds a value that JSON cannot"),
        (b"abc", "row 3: holds a value that JSON cannot"),
        (float("nan"), "row 3: holds a value that JSON cannot"),
    ],
)
def test_what_a_commit_could_not_hold_is_refused_when_it_is_read(
    tmp_path: Path, kind: str, value: Any, message: str
) -> None:
    rows = [{"q": "x", "a": None} for _ in range(5)]
    rows[3]["a"] = value
    with pytest.raises(DataError, match=message) as caught:
        open_either(kind, tmp_path, rows).check()
    assert "\n" not in str(caught.value)


@both
def test_missing_columns_and_bad_rows_say_where(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataError, match=r"no key 'question' \(rollout.input_key\); there are"):
        open_either(kind, tmp_path, rows_of(3), keys=Keys("d", "question"))
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    rows = [{"q": "x" if k != 8 else None} for k in range(10)]
    with pytest.raises(DataError, match="row 8: 'q' is null; a prompt is a text"):
        open_either(kind, tmp_path, rows, slice(2, None), Keys("d", "q")).check()


@both
def test_a_slice_without_rows_and_data_without_rows(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataError, match=r"@\[50:\] has no prompts \(10 rows in all\)"):
        open_either(kind, tmp_path, rows_of(10), slice(50, None))


def test_what_datasets_itself_has_saved() -> None:
    keys = Keys("d", "chat", "answer", "info")
    source = FolderSource(str(FOLDER), slice(1, None), keys)
    assert source.num_rows == 6
    prompt = source.read(3)  # in the second file
    assert prompt.prompt == [{"role": "user", "content": "4"}]
    assert (prompt.label, prompt.metadata) == ("5", {"level": 1, "tag": "even"})
    source.check()
    source.close()


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        FolderSource(str(tmp_path / "no"), slice(None), KEYS)
    (tmp_path / "x.data").write_text("")
    with pytest.raises(DataError, match=r"neither \.jsonl, \.parquet nor a folder"):
        FolderSource(str(tmp_path / "x.data"), slice(None), KEYS)
    with pytest.raises(DataError, match="not a folder that `datasets` saved"):
        FolderSource(str(tmp_path), slice(None), KEYS)
    shutil.copytree(FOLDER, tmp_path / "dict" / "test")
    shutil.copytree(FOLDER, tmp_path / "dict" / "train")
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"several splits \(test, train\); name one of them"):
        FolderSource(str(tmp_path / "dict"), slice(None), KEYS)


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and then nothing like it")
    with pytest.raises(DataError, match="not a parquet file") as caught:
        ParquetSource(str(tmp_path / "x.parquet"), slice(None), KEYS)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="No such file"):
        ParquetSource(str(tmp_path / "y.parquet"), slice(None), KEYS)
    shutil.copytree(FOLDER, tmp_path / "f")
    (tmp_path / "f" / "data-00001-of-00002.arrow").write_bytes(b"no arrow")
    with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow: cannot be read"):
        FolderSource(str(tmp_path / "f"), slice(None), Keys("d", "question"))
    (tmp_path / "f" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        FolderSource(str(tmp_path / "f"), slice(None), Keys("d", "question"))


def test_row_groups_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_rl.rollout.data.columns._KEPT_BYTES", 2000)
    rows = [{"q": "x" * 500, "a": k} for k in range(40)]
    source = ParquetSource(write(tmp_path / "x.parquet", rows, group=2), slice(None), KEYS)
    for row in range(40):
        assert source.read(row).label == row
    assert 1 <= len(source._groups) <= 2
