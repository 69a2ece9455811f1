from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy.model import write_model

from slurm_rl.config.preflight import check_files
from slurm_rl.config.schema import Settings

Load = Callable[..., Settings]


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    """Values for a config whose files are all there."""
    model = write_model(tmp_path / "model", max_position_embeddings=32768)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a", "label": "b"}\n\n{"prompt": "c", "label": "d"}\n')
    return {
        "hf_checkpoint": str(model),
        "rollout__prompt_data": str(prompts),
        "rollout__label_key": "label",
        "run__dir": str(tmp_path / "runs"),
    }


def lines(settings: Settings) -> list[str]:
    return [problem.render({(): "f"}).removeprefix("f: ") for problem in check_files(settings)]


def test_a_complete_place_is_fine(load: Load, place: dict[str, Any]) -> None:
    assert lines(load(**place)) == []


def test_the_model_must_be_one(load: Load, place: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "model" / "tokenizer.json").unlink()
    found = lines(load(**place))
    assert [line.split('" ')[1].split(";")[0] for line in found] == [
        "has no config.json",
        "has no tokenizer",
    ]
    (line,) = lines(load(**place | {"hf_checkpoint": "/nowhere/m"}))
    assert line == (
        'hf_checkpoint = "/nowhere/m" is not a directory; download the model there, or mend the path'
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "is empty; put prompts in it"),
        ("\n\n", "is empty; put prompts in it"),
        (
            '{"prompt": "a", "label": 1}\nx\n',
            "p.jsonl:2: not JSON (Expecting value: line 1 column 1 (char 0)); one JSON object a line",
        ),
        ("[1]\n", "has a bad row: @/p.jsonl:1: a list; one JSON object a line"),
        ('{"question": "a", "label": 1}\n', "p.jsonl:1; it has question, label"),
        ('{"prompt": "a"}\n', "p.jsonl:1; it has prompt"),
    ],
)
def test_prompts_must_be_readable(
    load: Load, place: dict[str, Any], tmp_path: Path, text: str, line: str
) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    (found,) = lines(load(**place))
    assert found.replace(f"{tmp_path}/", "@/").endswith(line)


def test_secrets_are_for_their_owner_alone(
    load: Load, place: dict[str, Any], tmp_path: Path
) -> None:
    secrets = tmp_path / "secrets.env"
    secrets.write_text("KEY=1\n")
    secrets.chmod(0o640)
    (line,) = lines(load(**place, env_file=str(secrets)))
    assert line.endswith(f"may be read by others (mode 0640); chmod 600 {secrets}")
    secrets.chmod(0o600)
    assert lines(load(**place, env_file=str(secrets))) == []


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"env_file": "/nowhere.env"}, 'env_file = "/nowhere.env" cannot be read (No such file or directory); mend the path'),
        ({"code": ["/nowhere"]}, 'code[0] = "/nowhere" is not a directory; mend the path'),
        ({"sbatch_template": "/nowhere.sh"}, 'sbatch_template = "/nowhere.sh" is not a file; copy sbatch/job.sh there'),
        ({"host_python": "no-such-python"}, 'host_python = "no-such-python" is not a program; mend the path'),
        ({"container": {"runtime": "apptainer", "image": "/no.sif"}}, 'container.image = "/no.sif" is not there; mend the path'),
        ({"run__dir": "/proc/version/x"}, 'run.dir = "/proc/version/x" cannot be made: /proc/version is not a directory that you may write in; choose another'),
    ],
)  # fmt: skip
def test_what_is_not_there_is_named(
    load: Load, place: dict[str, Any], values: dict[str, Any], line: str
) -> None:
    assert lines(load(**place | values)) == [line]


def test_code_is_looked_at(load: Load, place: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.py").write_text("def b(): ...\n")
    values = place | {"rollout__rm_type": None, "rollout__custom_rm_path": "mine.a.c"}
    settings = load(**values, code=[str(tmp_path / "mine")])
    (line,) = lines(settings)
    assert line.endswith("defines no c; did you mean mine.a.b?")
    assert list(check_files(settings, code=[])) == [], "other folders hold than the settings name"
    (line,) = lines(load(**place, code=[str(tmp_path)]))
    assert line.startswith(f'code[0] = "{tmp_path}" holds the run itself ({tmp_path}/runs/demo)')
