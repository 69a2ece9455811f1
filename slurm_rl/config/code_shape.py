"""What a module's text says that its top-level names are. Pure: nothing is run or imported.

Judges only what is certain: a name that is bound more than once, decorated, computed or brought by
another module may be anything.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping, Sequence

#: By these a module may define names that its text does not show.
_HIDING = {"globals", "locals", "vars", "exec", "modules", "setattr", "__import__"}
_HIDING |= {"import_module", "__dict__"}
#: What has a scope of its own, so that its names are not the module's.
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: Values that nobody can call, as they are written.
_UNCALLABLE: Mapping[type[ast.AST], str] = {
    ast.List: "a list",
    ast.ListComp: "a list",
    ast.Tuple: "a tuple",
    ast.Dict: "a mapping",
    ast.DictComp: "a mapping",
    ast.Set: "a set",
    ast.SetComp: "a set",
    ast.JoinedStr: "text",
    ast.GeneratorExp: "a generator",
    ast.Import: "a module",
}

#: Name -> whatever binds it: a statement, the value that is assigned, or a node that says nothing.
Definitions = dict[str, list[ast.AST]]


def top_definitions(text: bytes) -> Definitions | None:
    """What a module's text binds at its top level; None if one cannot tell.

    >>> sorted(top_definitions(b"import a.b as c\\nif c:\\n    def d(): e = 1"))
    ['c', 'd']
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is odd in the user's text is his affair
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # perhaps a later Python's, and the stage has that
    found: Definitions = {}
    for node in ast.walk(tree):
        used = getattr(node, "id", None) or getattr(node, "attr", None)
        if used in _HIDING:
            return None
        if isinstance(node, ast.Global):
            for name in node.names:
                found.setdefault(name, []).append(node)
    _add(tree, found)
    return None if found.keys() & {"*", "__getattr__"} else found


def _add(parent: ast.AST, found: Definitions) -> None:
    """What the statements in `parent` bind, those in an `if`, `try` or `with` included."""
    for node in ast.iter_child_nodes(parent):
        for name in _bound_by(node):
            found.setdefault(name, []).append(node)
        if isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) for t in node.targets):
            for target in node.targets:
                assert isinstance(target, ast.Name)
                found.setdefault(target.id, []).append(node.value)
            _add(ast.Expr(node.value), found)
        elif not isinstance(node, (*_SCOPES, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            _add(node, found)


def _bound_by(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name is not None:
        return [node.name]
    if isinstance(node, ast.MatchMapping) and node.rest is not None:
        return [node.rest]
    return []


def say_unfit(bound: Sequence[ast.AST], *, called_with: Sequence[str] | None) -> str | None:
    """Why a name that is `bound` so is no function to be called so; None if it may be one.

    called_with: the arguments by name, all by position; None if they are not known.
    """
    said = [_say_one(node, called_with) for node in bound]
    return said[-1] if said and all(said) else None


def _say_one(node: ast.AST, called_with: Sequence[str] | None) -> str | None:
    if isinstance(node, ast.Constant):
        is_text = isinstance(node.value, (str, bytes))
        return f"is {'text' if is_text else ast.unparse(node)}, not a function"
    if type(node) in _UNCALLABLE:
        return f"is {_UNCALLABLE[type(node)]}, not a function"
    if called_with is None:
        return None
    if isinstance(node, ast.AsyncFunctionDef) and not node.decorator_list:
        return "is async, and nobody would await it"
    if isinstance(node, ast.FunctionDef) and not node.decorator_list:
        return _say_arguments(node.args, called_with)
    return _say_arguments(node.args, called_with) if isinstance(node, ast.Lambda) else None


def _say_arguments(arguments: ast.arguments, called_with: Sequence[str]) -> str | None:
    number, most = len(called_with), len(arguments.posonlyargs) + len(arguments.args)
    least = most - len(arguments.defaults)
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    named = [argument.arg for argument, default in pairs if default is None]
    call = f"is called with {number} arguments ({', '.join(called_with)})"
    if named:
        return f"{call}, and needs {named[0]} by name"
    if number < least:
        return f"{call}, and needs {least}"
    if number > most and arguments.vararg is None:
        return f"{call}, and takes {most or 'none'}"
    return None
