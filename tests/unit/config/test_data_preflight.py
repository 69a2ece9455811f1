import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from slurm_rl.config.data_preflight import check_data_files
from slurm_rl.config.schema import Settings

Load = Callable[..., Settings]
FOLDER = Path(__file__).parents[2] / "golden" / "datasets-folder"


@pytest.fixture
def lines(load: Load, tmp_path: Path) -> Callable[..., list[str]]:
    (tmp_path / "x.jsonl").write_text(
        '{"prompt": "a", "label": 1}\n\n{"prompt": "b", "label": 2, "m": {}}\n'
    )
    parquet.write_table(pa.table({"prompt": ["a"], "label": [1]}), tmp_path / "x.parquet")
    shutil.copytree(FOLDER, tmp_path / "folder")

    def of(**values: Any) -> list[str]:
        settings = load(**json.loads(json.dumps(values).replace("@/", f"{tmp_path}/")))
        found = [problem.render({(): "f"}) for problem in check_data_files(settings)]
        return [line.removeprefix("f: ").replace(f"{tmp_path}/", "@/") for line in found]

    return of


def test_each_form_is_fine_as_it_should_be(lines: Callable[..., list[str]]) -> None:
    sets = [
        {"name": "a", "path": "@/x.jsonl@[0:1]", "metadata_key": "m"},
        {"name": "b", "path": "@/x.parquet"},
        {"name": "c", "path": "@/folder", "input_key": "question", "label_key": "answer"},
        {"name": "d", "path": "reasoning_gym:chain_sum", "options": {"size": 4}},
    ]
    assert lines(rollout__prompt_data=sets, rollout__label_key="label") == []
    # Rows may lack metadata, and so may whole data sets of a mixture.
    assert lines(rollout__prompt_data=sets, rollout__metadata_key="anything") == []
    assert lines(rollout__prompt_data="@/x.jsonl", rollout__metadata_key="m") == []


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"rollout__prompt_data": "@/y.jsonl"}, 'rollout.prompt_data = "@/y.jsonl" is not a file; mend the path'),
        ({"rollout__prompt_data": "@/y.parquet"}, 'rollout.prompt_data = "@/y.parquet" is not there; mend the path'),
        ({"rollout__prompt_data": "@/nowhere"}, 'rollout.prompt_data = "@/nowhere" is not there; mend the path'),
        ({"rollout__prompt_data": "@/x.jsonl", "rollout__metadata_key": "meta"}, 'rollout.metadata_key = "meta" is not a key of the first lines of @/x.jsonl; it has prompt, label, m'),
        ({"rollout__prompt_data": "@/x.parquet", "rollout__input_key": "q"}, 'rollout.input_key = "q" is not a key of @/x.parquet; it has prompt, label'),
        ({"rollout__prompt_data": "@/folder"}, 'rollout.input_key = "prompt" is not a key of @/folder; it has question, answer, chat, info, spare'),
        ({"rollout__prompt_data": "reasoning_gym:chain_sums"}, 'rollout.prompt_data = "reasoning_gym:chain_sums" is not a data set of reasoning-gym; did you mean reasoning_gym:chain_sum?'),
        ({"rollout__prompt_data": "reasoning_gym:chain_sum", "rollout__data_options": {"min_terms": 0}}, 'rollout.data_options = {"min_terms": 0} is refused by chain_sum (AssertionError: min_terms must be positive); see the data set\'s configuration in reasoning-gym'),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(
    lines: Callable[..., list[str]], values: dict[str, Any], line: str
) -> None:
    assert lines(**values) == [line]


def test_a_mixture_s_and_an_evaluation_s_own_keys_are_named_there(
    lines: Callable[..., list[str]],
) -> None:
    found = lines(
        rollout__prompt_data=[{"name": "a", "path": "@/x.jsonl", "label_key": "answer"}],
        eval__aime={"prompt_data": "@/x.jsonl", "input_key": "q"},
        eval__gone={"prompt_data": "@/gone.jsonl"},
    )
    assert found == [
        'rollout.prompt_data[0].label_key = "answer" is not a key of @/x.jsonl, line 1; it has prompt, label',
        'eval.aime.input_key = "q" is not a key of @/x.jsonl, line 1; it has prompt, label',
        'eval.gone.prompt_data = "@/gone.jsonl" is not a file; mend the path',
    ]


def test_folders_and_files_that_are_no_data(
    lines: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "prompts").write_text("x")
    (tmp_path / "bad.parquet").write_bytes(b"nothing like it")
    (tmp_path / "splits").mkdir()
    shutil.copytree(FOLDER, tmp_path / "splits" / "train")
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    shutil.copytree(FOLDER, tmp_path / "torn")
    (tmp_path / "torn" / "data-00000-of-00002.arrow").write_bytes(b"x")
    expected = {
        "empty": "is not a folder that `datasets` saved",
        "prompts": "is no form of data that is read",
        "bad.parquet": "cannot be read",
        "splits": "holds several splits; name one of them: train",
        "torn": "cannot be read",
    }
    for name, rule in expected.items():
        (line,) = lines(rollout__prompt_data=f"@/{name}")
        assert rule in line, line
        assert "\n" not in line
