"""House rules that ruff cannot say: where effects may live, and how long things may get.

    python tools/lint_effects.py [folder ...]      default: slurm_rl; exit code 1 on findings

- Names that must survive a crash are made in `storage/fs.py` alone.
- Processes are started in `launch/`, `rollout/sandbox/`, `rollout/server_process.py` and
  `rollout/rewards/workers.py` alone.
- Files end at 400 lines, functions at 40. A longer function says why, on the line above its
  `def` or first decorator: `# long: <reason>`; at 100 no reason helps.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE, MAX_FUNCTION, MAX_DEFENDED = 400, 40, 100
BANNED_MODULE_NAMES = {"utils", "common", "helpers", "misc"}

RENAMES = {
    "os.rename",
    "os.renames",
    "os.replace",
    "os.link",
    "shutil.move",
}
PROCESSES = {
    "os.system",
    "os.popen",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.posix_spawnp",
    *(f"os.exec{tail}" for tail in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    *(f"os.spawn{tail}" for tail in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    "asyncio.create_subprocess_exec",
    "asyncio.create_subprocess_shell",
}
PROCESS_MODULES = {"subprocess", "multiprocessing", "pty"}
#: Methods of pathlib.Path that name files; `fs.rename` is our own seam.
PATH_METHODS = {"rename", "replace", "hardlink_to"}

RENAME_HOMES = ("slurm_rl/storage/fs.py",)
PROCESS_HOMES = (
    "slurm_rl/launch/",
    "slurm_rl/rollout/server_process.py",
    "slurm_rl/rollout/sandbox/",
    "slurm_rl/rollout/rewards/workers.py",
)


def check_source(text: str, *, path: str) -> Iterator[tuple[int, str]]:
    """(line, finding) for each rule that the module at `path` breaks."""
    tree = ast.parse(text)
    names = _imported_names(tree)
    for node in ast.walk(tree):
        for dotted in _mentions(node, names):
            yield from _judge(node, dotted, path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from _judge_method(node, node.func, path, names)
    yield from _check_sizes(tree, text, path)


def _judge(node: ast.AST, dotted: str, path: str) -> Iterator[tuple[int, str]]:
    line = getattr(node, "lineno", 1)
    if dotted in RENAMES and not path.startswith(RENAME_HOMES):
        yield line, f"{dotted} outside {RENAME_HOMES[0]}; go through storage.durable"
    module = dotted.split(".")[0]
    if (dotted in PROCESSES or module in PROCESS_MODULES) and not path.startswith(PROCESS_HOMES):
        yield line, f"{dotted} outside {' and '.join(PROCESS_HOMES)}"


def _judge_method(
    call: ast.Call, method: ast.Attribute, path: str, names: dict[str, str]
) -> Iterator[tuple[int, str]]:
    """`Path.rename` and friends, told from our own `fs.rename` by who they are called on."""
    if path.startswith(RENAME_HOMES) or _dotted(method, names) in RENAMES:
        return
    owner = method.value
    name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
    # str.replace and our fs.rename take two arguments, pathlib's methods one.
    is_path_method = method.attr in PATH_METHODS and len(call.args) == 1 and not call.keywords
    if is_path_method and not name.lower().endswith("fs"):
        yield call.lineno, f".{method.attr}() outside {RENAME_HOMES[0]}; go through storage.durable"


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted name, for every import in the module."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                names[item.asname or item.name.split(".")[0]] = (
                    item.name if item.asname else item.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for item in node.names:
                names[item.asname or item.name] = f"{node.module}.{item.name}"
    return names


def _mentions(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (item.name for item in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{item.name}" for item in node.names)
    elif isinstance(node, ast.Attribute):
        dotted = _dotted(node, names)
        # A module that starts processes is reported once, at its import.
        if dotted and dotted.split(".")[0] not in PROCESS_MODULES:
            yield dotted


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def _check_sizes(tree: ast.Module, text: str, path: str) -> Iterator[tuple[int, str]]:
    lines = text.splitlines()
    if len(lines) > MAX_FILE:
        yield len(lines), f"{len(lines)} lines; a file ends at {MAX_FILE}"
    if Path(path).stem in BANNED_MODULE_NAMES:
        yield 1, "a module is named for what it owns"
    if not ast.get_docstring(tree) and lines:
        yield 1, "the module does not say what it owns"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            defended = first > 1 and lines[first - 2].strip().startswith("# long: ")
            limit = MAX_DEFENDED if defended else MAX_FUNCTION
            if length > limit:
                yield node.lineno, f"{node.name} has {length} lines; a function ends at {limit}"


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    folders = [Path(name).resolve() for name in sys.argv[1:]] or [root / "slurm_rl"]
    num_findings = 0
    for folder in folders:
        for file in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]:
            path = file.relative_to(root).as_posix()
            for line, finding in check_source(file.read_text(), path=path):
                print(f"{path}:{line}: {finding}")
                num_findings += 1
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
