import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rl.errors import DataError
from slurm_rl.rollout.data.jsonl import JsonlSource
from slurm_rl.rollout.data.rows import Keys

KEYS = Keys("data", label_key="label")
_opened: list[JsonlSource] = []


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def open_text(tmp_path: Path, text: str | bytes, rows: slice = slice(None), keys: Keys = KEYS):  # type: ignore[no-untyped-def]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    _opened.append(JsonlSource(str(path), rows, keys))
    return _opened[-1]


def lines_of(num: int) -> str:
    return "".join(json.dumps({"prompt": f"p{k}", "label": k}) + "\n" for k in range(num))


def test_rows_keys_and_metadata(tmp_path: Path) -> None:
    text = '{"q": "a", "a": 7, "m": {"k": 1}, "t": [{"type": "function"}]}\n{"q": "b", "a": "x"}'
    keys = Keys("mine", "q", "a", "m", "t")
    source = open_text(tmp_path, text, keys=keys)
    first, second = source.read(0), source.read(1)
    assert (first.prompt, first.label, first.metadata) == ("a", 7, {"k": 1})
    assert (first.row, first.data_set, first.tools) == (0, "mine", [{"type": "function"}])
    assert (second.row, second.label, second.metadata, second.tools) == (1, "x", {}, None)


line_kinds = st.sampled_from(["row", "long row", "blank", "spaces"])


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(line_kinds, max_size=300),
    bounds=st.tuples(*[st.none() | st.integers(-320, 320)] * 2),
    ends=st.booleans(),
    crlf=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_row_of_any_slice_is_the_line_that_splitting_the_file_gives(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[str],
    bounds: tuple[int | None, int | None],
    ends: bool,
    crlf: bool,
    seed: int,
) -> None:
    lines = []
    for number, kind in enumerate(kinds):
        pad = "é" * 3000 if kind == "long row" else ""
        row = json.dumps({"prompt": f"{number}{pad}", "label": number}, ensure_ascii=False)
        lines.append({"blank": "", "spaces": " \t "}.get(kind, row))
    text = ("\r\n" if crlf else "\n").join(lines) + ("\n" if ends else "")
    expected = [n for n, kind in enumerate(kinds) if "row" in kind][slice(*bounds)]
    folder = tmp_path_factory.mktemp("d")
    if not expected:
        with pytest.raises(DataError, match="has no prompts"):
            open_text(folder, text, slice(*bounds))
        return
    source = open_text(folder, text, slice(*bounds))
    assert source.num_rows == len(expected)
    order = list(range(len(expected)))
    random.Random(seed).shuffle(order)
    assert {row: source.read(row).label for row in order} == dict(enumerate(expected))
    source.check()


def test_the_fingerprint_is_that_of_the_chosen_rows_alone(tmp_path: Path) -> None:
    whole = open_text(tmp_path, lines_of(200)).fingerprint
    part = open_text(tmp_path, lines_of(200), slice(100, 150)).fingerprint
    assert part != whole
    # Rows that were added behind it, blank lines, or another folder change nothing.
    (tmp_path / "other").mkdir()
    grown = lines_of(230).replace("\n", "\n\n")
    assert open_text(tmp_path / "other", grown, slice(100, 150)).fingerprint == part
    assert open_text(tmp_path, lines_of(200), slice(0, None)).fingerprint == whole
    assert open_text(tmp_path, lines_of(230), slice(0, 200)).fingerprint == whole
    assert open_text(tmp_path, lines_of(200).strip()).fingerprint == whole
    changed = lines_of(200).replace('"p120"', '"p12O"')
    assert open_text(tmp_path, changed, slice(100, 150)).fingerprint != part
    assert open_text(tmp_path, changed).fingerprint != whole
    swapped = lines_of(200).splitlines(keepends=True)
    swapped[3], swapped[4] = swapped[4], swapped[3]
    assert open_text(tmp_path, "".join(swapped)).fingerprint != whole


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"prompts\.jsonl has no prompts \(0 rows"),
        ("\n\n", "has no prompts"),
        ('{"prompt": "a", "label": 1}\n{"prompt": "a"', r"prompts\.jsonl:2: not JSON"),
        ('["a"]\n', r"prompts\.jsonl:1: a list"),
        (
            '{"prompt": "a", "label": 1}\n\n{"text": "a", "label": 1}\n',
            r"jsonl:3: no key 'prompt' \(rollout.input_key\); there are \['label', 'text'\]",
        ),
        ('{"prompt": "a"}\n', r"no key 'label' \(rollout.label_key\)"),
        ('{"prompt": 5, "label": 1}\n', "jsonl:1: 'prompt' is 5; a prompt is a text or a list"),
        ('{"prompt": null, "label": 1}\n', "jsonl:1: 'prompt' is null; a prompt is a text"),
        (
            '{"prompt": [{"role": "user", "content": null}], "label": 1}\n',
            "jsonl:1: message 0 of 'prompt' has no content; a message is",
        ),
        ('{"prompt": [], "label": 1}\n', "jsonl:1: 'prompt' has no messages"),
        ('{"prompt": ["hello"], "label": 1}\n', "jsonl:1: message 0 of 'prompt' has no role"),
        (
            '{"prompt": [{"role": "user", "content": "x"}, {"content": "y"}], "label": 1}\n',
            "message 1 of 'prompt' has no role",
        ),
        ('{"prompt": "a", "label": NaN}\n', "jsonl:1: not JSON .*NaN"),
        ('{"prompt": "a", "label": 1, "m": 3}\n', "jsonl:1: 'm' is not an object"),
        ('{"prompt": "a", "label": 1, "t": 3}\n', "jsonl:1: 't' is not a list of tools"),
        ('{"prompt": "a", "label": 1, "t": "[3"}\n', "jsonl:1: 't' is not JSON"),
        ('{"prompt": "half \\ud83d", "label": 1}\n', "jsonl:1: holds a value that JSON cannot"),
        (b'{"prompt": "a", "label": "\xff"}\n', "jsonl:1: not JSON"),
        ("[" * 100_000 + "\n", "jsonl:1: not JSON"),
    ],
)
def test_bad_data_is_one_line_with_file_and_line(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        open_text(tmp_path, text, keys=Keys("data", "prompt", "label", "m", "t")).check()
    assert "\n" not in str(caught.value)


def test_a_key_that_a_data_set_sets_for_itself_is_named_there(tmp_path: Path) -> None:
    keys = Keys("b", "q", places={"input_key": "rollout.prompt_data[1].input_key"})
    with pytest.raises(DataError, match=r"\(rollout\.prompt_data\[1\]\.input_key\)"):
        open_text(tmp_path, '{"prompt": "a"}', keys=keys).read(0)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prompts\.jsonl: No such file"):
        JsonlSource(str(tmp_path / "prompts.jsonl"), slice(None), KEYS)
    with pytest.raises(DataError, match="Is a directory"):
        JsonlSource(str(tmp_path), slice(None), KEYS)


def test_a_bad_line_far_behind_is_found_by_its_number(tmp_path: Path) -> None:
    lines = lines_of(5000).splitlines(keepends=True)
    lines[4321] = '{"prompt": 3.5, "label": 1}\n'
    source = open_text(tmp_path, "\n" + "".join(lines))
    source.read(4320)
    with pytest.raises(DataError, match=r"prompts\.jsonl:4323: 'prompt' is 3.5"):
        source.check()


def test_a_file_that_shrinks_while_it_is_read_is_no_shorter_data(tmp_path: Path) -> None:
    source = open_text(tmp_path, lines_of(100))
    (tmp_path / "prompts.jsonl").write_text(lines_of(70))
    with pytest.raises(DataError, match="was changed while it was read"):
        source.read(80)


def test_keys_that_no_row_has_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = '{"prompt": "a", "label": 1, "m": {"x": 1}}\n' * 3
    open_text(tmp_path, text, keys=Keys("d", metadata_key="m", tool_key="tols")).check()
    assert [record.args[1] for record in caplog.records] == ["tols"]  # type: ignore[index]


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    import tracemalloc

    def peak(num: int) -> int:
        path = tmp_path / f"{num}.jsonl"
        path.write_text(lines_of(num))
        tracemalloc.start()
        source = JsonlSource(str(path), slice(None), KEYS)
        source.check()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        source.close()
        return held

    small, large = peak(1_000), peak(10_000)
    # 16 bytes for each 16th row, and what arrays round up to.
    assert large - small < 9_000 / 16 * 16 * 1.5 + 5_000
