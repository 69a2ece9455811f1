from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers
from toy.services import FakeService
from transformers import PreTrainedTokenizerFast

from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, EngineError, ModelError, RewardError
from slurm_rl.rollout.rewards import Graded, Grader
from slurm_rl.rollout.samples import Sample

Make = Callable[..., Sample]
Build = Callable[..., Settings]
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"


def ask(
    make: Build, answer: Any, samples: list[Sample], *, served: bool = False, **values: Any
) -> tuple[Graded, list[tuple[str, dict[str, Any]]]]:
    """Grade with a server that gives `answer`: the outcome, and what the server was asked."""

    async def run() -> tuple[Graded, list[tuple[str, dict[str, Any]]]]:
        async with FakeService(answer if callable(answer) else lambda payload: answer) as server:
            own = {} if served else {"rm_url": server.url + "/score"}
            async with Grader(
                make(**own, **values), score_url=server.url if served else None
            ) as grader:
                return await grader.grade(samples), server.payloads

    return asyncio.run(run())


@pytest.mark.parametrize("answer", [0.5, {"reward": 0.5, "x": 1}, {"score": 0.5}])
def test_a_remote_model_gets_the_sample_and_gives_a_number(
    make: Build, sample: Make, answer: Any
) -> None:
    made = sample("r", ["l"], prompt=[{"role": "user", "content": "p"}], metadata={"m": 1})
    graded, asked = ask(make, answer, [made], rm_type="remote_rm")
    assert [s.reward for s in graded.samples] == [0.5]
    payload = {"prompt": made.prompt, "response": "r", "label": ["l"], "metadata": {"m": 1}}
    assert asked == [("/score", payload)]


def test_a_remote_model_may_give_an_object(make: Build, sample: Make) -> None:
    answer = {"total": 2, "style": 0.5}
    graded, _ = ask(make, answer, [sample()], rm_type="remote_rm", reward_key="total")
    assert (graded.samples[0].reward, graded.samples[0].rewards) == (2.0, {"style": 0.5})


def test_boxed_is_what_the_remote_model_sees(make: Build, sample: Make) -> None:
    _, asked = ask(make, 1, [sample("so \\boxed{7}")], rm_type="boxed_remote_rm")
    assert asked[0][1]["response"] == "7"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            {"value": 1},
            "remote_rm got an object without reward or score .it has value. for the prompt",
        ),
        ("high", "returned a str, not a number"),
        (web.Response(status=400, text="no field question"), "answered 400: no field question"),
        (web.Response(text="NaN", content_type="application/json"), "returned nan"),
    ],
)
def test_answers_that_are_no_reward(make: Build, sample: Make, answer: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        ask(make, lambda payload: answer, [sample()], rm_type="remote_rm")
    graded, _ = ask(
        make,
        lambda payload: web.Response(status=400),
        [sample()],
        rm_type="remote_rm",
        on_reward_error="drop",
    )
    assert graded.outcome == "dropped"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    vocab = {word: i for i, word in enumerate(["user", "assistant", "q", "r", "?"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "rm")
    return tmp_path / "rm"


@pytest.mark.parametrize("answer", [{"embedding": [0.25, 9]}, [{"embedding": [0.25, 9]}]])
def test_a_served_model_scores_the_conversation_in_its_own_template(
    make: Build, sample: Make, model: Path, answer: Any
) -> None:
    server = {"top__score": {"server": {"hf_checkpoint": str(model)}}}
    graded, asked = ask(make, answer, [sample("r")], served=True, rm_type="served_rm", **server)
    assert graded.samples[0].reward == 0.25
    assert asked == [("/classify", {"input_ids": [0, 2, 1, 3]})]
    rewards = [{"rm_type": "served_rm", "options": {"index": 1}}]
    graded, _ = ask(make, answer, [sample("r")], served=True, rewards=rewards, **server)
    assert graded.samples[0].reward == 9
    with pytest.raises(
        RewardError, match=r"which has no output 0 .*; is score.server.hf_checkpoint a"
    ):
        ask(make, {"text": "hm"}, [sample("r")], served=True, rm_type="served_rm", **server)


def test_a_model_that_cannot_be_used(
    make: Build, sample: Make, tmp_path: Path, model: Path
) -> None:
    for folder, message in (
        (tmp_path / "none", "cannot be loaded"),
        (model, "has no chat template"),
    ):
        for file in model.glob("chat_template*"):
            file.unlink()
        config = model / "tokenizer_config.json"
        config.write_text(config.read_text().replace("chat_template", "other"))
        server = {"top__score": {"server": {"hf_checkpoint": str(folder)}}}
        with pytest.raises(ModelError, match=message):
            ask(make, 1, [sample()], served=True, rm_type="served_rm", **server)


def say(text: str | None) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_a_judge_is_asked_at_temperature_0(make: Build, sample: Make) -> None:
    server = {"top__score": {"server": {"hf_checkpoint": "/m"}}}
    made = sample("r {label}", "l", prompt="p {response}")
    graded, asked = ask(
        make, say("Score: 0 at first, but\n**Score: 0.75**"), [made],
        served=True, rm_type="judge", **server,
    )  # fmt: skip
    assert graded.samples[0].reward == 0.75
    ((path, payload),) = asked
    assert path == "/v1/chat/completions"
    assert payload["temperature"] == 0
    (message,) = payload["messages"]
    assert "p {response}" in message["content"] and "r {label}" in message["content"]


def test_a_judge_may_have_words_of_its_own(make: Build, sample: Make) -> None:
    server = {"top__score": {"server": {"hf_checkpoint": "/m"}}}
    options = {"template": "{prompt}|{response}|{label}|{x}", "pattern": r"<(\d+)>", "scale": 10}
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    made = sample("r", 5, prompt=conversation)
    graded, asked = ask(
        make, say("<7> <8>"), [made],
        served=True, rewards=[{"rm_type": "judge", "options": options}], **server,
    )  # fmt: skip
    assert graded.samples[0].reward == pytest.approx(0.8)
    assert asked[0][1]["messages"][0]["content"] == "user: a\n\nassistant: b|r|5|{x}"
    for text in ("no number", None):
        with pytest.raises(RewardError, match=r"judge: no number by .* or set unreadable"):
            ask(make, say(text), [made], served=True, rm_type="judge", **server)
        rewards = [{"rm_type": "judge", "options": {"unreadable": -1}}]
        graded, _ = ask(make, say(text), [made], served=True, rewards=rewards, **server)
        assert graded.samples[0].reward == -1
    with pytest.raises(RewardError, match="judge: the server answered"):
        ask(make, {"error": "x"}, [made], served=True, rm_type="judge", **server)


def test_a_judge_that_is_shown_the_label_needs_one(make: Build, sample: Make) -> None:
    server = {"top__score": {"server": {"hf_checkpoint": "/m"}}}
    made = sample("r", None)
    with pytest.raises(RewardError, match="reward judge: the sample has no label to compare"):
        ask(make, say("Score: 1"), [made], served=True, rm_type="judge", **server)
    rewards = [{"rm_type": "judge", "options": {"template": "{prompt}|{response}"}}]
    graded, _ = ask(make, say("Score: 1"), [made], served=True, rewards=rewards, **server)
    assert graded.samples[0].reward == 1


def test_no_server_is_said(make: Build, sample: Make) -> None:
    async def run(url: str | None) -> None:
        settings = make(rm_type="judge", reward_timeout_s=1.0)
        async with Grader(settings, score_url=url) as grader:
            await grader.grade([sample()])

    with pytest.raises(ConfigError, match="ask the score stage's server, and there is none here"):
        asyncio.run(run(None))


def test_a_server_that_dies_is_no_fault_of_the_user(
    make: Build, sample: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slurm_rl.rollout.rewards import means

    monkeypatch.setattr(means, "SERVER_PATIENCE_S", 0.3)

    async def run() -> None:
        async with Grader(make(rm_type="judge"), score_url="http://127.0.0.1:9") as grader:
            await grader.grade([sample()])

    with pytest.raises(EngineError, match=r"the score stage's server: service score at .* is down"):
        asyncio.run(run())
