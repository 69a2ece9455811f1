"""`slurm-rl convert`: what may be asked for, what a run gives, and that nothing is left of errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from slurm_rl.cli.convert import Wanted, convert, find_committed, parse_size
from slurm_rl.cli.submit import make_run
from slurm_rl.config.load import load_config
from slurm_rl.config.shaping import settings_digest
from slurm_rl.errors import ConfigError, CorruptError, NoRunError, NothingDone, PrunedError
from slurm_rl.storage.claims import attempt_dir, try_claim
from slurm_rl.storage.commits import make_content, publish_commit
from slurm_rl.storage.durable import list_files, seal_files
from slurm_rl.storage.tombstones import Pruned, publish_pruned
from slurm_rl.types import Claim, Result, Slot

ROOT = Path(__file__).resolve().parents[3]
CONFIG = {"model_type": "llama", "dtype": "float32"}


def write_model(folder: Path, number: float) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    tensors = {"a.weight": torch.full((4, 3), number), "b.weight": torch.arange(5.0)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class Run:
    """A run whose weights are committed by hand; version v is full of v."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        value = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
        value["run"] = {"name": "run", "dir": str(folder)}
        value["rollout"]["prompt_data"] = str(ROOT / "configs/data/quickstart.jsonl")
        for place, change in changes.items():
            value.setdefault(place, {}).update(change)
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(value))
        self.settings = load_config(config).settings
        opened, _ = make_run(load_config(config))
        self.run, self.root = opened.run, opened.run.root

    def commit(self, kind: str, iteration: int, **models: float) -> Path:
        """Commit a stage with these models; the attempt's folder."""
        slot, claim = Slot(iteration, kind, 0), Claim(1, "job", "attempt")
        assert try_claim(self.run, slot, claim)
        folder = Path(attempt_dir(self.run, slot, claim))
        for name, number in models.items():
            write_model(folder / name, number)
        names = [f"{name}/{file}" for name in models for file in list_files(folder / name)]
        result = Result(seal_files(folder, names), content={})
        digest = settings_digest(self.settings)
        body = make_content(slot, result, parents={}, settings_digest=digest)
        provenance = {"attempt": claim.attempt_name}
        assert publish_commit(self.run, slot, content=body, provenance=provenance)
        return folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
    made.commit("init", 0, weights=0.0)
    made.commit("rollout", 0)
    made.commit("train", 0, weights=1.0)
    return made


def number_of(folder: Path) -> float:
    return float(load_file(folder / "model.safetensors")["a.weight"][0, 0])


@pytest.mark.parametrize(("version", "expected"), [(None, 1.0), (0, 0.0), (1, 1.0)])
def test_a_version_of_a_run_is_the_files_that_were_committed(
    run: Run, tmp_path: Path, version: int | None, expected: float
) -> None:
    to = tmp_path / "out/model"
    convert(run.root, to, Wanted(version=version))
    assert number_of(to) == expected
    committed = find_committed(run.root, version=version, critic=False)
    names = {path.name for path in to.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    for name in names:
        assert not (to / name).is_symlink()
        assert (to / name).read_bytes() == (committed.folder / name).read_bytes()


def test_links_to_a_users_model_become_files(tmp_path: Path) -> None:
    run = Run(tmp_path)
    folder = run.commit("init", 0, weights=0.0) / "weights"
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    convert(run.root, tmp_path / "out", Wanted())
    (tmp_path / "elsewhere").unlink()
    assert number_of(tmp_path / "out") == 0.0


def test_a_critic_is_another_model(tmp_path: Path) -> None:
    train = {"advantage_estimator": "gae"}
    run = Run(tmp_path, train=train, critic={"megatron": {"lr": 1e-5}})
    run.commit("init", 0, weights=0.0, critic=10.0)
    run.commit("critic", 0, weights=11.0)
    run.commit("train", 0, weights=1.0)
    for version, expected in ((0, 10.0), (1, 11.0), (None, 11.0)):
        to = tmp_path / f"out-{version}"
        convert(run.root, to, Wanted(version=version, critic=True))
        assert number_of(to) == expected


def test_what_is_damaged_is_not_given_away(run: Run, tmp_path: Path) -> None:
    folder = find_committed(run.root, version=1, critic=False).folder
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for wanted in (Wanted(version=1), Wanted(version=1, dtype="bfloat16")):
        with pytest.raises(CorruptError, match=r"model\.safetensors: digest"):
            convert(run.root, tmp_path / "out", wanted)
        assert not (tmp_path / "out").exists()


def test_versions_that_are_not_there(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(NothingDone, match="version 2 is not committed yet"):
        convert(run.root, out, Wanted(version=2))
    with pytest.raises(NoRunError, match="version 99 is not one of 0 to 10"):
        convert(run.root, out, Wanted(version=99))
    with pytest.raises(ConfigError, match="has no critic"):
        convert(run.root, out, Wanted(critic=True))
    publish_pruned(run.run, Slot(0, "train", 0), Pruned("token"))
    with pytest.raises(PrunedError):
        convert(run.root, out, Wanted(version=1))
    assert not out.exists()


def test_dtype_and_size_of_the_files(run: Run, tmp_path: Path) -> None:
    to = tmp_path / "out"
    convert(run.root, to, Wanted(dtype="bfloat16", file_size="20"))
    assert sorted(path.name for path in to.iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    tensor = load_file(to / "model-00001-of-00002.safetensors")["a.weight"]
    assert tensor.dtype == torch.bfloat16 and tensor[0, 0] == 1
    assert json.loads((to / "config.json").read_text()) == CONFIG | {"dtype": "bfloat16"}
    # What is cut can be put together again.
    convert(to, tmp_path / "whole", Wanted(file_size="1GB"))
    assert number_of(tmp_path / "whole") == 1.0


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Wanted(), "is a Hugging Face directory already"),
        (Wanted(version=1, dtype="float32"), "--version has no effect of a model directory"),
        (Wanted(critic=True), "--critic has no effect"),
        (Wanted(config=Path("x"), dtype="float32"), "--config has no effect"),
        (Wanted(dtype="int8"), "--dtype int8 is not one of float32"),
        (Wanted(file_size="5 apples"), "--file-size 5 apples is no size"),
        (Wanted(file_size="0GB"), "--file-size 0GB is no size"),
        (Wanted(megatron=True, dtype="float32"), "--dtype has no effect with --megatron"),
        (Wanted(megatron=True, file_size="1GB"), "--file-size has no effect with --megatron"),
        (Wanted(through="magic"), "--through magic is not known"),
        (Wanted(megatron=True, through="mbridge"), "needs mbridge and transformer_engine"),
    ],
)
def test_what_cannot_be_asked_of_a_directory(tmp_path: Path, wanted: Wanted, said: str) -> None:
    write_model(tmp_path / "model", 1.0)
    with pytest.raises(ConfigError, match=said) as error:
        convert(tmp_path / "model", tmp_path / "out", wanted)
    assert error.value.hint or "is not one of" in said
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_asked_of_runs_and_checkpoints(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--config has no effect of a run"):
        convert(run.root, tmp_path / "out", Wanted(config=tmp_path))
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for name in (".metadata", "metadata.json"):
        (checkpoint / name).touch()
    with pytest.raises(ConfigError, match=r"no config\.json in .*checkpoint or .*weights"):
        convert(checkpoint, tmp_path / "out", Wanted())
    for wanted in (Wanted(version=1), Wanted(megatron=True)):
        with pytest.raises(ConfigError, match="has no effect of a Megatron checkpoint"):
            convert(checkpoint, tmp_path / "out", wanted)


def test_nothing_is_written_over(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        convert(run.root, tmp_path / "out", Wanted())
    assert list((tmp_path / "out").iterdir()) == []


def test_nothing_is_put_into_a_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run.root / "iterations")
    for to in (run.root / "out", tmp_path / "link" / "out"):
        with pytest.raises(ConfigError, match=f"{to}: lies in the run {run.root}; choose a"):
            convert(run.root, to, Wanted())
        assert not to.exists()


def test_a_folder_that_is_nothing_of_these(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoRunError, match="neither a run, nor a Hugging Face directory"):
        convert(tmp_path / "empty", tmp_path / "out", Wanted())
    with pytest.raises(NoRunError):
        convert(tmp_path / "nowhere", tmp_path / "out", Wanted())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("5GB", 5 * 10**9), (" 20 mb", 20 * 10**6), ("3kb", 3000)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_errors_are_one_line(tmp_path: Path) -> None:
    """By the program itself, with a model that is cut short."""
    write_model(tmp_path / "model", 1.0)
    path = tmp_path / "model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    program = str(Path(sys.executable).with_name("slurm-rl"))
    arguments = ["convert", "model", "--to", "out", "--dtype", "bfloat16"]
    told = subprocess.run(
        [program, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert told.returncode == 2, told
    assert told.stderr.count("\n") == 1 and "model.safetensors" in told.stderr
    assert not (tmp_path / "out").exists()


def test_without_torch_a_run_s_files_can_be_copied_and_more_says_what_is_missing(
    run: Run, tmp_path: Path
) -> None:
    """As on a login node: the program in a process that has no torch."""
    code = "import sys; sys.modules['torch'] = None; from slurm_rl.cli.main import entry; entry()"

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "convert", str(run.root), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)

    told = call("--to", "plain")
    assert told.returncode == 0 and number_of(tmp_path / "plain") == 1.0, told.stderr
    told = call("--to", "half", "--dtype", "bfloat16")
    assert told.returncode == 2 and not (tmp_path / "half").exists()
    assert "this needs torch, which is not installed here" in told.stderr
    assert told.stderr.count("\n") == 1
