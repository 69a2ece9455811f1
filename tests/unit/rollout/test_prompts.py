import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.errors import DataError
from slurm_rl.rollout.prompts import (
    Cursor,
    Prompt,
    PromptSet,
    epoch_order,
    parse_slice,
    prompt_tokenizer,
    read_prompts,
    start_cursor,
    take_batch,
)


def write_rows(path: Path, rows: list[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows(num: int) -> list[object]:
    return [{"prompt": f"p{k}", "label": k} for k in range(num)]


def make_set(num: int) -> PromptSet:
    return PromptSet(
        "f.jsonl", tuple(Prompt(k, "x" * (k + 1), None, {}) for k in range(num)), "xxh3:f"
    )


def take(
    data: PromptSet,
    cursor: Cursor,
    num: int,
    *,
    seed: int = 1,
    shuffle: bool = True,
    longest: int | None = None,
):  # type: ignore[no-untyped-def]
    return take_batch(
        data,
        cursor,
        num_prompts=num,
        order=epoch_order(len(data.prompts), seed=seed, shuffle=shuffle),
        tokenize=lambda prompt: [1] * len(prompt.prompt),
        max_tokens=longest,
    )


def test_rows_keys_and_metadata(make_settings, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    write_rows(
        tmp_path / "prompts.jsonl", [{"q": "a", "a": 7, "m": {"k": 1}}, {"q": "b", "a": "x"}]
    )
    settings = make_settings(input_key="q", label_key="a", metadata_key="m").rollout
    first, second = read_prompts(settings).prompts
    assert (first.prompt, first.label, first.metadata) == ("a", 7, {"k": 1})
    assert (second.label, second.metadata) == ("x", {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("d.jsonl", ("d.jsonl", slice(None))),
        ("d.jsonl@[2:5]", ("d.jsonl", slice(2, 5))),
        ("d@x.jsonl@[:-1]", ("d@x.jsonl", slice(None, -1))),
        ("d.jsonl@[3:]", ("d.jsonl", slice(3, None))),
    ],
)
def test_slices(text: str, expected: object) -> None:
    assert parse_slice(text) == expected


def test_a_slice_is_its_own_data_and_names_real_lines(make_settings, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "prompts.jsonl"
    write_rows(path, rows(6))
    whole = read_prompts(make_settings().rollout)
    part = read_prompts(make_settings(prompt_data=f"{path}@[2:4]").rollout)
    assert [p.label for p in part.prompts] == [2, 3]
    assert part.fingerprint != whole.fingerprint
    path.write_text(path.read_text().replace('"p3"', "3.5"))
    with pytest.raises(DataError, match=r"prompts\.jsonl:4: 'prompt' is a float"):
        read_prompts(make_settings(prompt_data=f"{path}@[2:4]").rollout)


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
        ('{"prompt": 5, "label": 1}\n', "is a int"),
    ],
)
def test_bad_data_is_one_line_with_file_and_line(
    make_settings, tmp_path: Path, text: str, message: str
) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "prompts.jsonl").write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read_prompts(make_settings().rollout)
    assert "\n" not in str(caught.value)


def test_no_file_and_metadata_that_is_no_object(make_settings, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match=r"prompts\.jsonl: No such file"):
        read_prompts(make_settings().rollout)
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": "a", "label": 1, "m": 3}])
    with pytest.raises(DataError, match="'m' is not an object"):
        read_prompts(make_settings(metadata_key="m").rollout)


def test_cursor_starts_goes_on_and_refuses_changed_data() -> None:
    data = make_set(4)
    assert start_cursor(data, None) == Cursor(0, 0, "xxh3:f")
    saved = Cursor(2, 3, "xxh3:f").as_dict()
    assert start_cursor(data, saved) == Cursor(2, 3, "xxh3:f")
    with pytest.raises(DataError, match="not those of the previous iteration"):
        start_cursor(data, saved | {"data_fingerprint": "xxh3:other"})


@given(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=6), st.booleans())
def test_batches_in_turn_are_one_long_batch(num_rows: int, sizes: list[int], shuffle: bool) -> None:
    data = make_set(num_rows)
    cursor, pieces = Cursor(0, 0, "xxh3:f"), []
    for size in sizes:
        visits, cursor = take(data, cursor, size, shuffle=shuffle)
        pieces += visits
    whole, end = take(data, Cursor(0, 0, "xxh3:f"), sum(sizes), shuffle=shuffle)
    assert (pieces, cursor) == (whole, end)
    assert [v.group_index for v in whole] == list(range(sum(sizes)))
    for epoch in range(sum(sizes) // num_rows):
        seen = [v.prompt.row for v in whole[epoch * num_rows : (epoch + 1) * num_rows]]
        assert sorted(seen) == list(range(num_rows))
        assert shuffle or seen == list(range(num_rows))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    data = make_set(30)
    start = Cursor(0, 0, "xxh3:f")
    visits, _ = take(data, start, 60)
    other, _ = take(data, start, 30, seed=2)
    first, second = ([v.prompt.row for v in visits[k : k + 30]] for k in (0, 30))
    assert first != second
    assert first != [v.prompt.row for v in other]


def test_long_prompts_are_skipped_but_keep_their_place() -> None:
    visits, cursor = take(make_set(5), Cursor(0, 0, "xxh3:f"), 4, shuffle=False, longest=3)
    assert [(v.group_index, v.prompt.row) for v in visits] == [(0, 0), (1, 1), (2, 2), (5, 0)]
    assert cursor == Cursor(1, 1, "xxh3:f")
    with pytest.raises(DataError, match="every prompt is longer than"):
        take(make_set(5), Cursor(0, 2, "xxh3:f"), 1, longest=0)


def test_raw_and_chat_tokens(make_settings, tokenizer) -> None:  # type: ignore[no-untyped-def]
    raw = prompt_tokenizer(tokenizer, make_settings().rollout)
    assert tokenizer.decode(raw(Prompt(0, "ab=", None, {}))) == "ab="
    with pytest.raises(DataError, match="list of messages"):
        raw(Prompt(0, [{"role": "user", "content": "a"}], None, {}))
    with pytest.raises(DataError, match="has no tokens"):
        raw(Prompt(0, "", None, {}))
    templated = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    templated.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}{% if think %}t{% endif %}"
    )
    settings = make_settings(apply_chat_template=True, apply_chat_template_kwargs={"think": True})
    chat = prompt_tokenizer(templated, settings.rollout)
    assert templated.decode(chat(Prompt(0, "ab", None, {}))) == "user ab=t"
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    assert templated.decode(chat(Prompt(0, messages, None, {}))) == "system xuser y=t"


def test_a_model_without_a_template_is_a_data_error(make_settings, tokenizer) -> None:  # type: ignore[no-untyped-def]
    chat = prompt_tokenizer(tokenizer, make_settings(apply_chat_template=True).rollout)
    with pytest.raises(DataError, match="the chat template failed"):
        chat(Prompt(0, "ab", None, {}))
