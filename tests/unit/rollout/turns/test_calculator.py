"""The calculator against Python's own fractions, and against people who mean it ill."""

import math
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rl.rollout.turns.calculator import MAX_BITS, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        (" (1 + 2) * 3 ", "9"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("0.1 + 0.2", "0.3"),
        ("6 / 3", "2"),
        ("sqrt(16) + abs(-2)", "6"),
        ("max(1, 2.5, -3)", "2.5"),
        ("round(3.14159, 2)", "3.14"),
        ("gcd(12, 18)", "6"),
        ("log(100, 10)", "2"),
        ("10 ** 30", str(10**30)),
        ("+-+-5", "5"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


numbers = st.integers(-99, 99)
trees = st.recursive(
    numbers.map(lambda n: (f"({n})", Fraction(n))),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
        lambda t: (
            f"({t[0][0]} {t[1]} {t[2][0]})",
            {"+": t[0][1] + t[2][1], "-": t[0][1] - t[2][1], "*": t[0][1] * t[2][1]}[t[1]],
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(trees)
def test_whole_numbers_are_exact(tree: tuple[str, Fraction]) -> None:
    assert calculate(tree[0]) == str(tree[1].numerator)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("", "not an expression"),
        ("1 +", "not an expression"),
        ("x + 1", "the name x is not arithmetic"),
        ("pi", "the name pi"),
        ("__import__('os').system('true')", "is not arithmetic"),
        ("().__class__.__bases__", "attribute is not arithmetic"),
        ("open('/etc/passwd')", "there is no function open"),
        ("(lambda: 1)()", "is not arithmetic"),
        ("[1, 2]", "list is not arithmetic"),
        ("'a' * 3", "constant is not arithmetic"),
        ("True + 1", "constant is not arithmetic"),
        ("1j * 1j", "constant is not arithmetic"),
        ("1 if 2 else 3", "ifexp is not arithmetic"),
        ("max(1, *[2, 3])", "starred is not arithmetic"),
        ("sqrt(x=4)", "is not arithmetic"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("sqrt(-1)", "math domain error"),
        ("(-8) ** 0.5", "no real number"),
        ("1e308 * 10", "no real number"),
        ("exp(1000)", "cannot be computed"),
        ("2 ^ 3", "no operator BitXor; powers are written **"),
        ("1 << 100", "no operator LShift"),
        ("sqrt(1, 2)", "sqrt does not take 2 numbers"),
        ("1" * 501, "at most 500 characters"),
        ("1 2", "not an expression"),
        ("1\x00", "null bytes"),
    ],
)
def test_what_is_refused(expression: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("*", r"\*")):
        calculate(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "9 ** 9 ** 9 ** 9",
        "(2 ** 4000) ** 4000",
        "(10 ** 1000) * (10 ** 1000)",
        "(10 ** 400) * (10 ** 400) * (10 ** 400) * (10 ** 400)",
        "2 ** -100000",
        "9.9 ** 999999999",
        "round(7, 999999999)",
        "round(7, -999999999)",
        "-" * 480 + "1",
        "(" * 240 + "1" + ")" * 240,
        "sqrt(" * 80 + "2" + ")" * 80,
        "10 ** 10 ** 10 ** 10 ** 10 ** 10 ** 10",
    ],
)
def test_nothing_takes_long_or_grows(expression: str) -> None:
    began = time.process_time()
    try:
        value = calculate(expression)
        assert len(value) <= MAX_BITS
    except ValueError:
        pass
    assert time.process_time() - began < 0.5


@settings(deadline=None)
@given(st.text(alphabet="0123456789+-*/%().,eE sqrtlogabx[]{}'\"\\\n_jJ", max_size=60))
def test_any_text_has_a_value_or_a_reason(text: str) -> None:
    try:
        value = calculate(text)
    except ValueError as error:
        assert str(error)
    else:
        assert math.isfinite(float(value)) or len(value) > 300
