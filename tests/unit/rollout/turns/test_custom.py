"""The user's own function: what it gets, what it may return, and every way to get it wrong."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from slurm_rl.errors import EngineError, RewardError, Stopped
from slurm_rl.rollout.grading import GivenUp, grade_open
from slurm_rl.rollout.journal import render_line
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.turns import make_generate

#: Two turns in slime's own form: tokens by hand, around `args.session`.
BY_HAND = """
async def generate(args, sample, sampling_params):
    response, mask, logprobs = [], [], []
    for turn in range(2):
        said = await args.session.generate(sample.tokens + response)
        response += said.tokens
        mask += [1] * len(said.tokens)
        logprobs += said.logprobs
        if turn == 0:
            added = args.tokenizer.encode(" go on ", add_special_tokens=False)
            response += added
            mask += [0] * len(added)
            logprobs += [None] * len(added)
    sample.tokens = sample.tokens + response
    sample.response_length = len(response)
    sample.response = args.tokenizer.decode(response)
    sample.loss_mask = mask
    sample.rollout_log_probs = logprobs
    sample.status = sample.Status.COMPLETED
    sample.metadata["params"] = sampling_params
    sample.metadata["seen"] = [sample.group_index, sample.index, sample.session_id, sample.label]
    return sample
"""
#: The same by a transcript.
BY_TRANSCRIPT = """
async def generate(args, sample, sampling_params):
    talk = args.begin()
    await talk.say()
    talk.add_tokens(args.tokenizer.encode(" go on ", add_special_tokens=False))
    await talk.say()
    return sample.take(talk)
"""


@pytest.fixture
def run(turn_settings, code, scripted, make_group, served, chat):  # type: ignore[no-untyped-def]
    """Runs a module's `generate` on a group; the engine says `one`, `two`, …"""

    def go(text: str, *, say: Any = None, group: Any = None, **rollout: Any) -> list[Sample]:
        numbers = ["one", "two", "three", "four"]
        engine = scripted(say or (lambda session, turn, request: numbers[turn]))
        settings = turn_settings(custom_generate_function_path=f"{code(text)}.generate", **rollout)
        generate = make_generate(settings, engine=engine, tokenizer=chat, weights=served)
        go.engine = engine  # type: ignore[attr-defined]
        return asyncio.run(generate(group or make_group(num=2, metadata={"k": [1]})))

    return go


def test_by_hand_and_by_transcript_are_the_same_sample(run, chat) -> None:  # type: ignore[no-untyped-def]
    by_hand, by_transcript = run(BY_HAND), run(BY_TRANSCRIPT)
    for mine, other in zip(by_hand, by_transcript, strict=True):
        assert mine.response_tokens == other.response_tokens
        assert mine.loss_mask == other.loss_mask
        assert mine.rollout_logprobs == other.rollout_logprobs
        assert (mine.seed, mine.rollout_index, mine.status) == (
            other.seed,
            other.rollout_index,
            other.status,
        )
    first, second = by_hand
    assert chat.decode(first.response_tokens) == "one<|im_end|> go on two<|im_end|>"
    pairs = list(zip(first.rollout_logprobs, first.loss_mask, strict=True))
    assert all((logprob == 0.0) == (mask == 0) for logprob, mask in pairs)
    assert [s.rollout_index for s in by_hand] == [s.sample_index for s in by_hand] == [0, 1]
    assert first.metadata["seen"] == [5, 0, "5/0", "7"]
    assert second.metadata["seen"] == [5, 1, "5/1", "7"]
    assert first.metadata["params"]["temperature"] == 0.9
    assert first.metadata["params"]["max_new_tokens"] == 400
    assert (first.weights_version, first.reward, first.label) == (3, None, "7")


def test_settings_are_attributes(run) -> None:  # type: ignore[no-untyped-def]
    body = BY_TRANSCRIPT.replace(
        "    talk = args.begin()",
        "    sample.reward = args.n_samples_per_prompt + args.seed + args.max_turns\n    talk = args.begin()",
    )
    assert {s.reward for s in run(body)} == {4 + 1234 + 4}


def test_what_a_function_does_to_its_sample_stays_there(run, make_group) -> None:  # type: ignore[no-untyped-def]
    group = make_group(num=2, metadata={"k": [1]})
    body = BY_TRANSCRIPT.replace("    await", "    sample.metadata['k'].append(2)\n    await", 1)
    samples = run(body, group=group)
    assert [s.metadata["k"] for s in samples] == [[1, 2], [1, 2]]
    assert group.visit.prompt.metadata == {"k": [1]}


FAN_OUT = """
import copy

async def generate(args, sample, sampling_params):
    planner = args.begin()
    await planner.say()
    samples = [copy.copy(sample).take(planner)]
    for part in range(2 + sample.index):
        talk = args.begin(tuple(args.tokenizer.encode(f"part {part}", add_special_tokens=False)))
        await talk.say()
        child = copy.copy(sample).take(talk)
        child.prompt = f"part {part}"
        child.reward = part / 2
        samples.append(child)
    return samples
"""


def test_one_conversation_may_give_several_samples(run, chat) -> None:  # type: ignore[no-untyped-def]
    samples = run(FAN_OUT)
    assert [s.sample_index for s in samples] == list(range(7))
    assert [s.rollout_index for s in samples] == [0] * 3 + [1] * 4
    assert [s.prompt for s in samples] == [
        "hi",
        "part 0",
        "part 1",
        "hi",
        "part 0",
        "part 1",
        "part 2",
    ]
    assert [chat.decode(s.prompt_tokens) for s in samples[1:3]] == ["part 0", "part 1"]
    assert [s.reward for s in samples[:3]] == [None, 0.0, 0.5]
    assert {s.seed for s in samples[:3]} == {100}
    assert all(set(s.loss_mask) == {1} for s in samples)


def changed(line: str) -> str:
    """BY_HAND with a line before it returns."""
    return BY_HAND.replace("    return sample\n", f"    {line}\n    return sample\n")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("sample.loss_mask = mask[1:]", r"values of loss_mask for \d+ response tokens"),
        ("sample.loss_mask = [0.5] * len(mask)", "loss_mask of other values than 0 and 1"),
        ("sample.loss_mask = [2] * len(mask)", "loss_mask of other values than 0 and 1"),
        (
            "sample.rollout_log_probs = None",
            "without rollout_log_probs for tokens that are trained on",
        ),
        (
            "sample.rollout_log_probs = logprobs[1:]",
            r"\d+ rollout_log_probs for \d+ response tokens",
        ),
        ("sample.loss_mask = [1] * len(mask)", "the log-prob None of a trained token"),
        ("sample.rollout_log_probs = [float('nan')] * len(mask)", "log-prob nan of a trained"),
        ("sample.rollout_log_probs = [0.5] * len(mask)", "log-prob 0.5 of a trained"),
        (
            "sample.tokens = sample.tokens + [10 ** 6]",
            "with the token 1000000; tokens are ids below",
        ),
        ("sample.tokens = sample.tokens + ['x']", "with the token 'x'"),
        ("sample.response_length = len(sample.tokens)", "and response_length"),
        ("sample.response_length = -1", "and response_length -1"),
        ("sample.response_length = 0; sample.loss_mask = None", "without response tokens"),
        ("sample.status = 'done'", "whose status is 'done'; set sample.status to one of completed"),
        ("sample.status = sample.Status.PENDING", "whose status is 'pending'"),
        ("sample.reward = float('inf')", "with the reward inf"),
        ("sample.reward = 'high'", "with the reward 'high'"),
        ("sample.reward = 10 ** 400", "with the reward 1000"),
        ("sample.reward = -1e39", r"with the reward -1e\+39; .* of single precision"),
        ("sample.rollout_log_probs = [-(10 ** 400)] * len(mask)", "log-prob -1000"),
        ("sample.reward = {'a': 1.0}", "reward is an object; name its entry as rollout.reward_key"),
        ("return None", "a NoneType, which is no sample"),
        ("return 3", "a int, which is no sample"),
        ("return []", "no samples"),
        ("raise KeyError('gone')", r"raised KeyError: 'gone' at .*mycode.*\.py:\d+"),
        ("raise SystemExit", "raised SystemExit"),
        ("await args.session.generate([])", "session.generate was given no tokens"),
    ],
)
def test_whatever_is_wrong_is_one_line(run, line: str, problem: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RewardError, match=problem) as caught:
        run(changed(line))
    assert "\n" not in str(caught.value)
    if "session.generate" not in line:
        assert str(caught.value).startswith("rollout.custom_generate_function_path: generate (")


def test_a_function_that_hides_the_engines_error(run) -> None:  # type: ignore[no-untyped-def]
    def say(session: str, turn: int, request: Any) -> Any:
        raise EngineError("the server died")

    body = BY_TRANSCRIPT.replace(
        "    await talk.say()\n    return",
        "    try:\n        await talk.say()\n    except Exception:\n        pass\n    return",
    ).replace("    await talk.say()\n    talk", "    talk")
    with pytest.raises(EngineError, match="the server died"):
        run(body, say=say)


def test_removed_samples_are_masked(run) -> None:  # type: ignore[no-untyped-def]
    samples = run(changed("sample.remove_sample = True; sample.rollout_log_probs = None"))
    assert all(set(s.loss_mask) == {0} and s.response_length > 5 for s in samples)
    assert all(set(s.rollout_logprobs) == {0.0} for s in samples)


def test_rewards_of_several_parts(run) -> None:  # type: ignore[no-untyped-def]
    samples = run(changed("sample.reward = {'score': 1, 'style': 0.25}"), reward_key="score")
    assert samples[0].reward == 1.0
    assert samples[0].rewards == {"score": 1.0, "style": 0.25}
    with pytest.raises(RewardError, match="with the reward"):
        run(changed("sample.reward = {'style': 0.25}"), reward_key="score")


def test_numbers_of_numpy_and_torch_count(run) -> None:  # type: ignore[no-untyped-def]
    line = "import numpy, torch; sample.reward = {'a': numpy.array(0.5), 'b': torch.tensor(2)}"
    sample, _ = run(changed(line), reward_key="a")
    assert (sample.reward, sample.rewards) == (0.5, {"a": 0.5, "b": 2.0})
    more = "sample.rollout_log_probs = list(numpy.array([x or 0 for x in logprobs]))"
    plain, _ = run(BY_HAND)
    assert run(changed(f"import numpy; {more}"))[0].rollout_logprobs == plain.rollout_logprobs


def test_a_masked_tail_beyond_the_limit_is_cut_and_a_trained_one_refused(run, make_group) -> None:  # type: ignore[no-untyped-def]
    # "one" and the end are 4 tokens, " go on " 7.
    body = BY_HAND.replace("range(2)", "range(1)")
    sample, _ = run(body, group=make_group(num=2, limit=8))
    assert (sample.response_length, sample.status) == (8, "truncated")
    assert sample.loss_mask == (1, 1, 1, 1, 0, 0, 0, 0)
    assert sample.response == "one go "
    line = "sample.loss_mask = [1] * len(mask); sample.rollout_log_probs = [-1.0] * len(mask)"
    with pytest.raises(RewardError, match="of 11 response tokens, where 8 are allowed"):
        run(
            body.replace("    return sample\n", f"    {line}\n    return sample\n"),
            group=make_group(limit=8),
        )


@pytest.mark.parametrize("status", ["failed", "aborted"])
def test_a_sample_without_an_answer(run, status: str) -> None:  # type: ignore[no-untyped-def]
    body = f"async def generate(args, sample, sampling_params):\n    sample.status = {status!r}\n    return sample\n"
    sample, _ = run(body)
    assert (sample.status, sample.response_tokens, sample.loss_mask) == (status, (), ())
    assert sample.prompt_tokens


def test_a_prompt_that_goes_on_from_the_rows_is_a_prompt(run, make_group) -> None:  # type: ignore[no-untyped-def]
    body = BY_TRANSCRIPT.replace("args.begin()", "args.begin((*sample.tokens, 1, 2, 3, 4, 5))")
    body = body.replace("    talk.add_tokens", "    return sample.take(talk)\n    talk.add_tokens")
    sample, _ = run(body, say=lambda *_: [7] * 99, group=make_group(num=2, limit=6))
    assert sample.prompt_tokens[-5:] == (1, 2, 3, 4, 5)
    assert sample.response_tokens == (7,) * 6


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("sample.metadata['x'] = {1}", r"metadata\['x'\] is of type set"),
        ("sample.metadata = [1]", "metadata is of type list, not an object"),
        ("sample.label = float('nan')", "label is nan"),
        ("sample.prompt = object()", "prompt is of type object"),
        ("sample.response = 3", "whose response is of type int"),
        ("sample.tokens = None", "cannot be read: TypeError"),
        ("sample.rollout_log_probs = 3", "cannot be read: TypeError"),
        ("del sample.metadata", "cannot be read: AttributeError"),
        ("raise ValueError('one\\ntwo')", "raised ValueError: one two at"),
        ("import asyncio; raise asyncio.CancelledError", "raised CancelledError at"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt at"),
    ],
)
def test_what_a_sample_cannot_hold_is_one_line(run, line: str, problem: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RewardError, match=problem) as caught:
        run(changed(line))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("rollout.custom_generate_function_path: generate (")


@pytest.mark.parametrize(
    "line",
    [
        "raise ValueError('gone')",
        "sample.metadata['x'] = {1}",
        "return None",
        "from slurm_rl.errors import RewardError; raise RewardError('gone')",
    ],
)
def test_a_function_that_fails_follows_on_reward_error(run, make_group, line: str) -> None:  # type: ignore[no-untyped-def]
    """With `drop` its group is left out; with `halt`, and for an engine that fails, all ends."""
    with pytest.raises(RewardError):
        run(changed(f"if sample.index == 1: {line}"))
    body = changed(f"if sample.index == 1:\n        {line}")
    given_up = run(body, group=make_group(num=2, index=7), on_reward_error="drop")
    assert isinstance(given_up, GivenUp)

    async def grade(samples: Any) -> Any:
        raise AssertionError("what was given up is not graded")

    graded = asyncio.run(grade_open(given_up, grade))
    assert (graded.outcome, graded.why) == ("dropped", given_up.why) and given_up.why
    assert [(s.group_index, s.sample_index, s.status) for s in graded.samples] == [
        (7, 0, "failed"),
        (7, 1, "failed"),
    ]
    render_line("k", graded.samples, outcome=graded.outcome, keep=False, reason=graded.why)


def test_an_engine_that_fails_is_no_reward_error(run) -> None:  # type: ignore[no-untyped-def]
    def say(session: str, turn: int, request: Any) -> Any:
        raise EngineError("the server died")

    renamed = BY_TRANSCRIPT.replace(
        "    await talk.say()\n    return",
        "    try:\n        await talk.say()\n    except Exception as error:\n"
        "        raise RuntimeError('mine') from error\n    return",
    )
    for body in (BY_TRANSCRIPT, renamed):
        with pytest.raises(EngineError, match="the server died"):
            run(body, say=say, on_reward_error="drop")


def test_a_signal_that_stops_us_goes_through(run) -> None:  # type: ignore[no-untyped-def]
    """It may arrive while the user's code runs; that is not the user's fault."""
    with pytest.raises(Stopped):
        run(changed("from slurm_rl.errors import Stopped; raise Stopped(15)"))


HANGS = {
    "a coroutine": "    await asyncio.sleep(3600)",
    "in a thread": "    await asyncio.to_thread(time.sleep, 2)",
    "after a turn": "    await args.session.generate(sample.tokens)\n    await asyncio.sleep(3600)",
    "that hides why": (
        "    for _ in range(2):\n        try:\n            await asyncio.sleep(2)\n"
        "        except BaseException:\n            pass"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in HANGS.items()])
def test_a_function_that_hangs_has_a_deadline(run, make_group, body: str) -> None:  # type: ignore[no-untyped-def]
    text = f"import asyncio, time\n\nasync def generate(args, sample, sampling_params):\n{body}\n"
    problem = (
        r"^rollout.custom_generate_function_path: generate \(.*:3\) took longer than"
        r" rollout.generate_timeout_s = 0.3 s, the engine's answers not counted;"
        r" mend it, or raise rollout.generate_timeout_s$"
    )
    began = time.monotonic()
    with pytest.raises(RewardError, match=problem):
        run(text, generate_timeout_s=0.3)
    assert time.monotonic() - began < 10
    given_up = run(text, generate_timeout_s=0.3, on_reward_error="drop")
    assert {sample.status for sample in given_up.samples} == {"failed"}
    assert "took longer than" in given_up.why


def test_a_plain_function_that_hangs_holds_nobody(run) -> None:  # type: ignore[no-untyped-def]
    text = "import time\n\ndef generate(args, sample, sampling_params):\n    time.sleep(3600)\n"
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"took longer than rollout.generate_timeout_s = 0.3 s"):
        run(text, generate_timeout_s=0.3)
    assert time.monotonic() - began < 10


def test_a_plain_function_may_give_a_sample_or_a_coroutine(run) -> None:  # type: ignore[no-untyped-def]
    body = BY_TRANSCRIPT.replace("generate(args", "speak(args")
    body += "\ndef generate(args, sample, params):\n    return speak(args, sample, params)\n"
    assert run(body) == run(BY_TRANSCRIPT)
    plain = "def generate(args, sample, params):\n    sample.status = 'failed'\n    return sample\n"
    assert {sample.status for sample in run(plain)} == {"failed"}


@pytest.mark.slow
def test_the_engines_time_is_not_the_functions(run) -> None:  # type: ignore[no-untyped-def]
    """Neither of one answer nor of several at once; all that lies between them is counted."""

    async def say(session: str, turn: int, request: Any) -> str:
        await asyncio.sleep(0.5 + 0.2 * (len(request.prompt_tokens) % 2))
        return "one"

    ask = (
        "    await asyncio.gather(*(args.session.generate(sample.tokens + t)"
        " for t in ([1], [1, 2])))\n    await asyncio.sleep({})\n"
    )
    text = "import asyncio\n\nasync def generate(args, sample, sampling_params):\n{}{}{}"
    left = "    sample.status = 'failed'\n    return sample\n"
    short, long = (text.format(ask.format(s), ask.format(s), left) for s in (0.0, 0.8))
    assert {sample.status for sample in run(short, say=say, generate_timeout_s=1.2)} == {"failed"}
    with pytest.raises(RewardError, match=r"took longer than rollout.generate_timeout_s = 1.2 s"):
        run(long, say=say, generate_timeout_s=1.2)


def test_one_that_goes_on_after_its_deadline_gets_no_answers(run) -> None:  # type: ignore[no-untyped-def]
    text = (
        "import asyncio\n\nasync def generate(args, sample, sampling_params):\n"
        "    try:\n        await asyncio.sleep(3600)\n    except BaseException:\n        pass\n"
        "    while True:\n        await args.session.generate(sample.tokens)\n"
    )
    with pytest.raises(RewardError, match="took longer"):
        run(text, generate_timeout_s=0.3)
    assert not run.engine.asked
