"""Added messages as tokens: what was said before is never touched, whatever the template."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_rl.errors import DataError
from slurm_rl.rollout.turns.template import ChatTemplate

#: The last answer alone shows an empty thought, as some models' templates do.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: The end token of answers is not that of others.
OTHER_END = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
COUNTING = "{% for m in messages %}{{ loop.index }}:{{ m['content'] }}\n{% endfor %}"
REPEATING = "{{ messages[0]['content'] }}{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}"
CLOSING_DIFFERS = (
    "{% for m in messages %}{{ m['content'] }}{% if loop.last %}<|im_end|>{% endif %}{% endfor %}"
)
REFUSING = "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m['content'] }}{% endfor %}"
TOOL = [{"role": "tool", "name": "calculator", "content": "42"}]


def with_template(chat: Any, template: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(chat, enabled=True, options={"chat_template": template} | options)


words = st.text(alphabet="ab12the <>|\n", max_size=12)
said = st.lists(
    st.tuples(st.sampled_from(["tool", "user", "system"]), words), min_size=1, max_size=3
)


@settings(deadline=None)
@given(words, words, said)
def test_growing_gives_what_the_whole_would_where_the_answer_is_canonical(
    chat: Any, question: str, answer: str, added: list[tuple[str, str]]
) -> None:
    """An independent way to the same tokens: render it all at once, and encode that."""
    template = ChatTemplate(chat, enabled=True)
    messages = [{"role": role, "content": content} for role, content in added]
    prompt = template.encode_prompt(question)
    spoken = (*chat.encode(answer, add_special_tokens=False), chat.eos_token_id)
    grown = prompt + spoken + template.encode_added(messages, last=spoken[-1])
    whole = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    text = chat.apply_chat_template(whole + messages, tokenize=False, add_generation_prompt=True)
    assert list(grown) == chat.encode(text, add_special_tokens=False)


def test_an_end_token_that_the_model_wrote_is_not_written_twice(chat: Any) -> None:
    template = ChatTemplate(chat, enabled=True)
    closed = template.encode_added(TOOL, last=chat.eos_token_id)
    cut = template.encode_added(TOOL, last=chat.encode("a")[0])
    assert chat.decode(closed) == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert cut == (chat.eos_token_id, *closed)


def test_another_end_token_of_the_models_stands_for_the_templates(chat: Any) -> None:
    template = with_template(chat, OTHER_END)
    (end,) = chat.encode("<|end|>", add_special_tokens=False)
    for last in (end, chat.eos_token_id):
        assert chat.decode(template.encode_added(TOOL, last=last)) == "[tool]42[assistant]"
    assert chat.decode(template.encode_added(TOOL, last=0)) == "<|end|>[tool]42[assistant]"


def test_no_token_of_a_message_is_taken_for_an_end(chat: Any) -> None:
    template = with_template(chat, "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    first = chat.encode("4")[0]
    assert chat.decode(template.encode_added(TOOL, last=first)) == "42"


def test_a_thought_that_only_the_last_answer_shows_is_no_obstacle(chat: Any) -> None:
    template = with_template(chat, THINKING)
    text = chat.decode(template.encode_added(TOOL, last=chat.eos_token_id))
    assert text == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (COUNTING, "renders added messages differently after other messages"),
        (CLOSING_DIFFERS, "renders added messages differently"),
        (REPEATING, "shows an answer 2 times, not once"),
        ("{{ messages[0]['content'] }}", "shows an answer 0 times"),
        (REFUSING, "failed on the roles user, assistant, tool: TemplateError: no tools"),
        (
            "{% for m in messages %}{{ m.no.such }}{% endfor %}",
            "failed on the roles user, assistant",
        ),
    ],
)
def test_a_template_that_cannot_grow_is_refused(chat: Any, template: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem) as caught:
        with_template(chat, template).encode_added(TOOL, last=0)
    assert "\n" not in str(caught.value).replace("\\n", "")


def test_tools_are_shown_in_a_prompt(chat: Any) -> None:
    schema = {"type": "function", "function": {"name": "f"}}
    text = chat.decode(ChatTemplate(chat, enabled=True, tools=[schema]).encode_prompt("q"))
    assert '"name": "f"' in text
    assert text.endswith("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")


def test_without_a_template_texts_are_what_they_are(chat: Any) -> None:
    template = ChatTemplate(chat, enabled=False)
    assert chat.decode(template.encode_prompt("12")) == "12"
    assert template.encode_added("", last=0) == ()
    assert chat.decode(template.encode_added(TOOL, last=0)) == "42"
    with pytest.raises(DataError, match="no tokens"):
        template.encode_prompt("")


def test_a_text_that_the_tokenizer_does_not_know(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="tokenizer refuses 'É'"):
        ChatTemplate(tokenizer, enabled=False).encode_added("É", last=0)
