from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.config.code_preflight import HOOKS, check_code, check_holds_run
from slurm_rl.config.code_shape import say_unfit, top_definitions
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

HOOKS_TEXT = """
import math, os.path as where
from somewhere import brought
try:
    from fast import quick
except ImportError:
    quick = None
TABLE = {"a": 1}
NUMBER = 0.5
TEXT: str = "x"
made = build()
NONE = None
alone = lambda tokens, train: tokens
none = lambda: 1
def nothing(): pass
def one(tokens): pass
def two(tokens, train): pass
def spare(tokens, train, more=1, *, named=2): pass
def any_number(*parts, **named): pass
def by_name(tokens, train, *, scale): pass
def three(tokens, train, scale): pass
async def later(tokens, train): pass
@wrap
def decorated(): pass
if NUMBER:
    def either(): pass
else:
    def either(tokens, train): pass
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    folder = tmp_path / "lib" / "mine"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "rewards.py").write_text("def good(a, s): return 1.0\ndef _own(): pass\n")
    (folder / "deep" / "__init__.py").write_text("from os import path as fine\n")
    (folder / "deep" / "er" / "turns.py").write_text("class Game: pass\n")
    (folder / "hooks.py").write_text(HOOKS_TEXT)
    (folder / "starred.py").write_text("from os.path import *\n")
    (folder / "late.py").write_text("def broken(:\n")
    (folder / "fast.cpython-312-x86_64-linux-gnu.so").touch()
    return folder


def lines(settings: Settings, *folders: Path) -> list[str]:
    found = check_code(settings, folders)
    return [problem.render({(): "f"}).removeprefix("f: ") for problem in found]


def names_in(text: bytes) -> set[str]:
    found = top_definitions(text)
    assert found is not None
    return set(found)


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


@pytest.mark.parametrize(
    "name", "brought quick made TEXT alone two spare any_number decorated either".split()
)
def test_what_can_be_called_so_or_might_be_is_fine(load: Load, mine: Path, name: str) -> None:
    assert lines(load(train__custom_loss_path=f"mine.hooks.{name}"), mine) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("math", "is a module, not a function: @/mine/hooks.py:2"),
        ("where", "is a module, not a function: @/mine/hooks.py:2"),
        ("TABLE", "is a mapping, not a function: @/mine/hooks.py:8"),
        ("NUMBER", "is 0.5, not a function: @/mine/hooks.py:9"),
        ("NONE", "is None, not a function: @/mine/hooks.py:12"),
        ("none", "is called with 2 arguments (tokens, train), and takes none: @/mine/hooks.py:14"),
        ("nothing", "is called with 2 arguments (tokens, train), and takes none: @/mine/hooks.py:15"),
        ("one", "is called with 2 arguments (tokens, train), and takes 1: @/mine/hooks.py:16"),
        ("by_name", "is called with 2 arguments (tokens, train), and needs scale by name: @/mine/hooks.py:20"),
        ("three", "is called with 2 arguments (tokens, train), and needs 3: @/mine/hooks.py:21"),
        ("later", "is async, and nobody would await it: @/mine/hooks.py:22"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_so_is_one_line(load: Load, mine: Path, name: str, said: str) -> None:
    dotted = f"mine.hooks.{name}"
    (line,) = lines(load(train__custom_loss_path=dotted), mine)
    shown = line.replace(str(mine.parent), "@")
    fix = "docs/training.md says what it is called with"
    assert shown == f'train.custom_loss_path = "{dotted}" {said}; {fix}'


def test_every_part_of_the_algorithm_is_looked_at(load: Load, mine: Path) -> None:
    for name in HOOKS:
        values = {f"train__{name}": "mine.hooks.nothing"}
        (line,) = lines(load(**values), mine)
        assert f"is called with {len(HOOKS[name])} arguments" in line
        (line,) = lines(load(**values | {f"train__{name}": "ppo"}), mine)
        assert line == f'train.{name} = "ppo" has no module; write FOLDER.MODULE.FUNCTION'
        for bad in ("mine..two", "mine.hooks.", ".two", "mine.hooks. two"):
            (line,) = lines(load(**{f"train__{name}": bad}), mine)
            assert line == f'train.{name} = "{bad}" is no dotted path; write FOLDER.MODULE.NAME'


def test_a_reward_must_be_a_function_too(load: Load, mine: Path) -> None:
    (line,) = lines(load(**own_reward("mine.hooks.TABLE")), mine)
    assert "is a mapping, not a function" in line and line.endswith("; name a function")
    # What it takes, its own stage says.
    assert lines(load(**own_reward("mine.hooks.nothing")), mine) == []


def test_code_that_no_folder_brings_is_named(
    load: Load, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"train__custom_loss_path": "mine.hooks.two"}
    other = mine.parent / "other"
    other.mkdir()
    line = (
        f'train.custom_loss_path = "mine.hooks.two" names {mine}/hooks.py, which no folder of'
        f" `code` brings to the job; add {mine} to `code`"
    )
    assert lines(load(**values)) == []  # not here, and perhaps installed
    assert lines(load(**values), other) == [line]  # beside a folder of `code`
    monkeypatch.chdir(mine.parent)
    assert lines(load(**values)) == [line]
    assert lines(load(**values), mine) == []
    # It may be found all the same.
    assert lines(load(**values, train__env={"PYTHONPATH": "/x"})) == []
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", f"/x:{mine.parent}")
        assert lines(load(**values)) == []
    (mine.parent / "pyproject.toml").touch()
    assert lines(load(**values)) == []


def test_an_installed_package_of_that_name_is_meant(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "yaml").mkdir()
    (tmp_path / "yaml" / "loader.py").write_text("def two(tokens, train): ...\n")
    monkeypatch.chdir(tmp_path)
    assert lines(load(train__custom_loss_path="yaml.loader.two")) == []


#: Functions of all shapes: arguments by position, with defaults, by name, and the rest.
ARGUMENTS = st.tuples(
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(0, 5),
    st.booleans(),
    st.integers(0, 2),
    st.integers(0, 2),
    st.booleans(),
)


@given(ARGUMENTS, st.integers(1, 5))
def test_a_call_is_judged_as_python_judges_it(
    shape: tuple[int, int, int, bool, int, int, bool], number: int
) -> None:
    only, either, num_defaults, has_rest, named, optional, has_more = shape
    places = [f"a{i}" for i in range(only + either)]
    shown = [
        f"{name}=0" if i >= len(places) - num_defaults else name for i, name in enumerate(places)
    ]
    if only:
        shown.insert(only, "/")
    if has_rest or named or optional:
        shown.append("*rest" if has_rest else "*")
    shown += [f"k{i}" for i in range(named)] + [f"d{i}=0" for i in range(optional)]
    shown += ["**more"] * has_more
    called_with = [f"x{i}" for i in range(number)]
    for text in (f"def f({', '.join(shown)}): pass", f"f = lambda {', '.join(shown)}: 0"):
        found = top_definitions(text.encode())
        assert found is not None
        space: dict[str, Any] = {}
        exec(text, space)
        try:
            inspect.signature(space["f"]).bind(*called_with)
            is_good = True
        except TypeError:
            is_good = False
        assert (say_unfit(found["f"], called_with=called_with) is None) == is_good


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
    names = top_definitions(Path(inspect.getfile(module)).read_bytes())
    there = {key for key, value in vars(module).items() if callable(value)} - {"__loader__"}
    assert names is None or there <= names.keys() | {"__builtins__", "__doc__"}


def test_names_inside_of_functions_are_not_the_modules() -> None:
    text = b"def f(a):\n    def g(): h = 1\n    return [i for i in a]\nclass C:\n    def m(self): ...\n"
    assert names_in(text) == {"f", "C"}
    text = b"try:\n    import x.y\nexcept E:\n    x = None\nfor a, (*b, c) in d:\n    with e as f: pass\n"
    assert names_in(text) == {"x", "a", "b", "c", "f"}
    assert names_in(b"match m:\n    case {'a': b, **f}: pass") == {"b", "f"}
    assert names_in(b"def f():\n    global made\n    made = 1\n") == {"f", "made"}
    for unknown in (
        b"from a import *",
        b"globals()['f'] = 1",
        b"def __getattr__(n): ...",
        b"setattr(__import__(__name__), 'f', max)",
        b"\x00(",
    ):
        assert top_definitions(unknown) is None


def test_a_folder_that_holds_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    inside, beside = tmp_path / "mine" / "runs" / "demo", tmp_path / "mine2" / "demo"
    for folder in (tmp_path, tmp_path / "mine", tmp_path / "link"):
        (problem,) = check_holds_run([tmp_path / "other", folder], inside)
        assert problem.path == ("code", 1) and "name the folder of your package" in problem.fix
    assert list(check_holds_run([tmp_path / "mine", tmp_path / "link"], beside)) == []
