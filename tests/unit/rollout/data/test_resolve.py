import json
from pathlib import Path
from typing import Any

import pytest

from slurm_rl.config.schema import Settings
from slurm_rl.errors import DataError
from slurm_rl.rollout.data import open_stream, prompt_tokenizer, resolve, resolve_eval


def write(path: Path, num: int, **keys: str) -> str:
    names = {"prompt": "prompt", "label": "label"} | keys
    rows = [{names["prompt"]: f"p{k}", names["label"]: k} for k in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def make(tmp_path: Path, make_settings):  # type: ignore[no-untyped-def]
    """Settings with a mixture of two files; `eval` and `seed` besides fields of `rollout`."""
    write(tmp_path / "prompts.jsonl", 12)
    write(tmp_path / "a.jsonl", 10)
    write(tmp_path / "b.jsonl", 20, prompt="q", label="answer")

    def of(*, seed: int = 1, eval: Any = None, **rollout: Any) -> Settings:
        settings = make_settings(**rollout)
        return Settings.model_validate(
            settings.model_dump(exclude_unset=True) | {"seed": seed, "eval": eval or {}}
        )

    return of


def mixture(tmp_path: Path, **second: Any) -> list[dict[str, Any]]:
    return [
        {"name": "a", "path": f"{tmp_path}/a.jsonl@[2:]"},
        {"name": "b", "path": f"{tmp_path}/b.jsonl", "input_key": "q", "label_key": "answer"}
        | second,
    ]


def test_a_single_file_has_a_name_and_keys(make) -> None:  # type: ignore[no-untyped-def]
    with resolve(make()) as data:
        assert (data.names, data.num_rows) == (["data"], 12)
        assert data.read(0, 3).label == 3
        data.check()


def test_each_data_set_of_a_mixture_is_read_by_its_own_keys(
    make, tmp_path: Path, tokenizer
) -> None:  # type: ignore[no-untyped-def]
    settings = make(prompt_data=mixture(tmp_path, weight=3.0))
    with resolve(settings) as data:
        data.check()
        assert (data.names, data.num_rows) == (["a", "b"], 28)
        stream = open_stream(data, settings, cursor=None, tokenizer=tokenizer)
        visits = [stream.take() for _ in range(40)]
        of_b = [visit for visit in visits if visit.prompt.data_set == "b"]
        assert len(of_b) == 30
        assert all(v.prompt.prompt == f"p{v.prompt.label}" for v in of_b)
        of_a = [visit.prompt.label for visit in visits if visit.prompt.data_set == "a"]
        assert sorted(of_a[:8]) == [*range(2, 10)]
        assert tokenizer.decode(visits[0].tokens) == visits[0].prompt.prompt
        # A job later, from what stands in the commit.
        cursor = json.loads(json.dumps(stream.cursor_after(24).as_dict()))
    with resolve(settings) as data:
        later = open_stream(data, settings, cursor=cursor, tokenizer=tokenizer)
        assert [later.take() for _ in range(15)] == visits[25:]


def test_the_order_follows_seed_and_shuffle(make, tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    def order(**values: Any) -> list[int]:
        settings = make(**values)
        with resolve(settings) as data:
            stream = open_stream(data, settings, cursor=None, tokenizer=tokenizer)
            return [stream.take().prompt.row for _ in range(24)]

    assert order() == order() != order(seed=2)
    assert order(rollout_shuffle=False) == [*range(12)] * 2
    both = [{"name": name, "path": f"{tmp_path}/a.jsonl"} for name in ("x", "y")]
    mixed = order(prompt_data=both)
    assert mixed[::2] != mixed[1::2]


def test_the_fingerprint_follows_data_names_and_weights_not_paths(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    def fingerprint(sets: Any) -> str:
        with resolve(make(prompt_data=sets)) as data:
            return str(data.fingerprint)

    sets = mixture(tmp_path)
    first = fingerprint(sets)
    (tmp_path / "c.jsonl").write_bytes((tmp_path / "b.jsonl").read_bytes())
    assert fingerprint([sets[0], sets[1] | {"path": f"{tmp_path}/c.jsonl"}]) == first
    assert fingerprint([s | {"weight": 2.5} for s in sets]) == first
    changed = [
        [sets[0], sets[1] | {"weight": 2.0}],
        [sets[0], sets[1] | {"name": "c"}],
        [sets[0] | {"path": f"{tmp_path}/a.jsonl@[3:]"}, sets[1]],
        sets[::-1],
    ]
    assert len({first, *map(fingerprint, changed)}) == 5


def test_other_data_is_refused(make, tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    settings = make()
    with resolve(settings) as data:
        cursor = open_stream(data, settings, cursor=None, tokenizer=tokenizer).cursor.as_dict()
    write(tmp_path / "prompts.jsonl", 13)
    message = r"prompts\.jsonl: the prompts are not those of the previous iteration"
    with resolve(settings) as data, pytest.raises(DataError, match=message):
        open_stream(data, settings, cursor=cursor, tokenizer=tokenizer)


def test_errors_name_the_setting_of_the_data_set(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    sets = mixture(tmp_path, label_key="nothing")
    message = r"b\.jsonl:1: no key 'nothing' \(rollout\.prompt_data\[1\]\.label_key\)"
    with resolve(make(prompt_data=sets)) as data, pytest.raises(DataError, match=message):
        data.check()
    message = r"b\.jsonl:1: no key 'label' \(rollout\.label_key\)"
    sets = mixture(tmp_path, label_key=None)
    with resolve(make(prompt_data=sets)) as data, pytest.raises(DataError, match=message):
        data.check()
    sets = [*mixture(tmp_path), {"name": "c", "path": f"{tmp_path}/c.jsonl"}]
    with pytest.raises(DataError, match=r"c\.jsonl: No such file"):
        resolve(make(prompt_data=sets))


def test_the_tighter_limit_counts(make, tokenizer) -> None:  # type: ignore[no-untyped-def]
    def long_ones(context_len: int | None = None, **values: Any) -> bool:
        settings = make(rollout_shuffle=False, **values)
        with resolve(settings) as data:
            stream = open_stream(
                data, settings, cursor=None, tokenizer=tokenizer, context_len=context_len
            )
            return any(len(stream.take().tokens) == 3 for _ in range(12))  # p10, p11

    assert long_ones()
    assert long_ones(rollout_max_prompt_len=3, context_len=4)
    assert not long_ones(rollout_max_prompt_len=2)
    assert not long_ones(context_len=3)
    assert not long_ones(context_len=100, rollout_max_context_len=3)
    assert long_ones(context_len=3, rollout_max_context_len=4)


def test_an_evaluation_falls_back_to_the_rollout(make, tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    settings = make(
        eval={
            "plain": {"prompt_data": f"{tmp_path}/a.jsonl"},
            "own": {
                "prompt_data": f"{tmp_path}/b.jsonl@[5:8]",
                "input_key": "q",
                "label_key": "answer",
            },
            "bad": {"prompt_data": f"{tmp_path}/b.jsonl", "input_key": "x"},
        }
    )
    with resolve_eval(settings, "plain") as data:
        assert (data.names, data.num_rows, data.read(0, 9).label) == (["plain"], 10, 9)
    with resolve_eval(settings, "own") as data:
        prompt = data.read(0, 2)
        assert (data.num_rows, prompt.prompt, prompt.label) == (3, "p7", 7)
        assert prompt.data_set == "own"
        tokens = prompt_tokenizer(tokenizer, settings, settings.eval["own"])(prompt)
        assert tokenizer.decode(tokens) == "p7"
    message = r"\(eval\.bad\.input_key\)"
    with resolve_eval(settings, "bad") as data, pytest.raises(DataError, match=message):
        data.check()


def test_made_prompts_are_seeded_by_the_run_and_name_their_reward(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    def first(*, index: int = 0, **values: Any) -> Any:
        with resolve(make(**values)) as data:
            return data.read(index, 0)

    made: dict[str, Any] = {
        "prompt_data": "reasoning_gym:chain_sum@[1:]",
        "data_options": {"size": 5},
    }
    one = first(**made)
    assert one == first(**made) != first(seed=2, **made)
    assert first(seed=2, **made | {"data_options": {"size": 5, "seed": 9}}) == first(
        **made | {"data_options": {"size": 5, "seed": 9}}
    )
    # rollout.rm_type is the user's choice for a single data set, but not for one of a mixture.
    assert "rm_type" not in one.metadata
    assert first(**made, rm_type=None).metadata["rm_type"] == "reasoning_gym"
    mixed = [{"name": "sums", "path": "reasoning_gym:chain_sum"}, *mixture(tmp_path)]
    assert first(prompt_data=mixed).metadata["rm_type"] == "reasoning_gym"
    mixed[0]["custom_rm_path"] = "a.b"
    assert "rm_type" not in first(prompt_data=mixed).metadata


def rewrite(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_row_that_its_reward_could_not_grade_is_named_when_it_is_read(
    make, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    good, path = {"prompt": "a", "label": "1", "m": {}}, tmp_path / "prompts.jsonl"
    metadata = {"metadata_key": "m", "rm_type": "f1"}

    def check(bad: dict[str, Any], **rollout: Any) -> None:
        rewrite(path, good, good | bad)
        with resolve(make(**metadata | rollout)) as data:
            data.check()

    with pytest.raises(DataError) as caught:
        check({"label": None})
    assert str(caught.value) == (
        f"{path}:2: 'label' (rollout.label_key) is null, which the reward f1 compares with;"
        " give the row a label, or take it out"
    )
    with pytest.raises(DataError, match=r"prompts\.jsonl:1: has no label, which the reward f1"):
        check({}, label_key=None)
    with pytest.raises(DataError) as caught:
        check({"m": {"rm_type": "gsm9k"}})
    assert str(caught.value).startswith(
        f"{path}:2: metadata.rm_type = 'gsm9k' is no built-in reward; did you mean gsm8k? there are"
    )
    with pytest.raises(
        DataError, match=r"jsonl:2: metadata\.rm_type = 'judge' needs score\.server"
    ):
        check({"m": {"rm_type": "judge"}})
    # What is not compared with needs no label, nor what is graded elsewhere.
    check({"label": None}, rm_type="format")
    check({"label": None}, rm_type=None, custom_rm_path="a.b")
    check({"label": None, "m": {"rm_type": "random"}})
    check({"label": None}, custom_generate_function_path="a.b")
    with pytest.raises(DataError, match="the reward exact_match compares"):
        check({"label": None}, rm_type=None, rewards=[{"rm_type": "format"}, {"rm_type": "exact_match"}])  # fmt: skip


def test_the_label_is_the_one_of_the_data_set_s_own_reward(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for name, keys in (("a", ("prompt", "label")), ("b", ("q", "answer"))):
        rewrite(tmp_path / f"{name}.jsonl", *[dict.fromkeys(keys, "x")] * 4)
    rewrite(tmp_path / "b.jsonl", {"q": "x", "answer": "1"}, {"q": "x", "answer": None})
    with resolve(make(rm_type="f1", prompt_data=mixture(tmp_path, rm_type="format"))) as data:
        data.check()
    said = r"b\.jsonl:2: 'answer' \(rollout\.prompt_data\[1\]\.label_key\) is null"
    swapped = make(rm_type="format", prompt_data=mixture(tmp_path, rm_type="f1"))
    with resolve(swapped) as data, pytest.raises(DataError, match=said):
        data.check()
    own = {"prompt_data": f"{tmp_path}/b.jsonl", "input_key": "q", "label_key": "answer"}
    said = r"b\.jsonl:2: 'answer' \(eval\.t\.label_key\) is null"
    settings = make(eval={"t": own | {"rm_type": "f1"}})
    with resolve_eval(settings, "t") as data, pytest.raises(DataError, match=said):
        data.check()


def test_what_only_the_tokenizer_refuses_is_named_by_its_line(
    make, tmp_path: Path, tokenizer
) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "prompts.jsonl"
    for prompt, words in (
        ("É", "the model's tokenizer refuses the prompt"),
        ("", "the prompt has no tokens; write it, or take the row out"),
        ([{"role": "user", "content": "a"}], "the prompt is a list of messages; set rollout.apply"),
    ):
        path.write_text("\n")
        with path.open("a") as file:
            file.write(json.dumps({"prompt": prompt, "label": 1}) + "\n")
        settings = make()
        with resolve(settings) as data:
            stream = open_stream(data, settings, cursor=None, tokenizer=tokenizer)
            with pytest.raises(DataError) as caught:
                stream.take()
        assert str(caught.value).startswith(f"{path}:2: {words}")
