import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from slurm_rl.config import row_preflight
from slurm_rl.config.data_preflight import check_data_files
from slurm_rl.config.row_preflight import unknown_character
from slurm_rl.config.schema import SPECIAL_TOKENS, Settings
from slurm_rl.stages.init import make_tokenizer

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
        # A reward that needs no label, where the test does not name one that does.
        values.setdefault("rollout__rm_type", "random")
        settings = load(**json.loads(json.dumps(values).replace("@/", f"{tmp_path}/")))
        found = [problem.render({(): "f"}) for problem in check_data_files(settings)]
        return [line.removeprefix("f: ").replace(f"{tmp_path}/", "@/") for line in found]

    return of


def test_each_form_is_fine_as_it_should_be(lines: Callable[..., list[str]]) -> None:
    sets = [
        {"name": "a", "path": "@/x.jsonl@[0:2]", "metadata_key": "m"},
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
        'rollout.prompt_data[0].label_key = "answer" is not a key of @/x.jsonl:1; it has prompt, label',
        'eval.aime.input_key = "q" is not a key of @/x.jsonl:1; it has prompt, label',
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


MADE: dict[str, Any] = {
    "hf_checkpoint": None,
    "init_model": {"characters": "ab=", "config": {"model_type": "llama"}},
}
TURN = {"role": "user", "content": "ab"}
TEMPLATE = {"rollout__apply_chat_template": True}
LABELLED = {"rollout__label_key": "label", "rollout__rm_type": "gsm8k"}


@pytest.fixture
def row_fault(load: Load, tmp_path: Path) -> Callable[..., str | None]:
    """What is said of a second row, of its own form, behind one that is good."""

    def of(row: Any, **values: Any) -> str | None:
        path = tmp_path / "r.jsonl"
        good = '{"prompt": "ab", "label": "5", "m": {}}\n'
        path.write_text(good + (row if isinstance(row, str) else json.dumps(row)) + "\n")
        values = {"rollout__rm_type": "random"} | values
        found = [
            problem.render({(): "f"})
            for problem in check_data_files(load(rollout__prompt_data=str(path), **values))
        ]
        if not found:
            return None
        (line,) = found
        begin = f'f: rollout.prompt_data = "{path}" has a bad row: {path}:2: '
        assert line.startswith(begin)
        return line.removeprefix(begin)

    return of


@pytest.mark.parametrize(
    ("row", "values", "line"),
    [
        ({"prompt": None}, {}, "'prompt' is null; a prompt is a text or a list of messages"),
        ({"prompt": 3}, {}, "'prompt' is 3; a prompt is a text or a list of messages"),
        ({"prompt": ""}, {}, "the prompt is empty; write it, or take the row out"),
        ({"prompt": ""}, MADE | TEMPLATE, "the prompt is empty; write it, or take the row out"),
        ({"prompt": [TURN]}, {}, "the prompt is a list of messages, which needs the chat template; set rollout.apply_chat_template: true"),
        ({"prompt": [{"role": "user"}]}, TEMPLATE, "message 0 of 'prompt' has no content; a message is"),
        ({"prompt": [TURN, TURN | {"content": None}]}, TEMPLATE, "message 1 of 'prompt' has no content; a message is"),
        ({"prompt": "abc"}, MADE, "the prompt has 'c', which init_model.characters lacks; add it there, or mend the row"),
        ({"prompt": [TURN, TURN | {"content": "a!"}]}, MADE | TEMPLATE, "the prompt has '!', which init_model.characters lacks; add it there, or mend the row"),
        ({"prompt": "a", "m": {"rm_type": "gsm9k"}}, {"rollout__metadata_key": "m"}, "metadata.rm_type = 'gsm9k' is no built-in reward; did you mean gsm8k? there are exact_match,"),
        ({"prompt": "a", "m": {"rm_type": 3}}, {"rollout__metadata_key": "m"}, "metadata.rm_type = 3 is no built-in reward; there are exact_match,"),
        ({"prompt": "a", "m": {"rm_type": "remote_rm"}}, {"rollout__metadata_key": "m"}, "metadata.rm_type = 'remote_rm' needs rollout.rm_url or rollout.rm_service; set it, or change the row"),
        ({"prompt": "a", "m": {"rm_type": "judge"}}, {"rollout__metadata_key": "m"}, "metadata.rm_type = 'judge' needs score.server; set it, or change the row"),
        ({"prompt": "a", "m": 3}, {"rollout__metadata_key": "m"}, "'m' is not an object; write"),
        ({"prompt": "a", "label": None}, LABELLED, "'label' (rollout.label_key) is null, which the reward gsm8k compares with; give the row a label, or take it out"),
        ({"prompt": "a", "label": " "}, LABELLED, "'label' (rollout.label_key) is ' ', which the reward gsm8k compares with; give"),
        ('{"prompt": "a", "label": NaN}', {}, "not JSON (NaN is not a number of JSON); one JSON object a line"),
        ('{"prompt": "\\ud83d"}', {}, "holds a value that JSON cannot"),
        ("[1]", {}, "a list; one JSON object a line"),
    ],
)  # fmt: skip
def test_a_row_that_the_rollout_would_refuse_is_named(
    row_fault: Callable[..., str | None], row: Any, values: dict[str, Any], line: str
) -> None:
    found = row_fault(row, **values)
    assert found is not None
    assert found.startswith(line)
    assert "\n" not in found


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ({"prompt": ""}, TEMPLATE),
        ({"prompt": ""}, MADE | TEMPLATE | {"rollout__system_prompt": "a"}),
        ({"prompt": [TURN, {"role": "assistant", "tool_calls": [{"name": "x"}]}]}, TEMPLATE),
        ({"prompt": "ab<eos>="}, MADE),
        ({"prompt": "a", "m": {"rm_type": "boxed_math"}}, {"rollout__metadata_key": "m"}),
        ({"prompt": "a", "label": None, "m": {"rm_type": "format"}}, LABELLED | {"rollout__metadata_key": "m"}),
        ({"prompt": "a", "label": 0}, LABELLED),
        ({"prompt": "a", "label": ""}, LABELLED | {"rollout__rm_type": "exact_match"}),
        # Nobody looks at keys that no setting names.
        ('{"prompt": "a", "note": "half \\ud83d"}', {}),
        ('{"prompt": "a", "half \\ud83d": 1}', {}),
        # Whoever leads the conversation may bring rewards and labels of its own.
        ({"prompt": "a", "label": None}, LABELLED | {"rollout__environment": "my.Env"}),
    ],
)  # fmt: skip
def test_a_row_that_the_rollout_takes_is_fine(
    row_fault: Callable[..., str | None], row: Any, values: dict[str, Any]
) -> None:
    if isinstance(row, dict):
        row = {"label": "5", "m": {}} | row
    values = LABELLED | values if "m" in values.get("rollout__metadata_key", "") else values
    assert row_fault(row, **values) is None


def test_a_reward_without_the_label_that_it_needs_is_said(
    lines: Callable[..., list[str]], tmp_path: Path
) -> None:
    where = "has a bad row: @/x.jsonl:1: has no label, which the reward f1 compares with; set"
    assert lines(rollout__prompt_data="@/x.jsonl", rollout__rm_type="f1") == [
        f'rollout.prompt_data = "@/x.jsonl" {where} rollout.label_key to the key that holds it'
    ]
    terms = [{"rm_type": "format"}, {"rm_type": "f1", "weight": 2.0}]
    (line,) = lines(rollout__prompt_data="@/x.jsonl", rollout__rm_type=None, rollout__rewards=terms)
    assert where in line
    (line,) = lines(
        rollout__prompt_data="@/x.jsonl", eval__t={"prompt_data": "@/x.jsonl", "rm_type": "f1"}
    )
    assert line.startswith(f'eval.t.prompt_data = "@/x.jsonl" {where} rollout.label_key')
    table = pa.table({"prompt": ["a", "b"], "label": ["1", None]})
    parquet.write_table(table, tmp_path / "n.parquet")
    (line,) = lines(
        rollout__prompt_data="@/n.parquet", rollout__label_key="label", rollout__rm_type="f1"
    )
    assert "has a bad row: @/n.parquet: row 1: 'label' (rollout.label_key) is null, which" in line


def test_only_rows_of_the_slice_count(lines: Callable[..., list[str]], tmp_path: Path) -> None:
    rows = ['{"prompt": "a"}'] * 30 + ['{"prompt": null}'] + ['{"prompt": "b"}'] * 30
    (tmp_path / "s.jsonl").write_text("\n\n".join(rows))
    for good in ("", "@[:30]", "@[31:]", "@[-30:]", "@[:-31]", "@[-31:-30]"):
        is_bad = good == "@[-31:-30]"
        found = lines(rollout__prompt_data=f"@/s.jsonl{good}")
        assert [("s.jsonl:61: 'prompt' is null" in line) for line in found] == [True] * is_bad
    for empty in ("@[61:]", "@[70:80]", "@[:-61]"):
        (line,) = lines(rollout__prompt_data=f"@/s.jsonl{empty}")
        assert line.endswith("has no rows there: the data has fewer; mend the slice")
    (line,) = lines(rollout__prompt_data="@/s.jsonl@[20:]")
    assert "s.jsonl:61: 'prompt' is null" in line


@pytest.mark.parametrize("kind", ["parquet", "folder", "jsonl"])
def test_a_slice_s_end_may_be_counted_from_the_end(
    lines: Callable[..., list[str]], tmp_path: Path, kind: str
) -> None:
    """A bad row is told of where it is in the slice, and only there."""
    texts: list[str | None] = ["a", "b", "c", "d", "e", None, "g"]
    name = f"n.{kind}" if kind != "folder" else "n"
    if kind == "parquet":
        parquet.write_table(pa.table({"prompt": texts}), tmp_path / name, row_group_size=3)
    elif kind == "jsonl":
        (tmp_path / name).write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    else:
        write_folder(tmp_path / name, pa.table({"prompt": texts}))
    bounds = (None, -8, -6, -2, -1, 2, 5, 6, 9)
    for start, stop in itertools.product(bounds, bounds):
        chosen = range(7)[start:stop]
        if not chosen:
            continue
        text = ":".join("" if bound is None else str(bound) for bound in (start, stop))
        found = lines(rollout__prompt_data=f"@/{name}@[{text}]")
        is_counted = kind != "folder" or ((start or 0) >= 0 and (stop or 0) >= 0)
        assert bool(found) == (5 in chosen and is_counted), (text, found)


def write_folder(folder: Path, table: Any) -> None:
    """A data set as `datasets` saves one."""
    folder.mkdir()
    with pa.ipc.new_stream(str(folder / "data.arrow"), table.schema) as stream:
        stream.write_table(table)
    state = {"_data_files": [{"filename": "data.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))


def test_a_file_s_end_that_is_far_is_not_looked_for(
    lines: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_preflight, "_WHOLE_BYTES", 10)
    (tmp_path / "n.jsonl").write_text('{"prompt": "a"}\n{"prompt": null}\n')
    for good in ("@[:1]", "@[:-1]", "@[-1:]"):
        assert lines(rollout__prompt_data=f"@/n.jsonl{good}") == []
    assert len(lines(rollout__prompt_data="@/n.jsonl")) == 1


def test_a_name_that_cannot_be_shown_is_written_out(
    lines: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "n.jsonl").write_text('{"half \\ud83d": 1}\n')
    (line,) = lines(rollout__prompt_data="@/n.jsonl")
    assert line.endswith("is not a key of @/n.jsonl:1; it has half \\ud83d")
    line.encode()


def test_the_characters_that_are_known_are_those_of_the_tokenizer(load: Load) -> None:
    tokenizer, settings = make_tokenizer(MADE["init_model"]["characters"]), load(**MADE)
    tokens = [*SPECIAL_TOKENS, "<unk>", "<", "a", "b", "c"]
    for text in map("".join, itertools.product(tokens, repeat=2)):
        try:
            tokenizer(text)
            is_known = True
        except Exception:  # the library's own has no name
            is_known = False
        assert (unknown_character(settings, text) is None) == is_known, text


def test_a_system_prompt_that_no_tokenizer_takes_is_told_once(
    lines: Callable[..., list[str]],
) -> None:
    values = MADE | TEMPLATE | {"rollout__system_prompt": "ab c"}
    assert lines(rollout__prompt_data="@/x.jsonl", **values) == [
        "rollout.system_prompt = \"ab c\" has ' ', which init_model.characters lacks;"
        " add it there, or change the text"
    ]
