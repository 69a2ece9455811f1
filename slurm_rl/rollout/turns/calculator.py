"""Arithmetic from a text that nobody has checked: numbers, operators, a few functions, no names.

Safe by construction: the text is parsed, and only the kinds of nodes below are computed. Whole
numbers are exact up to `MAX_BITS`, so that no expression takes more than an instant.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 500
MAX_BITS = 4096

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
#: Name -> function and how many arguments it takes at least and at most.
FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "abs": (abs, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "cos": (math.cos, 1, 1),
    "exp": (math.exp, 1, 1),
    "floor": (math.floor, 1, 1),
    "gcd": (math.gcd, 2, 8),
    "log": (math.log, 1, 2),
    "log10": (math.log10, 1, 1),
    "log2": (math.log2, 1, 1),
    "max": (max, 2, 64),
    "min": (min, 2, 64),
    "round": (round, 1, 2),
    "sin": (math.sin, 1, 1),
    "sqrt": (math.sqrt, 1, 1),
    "tan": (math.tan, 1, 1),
}


def calculate(expression: str) -> str:
    """The value as a text, to 12 digits if it is no whole number; ValueError says what is wrong."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {MAX_CHARACTERS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what Python would say to `1or 2`
            tree = ast.parse(expression.strip(), mode="eval")
        value = _compute(tree.body)
    except SyntaxError as error:
        raise ValueError(f"not an expression: {error.msg}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("the expression is nested too deep") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except (OverflowError, TypeError) as error:
        raise ValueError(f"it cannot be computed: {error}") from error
    return str(value) if isinstance(value, int) else format(value, ".12g")


def _compute(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _check(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _check(_UNARY[type(node.op)](_compute(node.operand)))
    if isinstance(node, ast.BinOp):
        return _check(_combine(node.op, _compute(node.left), _compute(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _check(_call(node.func.id, node.args))
    raise ValueError(f"{_name(node)} is not arithmetic; there are numbers, + - * / // % **, (…)")


def _combine(op: ast.operator, left: Number, right: Number) -> Any:
    if isinstance(op, ast.Pow):
        is_whole = isinstance(left, int) and isinstance(right, int)
        if is_whole and left.bit_length() * abs(right) > MAX_BITS:  # type: ignore[union-attr]
            raise ValueError("the power is too large")
        return left**right
    if type(op) not in _BINARY:
        raise ValueError(f"there is no operator {type(op).__name__}; powers are written **")
    return _BINARY[type(op)](left, right)


def _call(name: str, nodes: list[ast.expr]) -> Any:
    if name not in FUNCTIONS:
        raise ValueError(f"there is no function {name}; there are {', '.join(FUNCTIONS)}")
    function, least, most = FUNCTIONS[name]
    if not least <= len(nodes) <= most:
        raise ValueError(f"{name} does not take {len(nodes)} numbers")
    arguments = [_compute(node) for node in nodes]
    if name == "round" and len(arguments) == 2 and abs(arguments[1]) > 100:
        raise ValueError("round takes up to 100 digits")
    return function(*arguments)


def _check(value: Any) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ValueError("the number is too large")
        return value
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError("the result is no real number")
    return value


def _name(node: ast.expr) -> str:
    return f"the name {node.id}" if isinstance(node, ast.Name) else type(node).__name__.lower()
