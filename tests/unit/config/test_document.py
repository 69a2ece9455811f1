from __future__ import annotations

import pytest

from slurm_rl.config.document import parse_document
from slurm_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        ("-2.5e-6", -2.5e-6),
        (".5", 0.5),
        ("3", 3),
        ("-3", -3),
        ("012", 12),
        ("0x10", 16),
        ("true", True),
        ("null", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("20:00:00", "20:00:00"),
        ("1_000", "1_000"),
        ("2026-01-01", "2026-01-01"),
        ("'3'", "3"),
        ("1e", "1e"),
        ("1-12", "1-12"),
        (".inf", ".inf"),
    ],
)
def test_plain_words_mean_what_they_look_like(text: str, value: object) -> None:
    found = parse_document(f"a: {text}", label="f").data["a"]
    assert found == value
    assert type(found) is type(value)


def test_keys_are_text_whatever_they_look_like() -> None:
    assert parse_document("{on: 1, 3: 2, null: 3}", label="f").data == {"on": 1, "3": 2, "null": 3}


def test_lines_of_keys_and_items_are_known() -> None:
    document = parse_document("a: 1\nb:\n  c: [1,\n   2]\n", label="f")
    assert document.lines[("b", "c")] == 3
    assert document.lines[("b", "c", 1)] == 4


def test_anchors_and_merge_keys_work_and_the_own_key_wins() -> None:
    text = "base: &b {x: 1, y: 2}\none: {<<: *b, y: 3}\ntwo: {y: 4, <<: [*b]}\n"
    data = parse_document(text, label="f").data
    assert data["one"] == {"x": 1, "y": 3}
    assert data["two"] == {"x": 1, "y": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "f:4: b.c is given twice (first in line 3); keep one"),
        ("a: 1\na: 2\n", "f:2: a is given twice (first in line 1); keep one"),
        ("a: &x [*x]", "f:1: a[0] contains itself; take the alias out"),
        ("a: !!python/name:os.system x", "f:1: a has the tag tag:yaml.org,2002:python/name"),
        ("? [1, 2]\n: 3", "f:1: a key of the file is not text"),
        ("a: [1, 2", "f:1:9: not readable as YAML:"),
        ("a: 1\n\tb: 2", "f:2:1: not readable as YAML:"),
        ("a: *nowhere", "f:1:4: not readable as YAML: found undefined alias 'nowhere'"),
        ("a: \x00", "f: not readable as YAML:"),
        ("a: 1\n---\nb: 2\n", "f:2:1: not readable as YAML:"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document(text, label="f")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
