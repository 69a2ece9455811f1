from typing import Any

import pytest

from slurm_rl.errors import DataError
from slurm_rl.rollout.data.rows import Prompt
from slurm_rl.rollout.data.templates import Template, make_tokenize, to_messages

TEMPLATE = (
    "{% for t in tools or () %}{{ t.name }}{% endfor %}"
    "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}{% if think %}t{% endif %}"
)


def row(prompt: Any, tools: Any = None) -> Prompt:
    return Prompt(4, prompt, None, {}, tools=tools)


@pytest.fixture
def templated(tokenizer):  # type: ignore[no-untyped-def]
    made = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    made.chat_template = TEMPLATE
    return made


def test_raw_prompts(tokenizer) -> None:  # type: ignore[no-untyped-def]
    raw = make_tokenize(tokenizer, Template("d.jsonl", "eval.a.apply_chat_template"))
    assert tokenizer.decode(raw(row("ab="))) == "ab="
    with pytest.raises(
        DataError, match=r"d\.jsonl: row 4: .* list of messages; set eval\.a\.apply"
    ):
        raw(row([{"role": "user", "content": "a"}]))
    with pytest.raises(DataError, match=r"d\.jsonl: row 4: the prompt has no tokens"):
        raw(row(""))
    with pytest.raises(DataError, match=r"d\.jsonl: row 4: the model's tokenizer refuses"):
        raw(row("ABC"))


def test_tokens_are_those_of_the_tokenizers_own_call(tokenizer) -> None:  # type: ignore[no-untyped-def]
    """Also where another call has left a setting behind, and where a class has a way of its own."""

    class Odd(type(tokenizer)):  # type: ignore[misc]
        def encode(self, text, **options):  # type: ignore[no-untyped-def]
            return [*super().encode(text, **options), 1]

    encode = make_tokenize(tokenizer, Template("d.jsonl"))
    texts = ["ab=", "a" * 50, "<eos>ab"]
    expected = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert [encode(row(text)) for text in texts] == expected
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=70)
    assert [encode(row(text)) for text in texts] == expected
    odd = Odd(tokenizer_object=tokenizer.backend_tokenizer)
    assert make_tokenize(odd, Template("d.jsonl"))(row("ab=")) == [*expected[0], 1]


@pytest.mark.parametrize(
    ("prompt", "template", "text"),
    [
        ("ab", {}, "user ab="),
        ("ab", {"options": {"think": True}}, "user ab=t"),
        ("ab", {"options": {"add_generation_prompt": False}}, "user ab"),
        (
            [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}],
            {},
            "system xuser y=",
        ),
        ("ab", {"system_prompt": "be good"}, "system be gooduser ab="),
        ("ab", {"tools": [{"name": "calc"}]}, "calcuser ab="),
    ],
)
def test_the_template_writes_a_conversation_out(
    templated, prompt: Any, template: dict[str, Any], text: str
) -> None:  # type: ignore[no-untyped-def]
    chat = make_tokenize(templated, Template("d.jsonl", is_chat=True, **template))
    assert templated.decode(chat(row(prompt))) == text


def test_a_row_s_own_tools_stand_for_those_of_the_run(templated) -> None:  # type: ignore[no-untyped-def]
    chat = make_tokenize(templated, Template("d", is_chat=True, tools=[{"name": "calc"}]))
    assert templated.decode(chat(row("a", [{"name": "x"}, {"name": "y"}]))) == "xyuser a="


def test_a_system_prompt_is_put_first_unless_there_is_one() -> None:
    said = [{"role": "user", "content": "y"}]
    assert to_messages(said, system_prompt="s") == [{"role": "system", "content": "s"}, *said]
    assert said == [{"role": "user", "content": "y"}]
    for role in ("system", "developer"):
        own = [{"role": role, "content": "mine"}, *said]
        assert to_messages(own, system_prompt="s") == own


def test_a_template_that_fails_is_a_data_error(tokenizer, templated) -> None:  # type: ignore[no-untyped-def]
    missing = make_tokenize(tokenizer, Template("d", is_chat=True))
    with pytest.raises(DataError, match="d: row 4: the chat template failed"):
        missing(row("ab"))
    templated.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="failed: roles must alternate; use a model") as caught:
        make_tokenize(templated, Template("d", is_chat=True))(row("ab"))
    assert "\n" not in str(caught.value)
    templated.chat_template = "{{ messages[7].content.x }}"
    with pytest.raises(DataError, match="the chat template failed"):
        make_tokenize(templated, Template("d", is_chat=True))(row("ab"))
