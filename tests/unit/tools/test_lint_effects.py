from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

Tool = Callable[[str], ModuleType]
DOC = '"""Owns nothing."""\n'


def findings(tool: Tool, text: str, path: str = "slurm_rl/chain/plan.py") -> list[str]:
    found = tool("lint_effects").check_source(DOC + text, path=path)
    return [finding for _, finding in found]


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.rename('a', 'b')",
        "import os as o\no.replace('a', 'b')",
        "from os import link\nlink('a', 'b')",
        "import shutil\nshutil.move('a', 'b')",
        "from pathlib import Path\nPath('a').rename('b')",
        "def f(path):\n    path.replace(other)",
        "def f(path):\n    path.hardlink_to(other)",
        "import subprocess",
        "from subprocess import run",
        "import multiprocessing as mp",
        "import os\nos.system('ls')",
        "import os\nos.execvp('a', ['a'])",
        "import os\nos.fork()",
        "import asyncio\nasyncio.create_subprocess_exec('a')",
    ],
)
def test_effects_outside_their_homes_are_found(tool: Tool, text: str) -> None:
    assert len(findings(tool, text)) == 1


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("import os\nos.rename('a', 'b')\nos.link('a', 'b')", "slurm_rl/storage/fs.py"),
        ("import subprocess\nsubprocess.run(['a'])", "slurm_rl/launch/slurm.py"),
        ("import subprocess", "slurm_rl/rollout/server_process.py"),
        ("def f(fs, a):\n    fs.rename(a, a)", "slurm_rl/storage/durable.py"),
        ("def f(self, a):\n    self._fs.rename(a, a)", "slurm_rl/storage/durable.py"),
        ("x = 'a'.replace('a', 'b')", "slurm_rl/chain/plan.py"),
        ("import dataclasses\ndataclasses.replace(x, a=1)", "slurm_rl/chain/plan.py"),
        ("import os\nos.path.join('a')\nos.replace_not", "slurm_rl/chain/plan.py"),
    ],
)
def test_what_is_allowed(tool: Tool, text: str, path: str) -> None:
    assert findings(tool, text, path) == []


def test_launch_may_not_rename(tool: Tool) -> None:
    assert findings(tool, "import os\nos.rename('a', 'b')", "slurm_rl/launch/local.py")


def test_long_functions_need_a_reason_and_have_an_end(tool: Tool) -> None:
    def function(lines: int) -> str:
        return "def f():\n" + "    x = 1\n" * (lines - 1)

    assert findings(tool, function(40)) == []
    assert findings(tool, function(41)) == ["f has 41 lines; a function ends at 40"]
    assert findings(tool, "# long: one table\n" + function(100)) == []
    assert findings(tool, "# long: one table\n" + function(101)) != []
    assert findings(tool, "# long: one table\n@wrapped\n" + function(60)) == []


def test_files_end_and_say_what_they_own(tool: Tool) -> None:
    assert findings(tool, "x = 1\n" * 399) == []
    assert findings(tool, "x = 1\n" * 400) == ["401 lines; a file ends at 400"]
    found = tool("lint_effects").check_source("x = 1\n", path="slurm_rl/a.py")
    assert [finding for _, finding in found] == ["the module does not say what it owns"]
    assert findings(tool, "", "slurm_rl/utils.py") == ["a module is named for what it owns"]
