from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_rl.config.code_preflight import check_code, check_holds_run, top_names
from slurm_rl.config.schema import Settings

Load = Callable[..., Settings]

#: Modules of Python's own whose texts have all sorts of definitions.
MODULES = (
    "argparse ast asyncio.tasks bisect calendar codecs contextlib copy ctypes.util dataclasses"
    " datetime decimal difflib email.message fractions functools hashlib heapq http.client inspect"
    " json json.decoder logging lzma operator os pathlib pickle platform queue random selectors"
    " shutil signal socket statistics string subprocess tarfile tempfile threading tokenize"
    " typing unittest.mock urllib.parse uuid warnings weakref xml.etree.ElementTree zipfile"
).split()


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    folder = tmp_path / "lib" / "mine"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "rewards.py").write_text("def good(a, s): return 1.0\ndef _own(): pass\n")
    (folder / "deep" / "__init__.py").write_text("from os import path as fine\n")
    (folder / "deep" / "er" / "turns.py").write_text("class Game: pass\n")
    (folder / "starred.py").write_text("from os.path import *\n")
    (folder / "late.py").write_text("def broken(:\n")
    (folder / "fast.cpython-312-x86_64-linux-gnu.so").touch()
    return folder


def lines(settings: Settings, *folders: Path) -> list[str]:
    found = check_code(settings, folders)
    return [problem.render({(): "f"}).removeprefix("f: ") for problem in found]


def own_reward(dotted: str) -> dict[str, Any]:
    return {"rollout__rm_type": None, "rollout__custom_rm_path": dotted}


@pytest.mark.parametrize(
    "dotted",
    [
        "mine.rewards.good",
        "mine.rewards._own",
        "mine.deep.fine",
        "mine.deep.er.turns.Game",
        "mine.starred.whatever",
        "mine.late.broken",
        "mine.fast.inner",
        "installed.rewards.good",
        "rewardz.good",
    ],
)
def test_what_is_there_or_might_be_is_fine(load: Load, mine: Path, dotted: str) -> None:
    assert lines(load(**own_reward(dotted)), mine) == []


@pytest.mark.parametrize(
    ("dotted", "said"),
    [
        ("mine.rewards.god", "names nothing: @/mine/rewards.py defines no god; did you mean mine.rewards.good?"),
        ("mine.reward.good", "names nothing: there is no @/mine/reward.py; did you mean mine.rewards.good?"),
        ("/home/me/mine/rewards.py", "is a file, where a dotted path is meant; write FOLDER.MODULE.NAME, and the folder under `code`"),
        ("rewards.py", "is a file, where a dotted path is meant; "),
        ("mine.good", "names nothing: there is no @/mine/__init__.py; did you mean mine.rewards.good?"),
        ("mine.deep.er.Game", "names nothing: there is no @/mine/deep/er/__init__.py; "),
        ("mine.deep.er.turns.Gme", "names nothing: @/mine/deep/er/turns.py defines no Gme; did you mean mine.deep.er.turns.Game?"),
        ("rewards.good", "begins with no folder of `code`, which has the package `mine`; did you mean mine.rewards.good?"),
        ("deep.fine", "begins with no folder of `code`, which has the package `mine`; list @/mine/deep instead"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_one_line(load: Load, mine: Path, dotted: str, said: str) -> None:
    (line,) = lines(load(**own_reward(dotted)), mine)
    shown = line.replace(str(mine.parent), "@")
    assert shown.startswith(f'rollout.custom_rm_path = "{dotted}" {said}')


def test_the_folder_above_the_package_is_pointed_down(load: Load, mine: Path) -> None:
    (line,) = lines(load(**own_reward("mine.rewards.good")), mine.parent)
    assert line.endswith(f"which has the package `lib`; list {mine} instead")


def test_every_dotted_path_is_looked_at(load: Load, mine: Path) -> None:
    bad = "mine.rewards.bad"
    data = [{"name": "a", "path": "/a", "custom_rm_path": bad}]
    evaluation = {"prompt_data": "/a", "custom_rm_path": bad}
    found = lines(load(rollout__prompt_data=data, eval__x=evaluation, **own_reward(bad)), mine)
    summed = {"rollout__rm_type": None, "rollout__rewards": [{"custom_rm_path": bad}]}
    found += lines(load(**summed), mine)
    for name in ("custom_generate_function_path", "dynamic_sampling_filter_path", "environment"):
        found += lines(load(**{f"rollout__{name}": bad}), mine)
    tools = {"rollout__tools": ["calculator", bad], "rollout__apply_chat_template": True}
    found += lines(load(**tools), mine)
    assert sorted(line.partition(" = ")[0] for line in found) == [
        "eval.x.custom_rm_path",
        "rollout.custom_generate_function_path",
        "rollout.custom_rm_path",
        "rollout.dynamic_sampling_filter_path",
        "rollout.environment",
        "rollout.prompt_data[0].custom_rm_path",
        "rollout.rewards[0].custom_rm_path",
        "rollout.tools[1]",
    ]


def test_nothing_is_run(load: Load, mine: Path) -> None:
    (mine / "rewards.py").write_text(f"open({str(mine / 'ran')!r}, 'w')\ndef good(): pass\n")
    assert lines(load(**own_reward("mine.rewards.good")), mine) == []
    assert not (mine / "ran").exists()


@pytest.mark.parametrize("name", MODULES)
def test_no_name_that_python_finds_is_missed(name: str) -> None:
    module = importlib.import_module(name)
    names = top_names(Path(inspect.getfile(module)).read_bytes())
    there = {key for key, value in vars(module).items() if callable(value)} - {"__loader__"}
    assert names is None or there <= names | {"__builtins__", "__doc__"}


def test_names_inside_of_functions_are_not_the_modules() -> None:
    text = b"def f(a):\n    def g(): h = 1\n    return [i for i in a]\nclass C:\n    def m(self): ...\n"
    assert top_names(text) == {"f", "C"}
    text = b"try:\n    import x.y\nexcept E:\n    x = None\nfor a, (*b, c) in d:\n    with e as f: pass\n"
    assert top_names(text) == {"x", "a", "b", "c", "f"}
    assert top_names(b"def f():\n    global made\n    made = 1\n") == {"f", "made"}
    for unknown in (
        b"from a import *",
        b"globals()['f'] = 1",
        b"def __getattr__(n): ...",
        b"\x00(",
    ):
        assert top_names(unknown) is None


def test_a_folder_that_holds_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    inside, beside = tmp_path / "mine" / "runs" / "demo", tmp_path / "mine2" / "demo"
    for folder in (tmp_path, tmp_path / "mine", tmp_path / "link"):
        (problem,) = check_holds_run([tmp_path / "other", folder], inside)
        assert problem.path == ("code", 1) and "name the folder of your package" in problem.fix
    assert list(check_holds_run([tmp_path / "mine", tmp_path / "link"], beside)) == []
