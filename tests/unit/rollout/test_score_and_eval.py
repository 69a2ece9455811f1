"""The stages that grade and that evaluate, on the embedded engine and a made-up service."""

from __future__ import annotations

import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_rl.config.schema import Settings
from slurm_rl.errors import DataError, RewardError, ServiceDown
from slurm_rl.rollout.passrate import PassRate, estimate_pass, is_majority_right, read_answer
from slurm_rl.rollout.samples import Sample, read_samples
from slurm_rl.rollout.scores import apply_scores, read_scores
from slurm_rl.stages.evaluate import run_eval
from slurm_rl.stages.rollout import run_rollout
from slurm_rl.stages.score import run_score
from slurm_rl.types import Input, Order, Result


class Service:
    """A reward model on a port of its own that grades by length; it can go away and come back."""

    def __init__(self, url_file: Path) -> None:
        self._url_file = url_file
        self.num_asked = 0
        self.up()

    def up(self) -> None:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.num_asked += 1
                self._answer({"reward": len(body["response"]) / 10})

            def _answer(self, value: object) -> None:
                data = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._url_file.write_text(f"http://127.0.0.1:{self._server.server_port}")

    def down(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def service(tmp_path: Path):
    made = Service(tmp_path / "rm.url")
    yield made
    made.down()


@pytest.fixture
def graded_by_service(make_settings, tmp_path: Path) -> Settings:
    plain = make_settings(rm_type="remote_rm", rm_service="rm")
    data = plain.model_dump(mode="json")
    data["services"] = {
        "rm": {
            "url_file": str(tmp_path / "rm.url"),
            "on_down": "defer",
            "down_after_s": 0.3,
            "timeout_s": 2.0,
            "retries": 0,
        }
    }
    return Settings.model_validate_json(json.dumps(data))


def as_input(role: str, order: Order, result: Result) -> Input:
    files = [dataclasses.asdict(entry) for entry in result.files]
    return Input(
        role,
        order.iteration,
        order.kind,
        "xxh3:r",
        order.attempt_dir,
        {entry["path"]: f"{order.attempt_dir}/{entry['path']}" for entry in files},
        result.content | {"files": files},
    )


def score_order(root: Path, number: int, source: Input, earlier: tuple[str, ...] = ()) -> Order:
    folder = root / "score" / f"a{number:04d}-0"
    folder.mkdir(parents=True)
    return Order("", "run", "score", 0, 0, str(folder), "", "", {"rollout": source},
                 earlier_attempts=list(earlier))  # fmt: skip


def rewards_of(order: Order) -> np.ndarray:
    return read_samples([Path(order.attempt_dir) / "samples.safetensors"]).rewards


@pytest.mark.slow
def test_an_outage_leaves_samples_ungraded_and_the_score_stage_grades_them(
    prompts, service, graded_by_service, make_order, tmp_path
):
    undisturbed = make_order()
    run_rollout(undisturbed, graded_by_service)
    expected = rewards_of(undisturbed)
    assert not np.isnan(expected).any()

    service.down()
    order = make_order()
    result = run_rollout(order, graded_by_service)
    assert np.isnan(rewards_of(order)).all(), "generation goes on, and is kept"
    assert result.metrics["rollout/ungraded"] == 1.0

    source = as_input("rollout", order, result)
    first = score_order(tmp_path, 1, source)
    with pytest.raises(ServiceDown) as caught:
        run_score(first, graded_by_service)
    assert (caught.value.blame, caught.value.service) == ("outage", "rm")

    service.up()
    asked = service.num_asked
    second = score_order(tmp_path, 2, source, (first.attempt_dir,))
    scored = run_score(second, graded_by_service)
    assert service.num_asked - asked == 12
    scores = read_scores([Path(second.attempt_dir) / "scores.safetensors"])
    batch = read_samples([Path(order.attempt_dir) / "samples.safetensors"])
    assert apply_scores(batch, scores).rewards.tolist() == expected.tolist()
    assert scored.metrics["rollout/raw_reward"] == pytest.approx(expected.mean())

    # A third attempt, as after a kill before the commit: all of it is in the journal.
    third = score_order(tmp_path, 3, source, (first.attempt_dir, second.attempt_dir))
    assert run_score(third, graded_by_service).files == scored.files
    assert service.num_asked - asked == 12


def test_with_enabled_the_rollout_grades_nothing(prompts, make_settings, make_order, tmp_path):
    data = make_settings().model_dump(mode="json") | {"score": {"enabled": True}}
    settings = Settings.model_validate_json(json.dumps(data))
    order = make_order()
    result = run_rollout(order, settings)
    assert np.isnan(rewards_of(order)).all()
    scored = score_order(tmp_path, 1, as_input("rollout", order, result))
    run_score(scored, settings)
    plain = make_order()
    run_rollout(plain, make_settings())
    scores = read_scores([Path(scored.attempt_dir) / "scores.safetensors"])
    assert scores.rewards.tolist() == rewards_of(plain).tolist()


def test_a_reward_that_fails_in_the_score_stage_is_told(
    prompts, make_settings, make_order, tmp_path, monkeypatch
):
    (tmp_path / "bad_reward.py").write_text(
        "def score(args, sample):\n    raise KeyError('gold')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    data = make_settings(rm_type=None, custom_rm_path="bad_reward.score").model_dump(mode="json")
    settings = Settings.model_validate_json(json.dumps(data | {"score": {"enabled": True}}))
    order = make_order()
    result = run_rollout(order, settings)
    with pytest.raises(RewardError, match=r"bad_reward\.py:1\) raised KeyError"):
        run_score(score_order(tmp_path, 1, as_input("rollout", order, result)), settings)


# -- evaluation -------------------------------------------------------------------------------


@pytest.fixture
def evaluated(make_settings, prompts):
    def make(**own: object) -> Settings:
        chosen = {"prompt_data": str(prompts), "n_samples_per_prompt": 4} | own
        data = make_settings().model_dump(mode="json") | {"eval": {"sums": chosen}}
        return Settings.model_validate_json(json.dumps(data))

    return make


def test_an_evaluation_answers_every_row(evaluated, make_order):
    order = make_order(kind="eval-sums")
    result = run_eval(order, evaluated(pass_k=[1, 4]))
    batch = read_samples([Path(order.attempt_dir) / "samples.safetensors"])
    assert batch.group_index.tolist() == [row for row in range(6) for _ in range(4)]
    assert result.content["num_samples"] == 24
    assert result.metrics["eval/sums"] == pytest.approx(batch.rewards.mean())
    right = batch.rewards.reshape(6, 4) >= 0.5
    assert result.metrics["eval/sums/pass@1"] == pytest.approx(right.mean())
    assert result.metrics["eval/sums/pass@4"] == pytest.approx(right.any(axis=1).mean())
    # Its numbers do not depend on which iteration it hangs off.
    other = make_order(kind="eval-sums", iteration=7)
    assert run_eval(other, evaluated(pass_k=[1, 4])).files == result.files


def test_greedy_samples_are_all_the_same(evaluated, make_order):
    order = make_order(kind="eval-sums")
    run_eval(order, evaluated(rollout_temperature=0.0))
    lines = (Path(order.attempt_dir) / "samples.jsonl").read_text().splitlines()
    texts = [json.loads(line)["response"] for line in lines]
    assert all(len(set(texts[i : i + 4])) == 1 for i in range(0, 24, 4))
    assert len(set(texts)) > 1


def test_a_prompt_that_fills_the_context_is_an_error_not_a_gap(evaluated, make_order):
    data = evaluated().model_dump(mode="json")
    data["rollout"]["rollout_max_context_len"] = 3
    settings = Settings.model_validate_json(json.dumps(data))
    with pytest.raises(DataError, match=r"row 0: 3 tokens leave no room in a context of 3"):
        run_eval(make_order(kind="eval-sums"), settings)


@pytest.mark.slow
def test_an_evaluation_waits_for_its_service_too(
    prompts, service, graded_by_service, make_order, tmp_path
):
    data = graded_by_service.model_dump(mode="json")
    settings = Settings.model_validate_json(
        json.dumps(data | {"eval": {"sums": {"prompt_data": str(prompts)}}})
    )
    undisturbed = run_eval(make_order(kind="eval-sums"), settings)
    service.down()
    first = make_order(kind="eval-sums")
    with pytest.raises(ServiceDown):
        run_eval(first, settings)
    service.up()
    again = make_order(kind="eval-sums", earlier_attempts=[first.attempt_dir])
    assert run_eval(again, settings).files == undisturbed.files


# -- pass@k -----------------------------------------------------------------------------------


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_mean_over_all_choices(num, data):
    """Against its definition: the share of k-subsets that hold a right sample."""
    from itertools import combinations

    right = data.draw(st.lists(st.booleans(), min_size=num, max_size=num))
    k = data.draw(st.integers(1, num))
    subsets = list(combinations(right, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert estimate_pass(num, sum(right), k) == pytest.approx(expected)


def answer(text: str, reward: float, index: int = 0) -> Sample:
    return Sample(0, index, (1,), (2,), (-0.1,), (1,), response=text, reward=reward)


def test_rates_of_groups_of_different_sizes():
    rates = PassRate()
    rates.add([answer(r"so \boxed{4}", 1.0), answer(r"\boxed{5}", 0.0), answer(r"\boxed{4}", 1.0)])
    rates.add([answer("7", 0.0), answer("8", 1.0)])
    found = rates.fold()
    assert found.keys() == {"pass@1", "pass@2", "maj@1", "maj@2"}, "k = 3 is not every group's"
    assert found["pass@1"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert found["pass@2"] == 1.0
    assert found["maj@2"] == pytest.approx(0.5)


def test_majorities_and_answers():
    assert is_majority_right(["a", "b", "b"], [False, True, True])
    assert not is_majority_right(["a", "b"], [False, True]), "of ties the first"
    assert read_answer(r"first \boxed{1}, then \boxed{\frac{1}{2}} done") == r"\frac{1}{2}"
    assert read_answer("  42 ") == "42"
