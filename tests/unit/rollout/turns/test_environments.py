"""Environments: the loop, the built-in one, and objects shaped like those of `verifiers`."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from slurm_rl.errors import DataError, RewardError
from slurm_rl.rollout.samples import Sample
from slurm_rl.rollout.turns import make_generate

GUESS = '''
from slurm_rl.rollout.turns import Step

class Guess:
    """Higher or lower, until it is found."""

    closed = []

    def __init__(self, args=None):
        self.limit = args.max_turns if args else 0

    async def reset(self, prompt, seed):
        self.wanted, self.num = int(prompt.label), 0
        return None

    async def step(self, response):
        self.num += 1
        guess = int(response)
        if guess == self.wanted:
            return Step(done=True, reward=1.0, info={"guesses": self.num})
        return Step("higher" if guess < self.wanted else "lower", reward=-0.5, info={"limit": self.limit})

    async def close(self):
        Guess.closed.append(self)


class Own(Guess):
    async def reset(self, prompt, seed):
        await super().reset(prompt, seed)
        return f"{seed} {prompt.prompt}"


class Messages(Guess):
    def reset(self, prompt, seed):
        self.wanted, self.num = int(prompt.label), 0
        return [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


class Scored(Guess):
    async def score(self):
        return 10.0 + self.num


class Silent(Guess):
    async def step(self, response):
        return Step("and?", done=True)


class Bad(Guess):
    async def step(self, response):
        return ("higher", False)


class Nan(Guess):
    async def step(self, response):
        return Step(reward=float("nan"))


class Raising(Guess):
    async def step(self, response):
        raise LookupError("no board")


class Nothing:
    pass


def failing():
    raise OSError("no game")
'''


@pytest.fixture
def run(turn_settings, code, scripted, make_group, served, chat):  # type: ignore[no-untyped-def]
    def go_all(
        name: str, said: list[Any], *, text: str = GUESS, group: Any = None, **rollout: Any
    ) -> list[Sample]:
        go.module = code(text)  # type: ignore[attr-defined]
        engine = scripted(lambda session, turn, request: said[turn])
        go.engine = engine  # type: ignore[attr-defined]
        path = name if name == "reasoning_gym" else f"{go.module}.{name}"  # type: ignore[attr-defined]
        settings = turn_settings(environment=path, **rollout)
        generate = make_generate(settings, engine=engine, tokenizer=chat, weights=served)
        return asyncio.run(generate(group or make_group("guess", num=1, label="7")))

    def go(name: str, said: list[Any], **options: Any) -> Sample:
        (sample,) = go_all(name, said, **options)
        return sample

    go.all = go_all  # type: ignore[attr-defined]
    return go


def test_an_environment_talks_until_it_is_done(run, chat) -> None:  # type: ignore[no-untyped-def]
    sample = run("Guess", ["5", "9", "7"])
    assert (sample.status, sample.reward, sample.response) == ("completed", 1.0, "7")
    assert chat.decode(sample.response_tokens) == (
        "5<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
        "9<|im_end|>\n<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n7<|im_end|>"
    )
    trained = [t for t, m in zip(sample.response_tokens, sample.loss_mask, strict=True) if m]
    assert chat.decode(trained) == "5<|im_end|>9<|im_end|>7<|im_end|>"
    assert sample.metadata["environment"] == {"guesses": 3, "limit": 4}
    assert len(__import__(run.module).Guess.closed) == 1


def test_turns_run_out_with_the_last_reward(run) -> None:  # type: ignore[no-untyped-def]
    sample = run("Guess", ["1", "2", "3", "4", "5"])
    assert (sample.status, sample.reward) == ("truncated", -0.5)
    assert len(run.engine.asked) == 4
    assert sample.loss_mask[-1] == 1


def test_an_answer_that_was_cut_short_is_judged(run) -> None:  # type: ignore[no-untyped-def]
    sample = run("Guess", [("7", "length")])
    assert (sample.status, sample.reward) == ("truncated", 1.0)


def test_an_environment_may_give_the_prompt(run, chat, make_group) -> None:  # type: ignore[no-untyped-def]
    sample = run("Own", ["7"])
    assert chat.decode(sample.prompt_tokens) == (
        "<|im_start|>user\n100 guess<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sample.prompt == "100 guess"
    assert "system\ns" in chat.decode(run("Messages", ["7"]).prompt_tokens)
    # Its limits count from there.
    short = run("Own", ["5", "7"], group=make_group("guess", num=1, label="7", limit=4))
    assert short.response_length <= 4


def test_rewards_at_the_end_and_none_at_all(run) -> None:  # type: ignore[no-untyped-def]
    assert run("Scored", ["5", "7"]).reward == 12.0
    assert run("Silent", ["5"]).reward is None


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Bad", r"rollout.environment: Bad.step \(.*\) returned a tuple, not a Step"),
        ("Nan", "gave the reward nan"),
        ("Raising", r"raised LookupError: no board at .*mycode.*py:\d+"),
        ("Nothing", "made a Nothing, which has no reset and step"),
        ("failing", "raised OSError: no game"),
        ("Missing", "Missing"),
    ],
)
def test_environments_that_fail_are_one_line(run, name: str, problem: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RewardError, match=problem) as caught:
        run(name, ["5"])
    assert "\n" not in str(caught.value)
    if name in ("Bad", "Nan", "Raising"):
        assert len(__import__(run.module).Guess.closed) == 1


def test_without_a_template_the_text_is_what_is_said(run, chat, make_group) -> None:  # type: ignore[no-untyped-def]
    group = make_group("guess", num=1, label="7", tokens=chat.encode("guess:"))
    sample = run("Guess", ["5", "7"], group=group, apply_chat_template=False)
    assert chat.decode(sample.response_tokens) == "5<|im_end|>higher7<|im_end|>"


# -- reasoning-gym ----------------------------------------------------------------------------


@pytest.fixture
def task() -> Any:
    pytest.importorskip("reasoning_gym")
    from slurm_rl.rollout.data.procedural import ProceduralSource
    from slurm_rl.rollout.data.rows import Keys

    options = {"size": 3, "seed": 5}
    source = ProceduralSource(
        "basic_arithmetic", slice(None), Keys("data"), options=options, is_rewarded=True
    )
    return source.read(1)


def test_a_task_in_several_attempts(run, make_group, task) -> None:  # type: ignore[no-untyped-def]
    group = make_group(task.prompt, num=1, label=task.label, metadata=task.metadata)
    said = ["<answer>x</answer>", f"<think>12</think> so <answer> {task.label} </answer>"]
    sample = run("reasoning_gym", said, group=group)
    assert (sample.status, sample.reward) == ("completed", 1.0)
    assert sample.metadata["environment"] == {"num_attempts": 2}
    assert [m["content"] for m in sample.metadata["messages"] if m["role"] == "user"] == [
        "That is not right. Try again."
    ]
    once = run("reasoning_gym", said, group=group, max_turns=1)
    assert (once.status, once.reward) == ("truncated", 0.0)
    plain = run("reasoning_gym", [task.label], group=group)
    assert plain.reward == 1.0


def test_rows_of_other_data_are_refused(run) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match="no metadata of reasoning-gym"):
        run("reasoning_gym", ["5"])


# -- verifiers --------------------------------------------------------------------------------

#: Two objects of the shape that the library has had: with messages, and with the state alone.
VERIFIERS = '''
class Score:
    def __init__(self, reward, metrics):
        self.reward, self.metrics = reward, metrics


class OldRubric:
    async def score_rollout(self, prompt, completion, answer, state, task="default", info=None, **kwargs):
        right = completion[-1]["content"] == answer
        return Score(1.0 if right else 0.25, {"turns": state["turn"], "secret": info["secret"]})


class NewRubric:
    async def score_rollout(self, state):
        said = [m["content"] for m in state["completion"] if m["role"] == "assistant"]
        state["reward"] = 1.0 if state["answer"] in said else 0.0
        state["metrics"] = {"steps": float(len(state["trajectory"]))}


class Old:
    """Doubts an answer once."""

    made = 0
    rubric = OldRubric()
    max_turns = 2

    def __init__(self):
        type(self).made += 1

    async def setup_state(self, state, **kwargs):
        state["doubts"] = 0
        return state

    async def is_completed(self, messages, state, **kwargs):
        assert messages[0]["role"] == "user" and messages[-1]["content"] is not None
        return state["turn"] >= self.max_turns

    async def env_response(self, messages, state, **kwargs):
        state["doubts"] += 1
        return [{"role": "user", "content": f"sure? {messages[-1]['content']}"}], state


class New:
    rubric = NewRubric()

    async def setup_state(self, state):
        state["prompt"] = [*state["prompt"], {"role": "user", "content": "rules"}]

    async def is_completed(self, state):
        return state["answer"] in state["completion"][-1]["content"] or state.get("over", False)

    async def env_response(self, messages, state):
        state["over"] = len(state["trajectory"]) >= 2
        return "no"


class Unscored(New):
    class rubric:
        async def score_rollout(self, state):
            pass

    rubric = rubric()


def load_environment(difficulty="easy"):
    return Old()


def load_new():
    return New()


def load_unscored():
    return Unscored()
'''


def test_the_older_form_of_verifiers(run, make_group) -> None:  # type: ignore[no-untyped-def]
    group = make_group("q", num=1, label="7", metadata={"secret": 3})
    sample = run("load_environment", ["5", "7"], text=VERIFIERS, group=group)
    assert (sample.status, sample.reward) == ("completed", 1.0)
    assert [m["content"] for m in sample.metadata["messages"]] == ["5", "sure? 5", "7"]
    assert __import__(run.module).Old.made == 1
    assert run("load_environment", ["7", "5"], text=VERIFIERS, group=group).reward == 0.25


def test_the_newer_form_of_verifiers(run, chat) -> None:  # type: ignore[no-untyped-def]
    sample = run("load_new", ["5", "7"], text=VERIFIERS)
    assert (sample.status, sample.reward) == ("completed", 1.0)
    assert "guess<|im_end|>\n<|im_start|>user\nrules" in chat.decode(sample.prompt_tokens)
    ended = run("load_new", ["5", "6", "8"], text=VERIFIERS)
    assert (ended.status, ended.reward, len(run.engine.asked)) == ("completed", 0.0, 2)
    cut = run("load_new", ["5"], text=VERIFIERS, max_turns=1)
    assert (cut.status, cut.reward) == ("truncated", 0.0)


def test_a_rubric_of_no_known_form(run) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RewardError, match=r"rubric.score_rollout gave no reward"):
        run("load_unscored", ["7"], text=VERIFIERS)


ODD = """
import time
from slurm_rl.rollout.turns import Step


class Base:
    async def reset(self, prompt, seed):
        return None

    async def step(self, response):
        return Step(done=True, reward=1.0)


class Info(Base):
    async def step(self, response):
        return Step(done=True, reward=1.0, info={"seen": {1, 2}})


class Number(Base):
    async def step(self, response):
        return Step(3)


class Prompted(Base):
    async def reset(self, prompt, seed):
        return ["a"]


class Hangs(Base):
    def step(self, response):
        time.sleep(3600)


class Writes(Base):
    async def reset(self, prompt, seed):
        prompt.metadata["seed"] = {seed}


class Nothing(Base):
    async def step(self, response):
        return Step(None, reward=0.0, info=None)


def leaving():
    raise SystemExit("one\\ntwo")


class Stuck(Base):
    def __init__(self):
        time.sleep(3600)


def make_stuck():
    return Stuck()
"""

#: A class whose `step` returns a Step with these fields.
STEPS = """
import numpy, torch
from slurm_rl.rollout.turns import Step

class Own:
    async def reset(self, prompt, seed):
        return None

    async def step(self, response):
        return {}
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Info", r"Info.step \(.*\) gave what cannot be kept: info\['seen'\] is of type set"),
        ("Number", r"Number.step \(.*\) gave as observation a int; give a text"),
        ("Prompted", r"Prompted.reset \(.*\) gave as prompt a list"),
        ("Hangs", r"Hangs.step \(.*\) gave no answer within rollout.reward_timeout_s = 0.5 s"),
        ("leaving", r"leaving \(.*\) raised SystemExit: one two at .*\.py:\d+"),
        ("Stuck", r"Stuck gave no answer within rollout.reward_timeout_s = 0.5 s"),
        ("make_stuck", r"make_stuck \(.*\) gave no answer within rollout.reward_timeout_s = 0.5 s"),
    ],
)
def test_what_an_environment_cannot_give(run, name: str, problem: str) -> None:  # type: ignore[no-untyped-def]
    began = time.monotonic()
    with pytest.raises(RewardError, match=problem) as caught:
        run(name, ["5"], text=ODD, reward_timeout_s=0.5)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        ("Step(reward=10 ** 400)", "gave the reward 1000"),
        ("Step(reward=1e39)", r"gave the reward 1e\+39; .*single precision"),
        ("Step(reward=numpy.ones(2))", r"gave the reward array\(\[1"),
        ("Step(info=numpy.array([1, 2]))", "info is of type ndarray, not an object"),
        ("Step(done=numpy.array([1, 2]))", "a Step that cannot be read: ValueError: The truth"),
        ("type('S', (), {'observation': property(lambda self: 1 / 0)})()", "be read: ZeroDiv"),
    ],
)
def test_a_step_that_cannot_be_read_is_one_line(run, step: str, problem: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RewardError, match=problem) as caught:
        run("Own", ["5"], text=STEPS.format(step))
    assert str(caught.value).startswith("rollout.environment: Own.step (")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reward", ["numpy.array(0.5)", "torch.tensor(0.5)", "numpy.float32(0.5)"])
def test_numbers_of_every_library_are_rewards(run, reward: str) -> None:  # type: ignore[no-untyped-def]
    sample = run("Own", ["5"], text=STEPS.format(f"Step(done=True, reward={reward})"))
    assert (sample.reward, type(sample.reward)) == (0.5, float)


THREADS = """
import sqlite3, threading, time
from slurm_rl.rollout.turns import Step

made, closed, under_way, closes_async = [], [], [], []
release = threading.Event()


class Base:
    def __init__(self):
        # Of this thread alone: sqlite3 refuses all others.
        self.board = sqlite3.connect(":memory:")
        made.append(threading.current_thread())

    def reset(self, prompt, seed):
        self.board.execute("create table said (text)")

    def step(self, response):
        self.board.execute("insert into said values (?)", (response,))
        return Step("go on", done=response == "7")

    def score(self):
        return self.board.execute("select count(*) from said").fetchone()[0]

    def close(self):
        self.board.close()
        closed.append(threading.current_thread())


def make():
    return Base()


def make_async():
    made = Base()

    async def close():
        closes_async.append(1)

    made.close = close
    return made


class Once(Base):
    # The second one never ends.
    def __init__(self):
        super().__init__()
        if len(made) > 1:
            time.sleep(3600)


class SlowAsync(Base):
    def step(self, response):
        release.wait(60)

    async def close(self):
        closes_async.append(1)


class Slow(Base):
    def step(self, response):
        under_way.append(1)
        release.wait(60)
        under_way.pop()

    def close(self):
        assert not under_way
        super().close()
"""


@pytest.mark.parametrize(("name", "num_made"), [("Base", 3), ("make", 4)])
def test_an_object_stays_in_one_thread(run, make_group, name: str, num_made: int) -> None:  # type: ignore[no-untyped-def]
    """Each conversation's in its own, from the constructor to `close`, and never in the loop's.

    What a function makes is seen once before.
    """
    samples = run.all(name, ["5", "7"], text=THREADS, group=make_group("guess", num=3))
    assert [sample.reward for sample in samples] == [2.0] * 3
    module = __import__(run.module)
    used = module.made[-3:]
    assert len(set(used)) == 3 and threading.main_thread() not in used
    assert len(module.made) == num_made and set(module.closed) == set(module.made)
    for thread in used:
        thread.join(60)
        assert not thread.is_alive()


def test_close_waits_for_a_step_that_took_too_long(run) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RewardError, match=r"Slow.step .* gave no answer within"):
        run("Slow", ["5"], text=THREADS, reward_timeout_s=0.5)
    module = __import__(run.module)
    assert module.under_way and not module.closed, "nobody waits for it"
    module.release.set()
    module.made[0].join(60)
    assert module.closed == module.made


def test_a_prompt_that_leaves_the_model_no_room(run) -> None:  # type: ignore[no-untyped-def]
    problem = (
        r"Own.reset \(.*\) gave a prompt of \d+ tokens, which leaves no room in a context of 9"
    )
    with pytest.raises(RewardError, match=problem):
        run("Own", ["5"], rollout_max_context_len=9)


def test_what_it_writes_into_its_row_stays_there(run, make_group) -> None:  # type: ignore[no-untyped-def]
    row = make_group("guess", num=1, label="7", metadata={"a": 1})
    assert run("Writes", ["5"], text=ODD, group=row).metadata.keys() == {"a", "messages"}
    assert row.visit.prompt.metadata == {"a": 1}
    assert run("Nothing", ["5"] * 4, text=ODD).reward == 0.0


def test_one_that_fails_has_its_group_dropped(run) -> None:  # type: ignore[no-untyped-def]
    given_up = run.all("Info", ["5"], text=ODD, on_reward_error="drop")
    assert [sample.status for sample in given_up.samples] == ["failed"]
    assert "Info.step" in given_up.why


def test_what_a_function_made_at_first_is_closed_by_a_coroutine_too(run) -> None:  # type: ignore[no-untyped-def]
    assert run("make_async", ["7"], text=THREADS).reward == 1.0
    assert len(__import__(run.module).closes_async) == 2


def test_a_coroutine_close_does_not_run_beside_a_step(run) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RewardError, match=r"SlowAsync.step .* gave no answer within"):
        run("SlowAsync", ["5"], text=THREADS, reward_timeout_s=0.5)
    module = __import__(run.module)
    module.release.set()
    module.made[0].join(60)
    assert not module.closes_async


def test_a_later_constructor_that_hangs_has_a_deadline_too(run, make_group) -> None:  # type: ignore[no-untyped-def]
    group = make_group("guess", num=2)
    with pytest.raises(RewardError, match=r"Once gave no answer within .* = 0.5 s"):
        run.all("Once", ["7"], text=THREADS, group=group, reward_timeout_s=0.5)
    module = __import__(run.module)
    assert len(module.made) == 2 and module.closed == module.made[:1]


def test_verifiers_are_made_in_the_main_thread(run) -> None:  # type: ignore[no-untyped-def]
    """That library sets handlers of signals, which Python allows nowhere else."""
    text = f"import threading\nmade = []\n{VERIFIERS}\ndef load():\n"
    text += "    made.append(threading.current_thread())\n    return New()\n"
    run("load", ["5", "7"], text=text)
    assert __import__(run.module).made == [threading.main_thread()]


LATE = """
import threading
from slurm_rl.rollout.turns import Step

made, closed, release = [], [], threading.Event()


class Late:
    def __init__(self):
        made.append(threading.current_thread())
        if len(made) >= FIRST:
            release.wait(60)

    async def reset(self, prompt, seed):
        return None

    async def step(self, response):
        return Step("go on", done=response == "7")

    def close(self):
        closed.append(threading.current_thread())


class LateAsync(Late):
    async def close(self):
        super().close()


class LateAndBroken(Late):
    def close(self):
        super().close()
        raise SystemExit("no way")
"""


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("name", ["Late", "LateAsync", "LateAndBroken"])
def test_one_that_is_made_too_late_is_closed_as_it_comes(  # type: ignore[no-untyped-def]
    run, make_group, caplog, name: str, first: int
) -> None:
    """The one that is tried at the start, and those of later conversations."""
    with pytest.raises(RewardError, match=rf"{name} gave no answer within .* = 0.3 s|no way"):
        run.all(
            name,
            ["7"],
            text=LATE.replace("FIRST", str(first)),
            group=make_group("guess", num=3),
            reward_timeout_s=0.3,
        )
    module = __import__(run.module)
    module.release.set()
    for thread in module.made:
        thread.join(60)
        assert not thread.is_alive()
    assert len(module.closed) == len(module.made) >= first
    assert set(module.closed) >= set(module.made[first - 1 :]), "each in its own thread"
    told = [record.message for record in caplog.records if "no way" in record.message]
    assert bool(told) == (name == "LateAndBroken")
