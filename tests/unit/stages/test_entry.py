"""The stage process as the supervisor sees it: exit code, result.json, failure.json, log."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from slurm_rl.config.schema import Settings
from slurm_rl.errors import ConfigError, ServiceDown
from slurm_rl.launch.results import read_failure as read_words
from slurm_rl.stages.__main__ import _leave_failure, check_versions
from slurm_rl.stages.rank import current_rank
from slurm_rl.storage.fs import POSIX
from slurm_rl.types import Order, dump_record, parse_order, parse_result

#: A reward that waits for a file, so that a test can act while the stage is at work.
WAITING = """
import pathlib, time
def score(args, sample):
    here = pathlib.Path(__file__).parent
    (here / "reached").touch()
    while not (here / "go").exists():
        time.sleep(0.02)
    return float(len(sample.response))
"""


def make_order(
    root: Path, *, kind: str = "init", settings: dict[str, object] | None = None
) -> Path:
    values = {
        "run": {"name": "t", "dir": str(root)},
        "init_model": {
            "characters": "ab",
            "config": {
                "model_type": "qwen3",
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 8,
            },
        },
        "num_rollout": 1,
        "rollout": {"engine": "embedded", "prompt_data": str(root / "p.jsonl"), "rollout_batch_size": 1,
                    "rollout_max_response_len": 2, "custom_rm_path": "waiting.score"},
        "train": {"global_batch_size": 1},
    }  # fmt: skip
    parsed = Settings.model_validate(values | (settings or {}))
    (root / "settings.json").write_text(parsed.model_dump_json())
    attempt = root / "a0001-tok"
    attempt.mkdir()
    order = Order(
        run_dir=str(root), run_id="run7", kind=kind, iteration=3, timeline=0, attempt_dir=str(attempt),
        settings_path=str(root / "settings.json"), code_dir=str(root), inputs={},
    )  # fmt: skip
    (attempt / "order.json").write_bytes(dump_record(order))
    return attempt


def stage_process(attempt: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "slurm_rl.stages", str(attempt / "order.json")],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def run_stage(attempt: Path, **environment: str) -> tuple[int, str]:
    process = stage_process(attempt, **environment)
    _, log = process.communicate(timeout=100)
    return process.returncode, log


def read_failure(attempt: Path) -> dict[str, str]:
    return json.loads((attempt / "failure.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.slow
def test_success_leaves_a_result_and_prefixed_lines(tmp_path: Path) -> None:
    attempt = make_order(tmp_path)
    code, log = run_stage(attempt)
    assert code == 0
    result = parse_result((attempt / "result.json").read_bytes())
    assert result.content["weights"]["version"] == 0
    assert "[run7 init i0003 a0001-tok r0] INFO" in log
    assert not (attempt / "failure.json").exists()


@pytest.mark.slow
def test_only_rank_zero_writes_the_result(tmp_path: Path) -> None:
    attempt = make_order(tmp_path)
    code, log = run_stage(attempt, RANK="1")
    assert code == 0
    assert "r1]" in log
    assert not (attempt / "result.json").exists()


@pytest.mark.slow
def test_a_user_error_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    attempt = make_order(tmp_path, settings={"init_model": None, "hf_checkpoint": "/nowhere"})
    code, log = run_stage(attempt)
    assert code == 2
    failure = read_failure(attempt)
    assert (failure["blame"], failure["error"]) == ("user", "ModelError")
    assert "/nowhere" in failure["message"]
    assert failure["hint"]
    assert "Traceback" not in log
    assert log.count("ERROR") == 1


@pytest.mark.slow
def test_a_bug_leaves_its_traceback_in_the_log(tmp_path: Path) -> None:
    attempt = make_order(tmp_path, kind="rollout")  # without its inputs
    code, log = run_stage(attempt)
    assert code == 1
    failure = read_failure(attempt)
    assert failure["blame"] == "repeat", "tried once more, and then no more"
    assert failure["message"] == "KeyError: 'weights'"
    assert re.fullmatch(r"\w+\.py:\d+", failure["place"]) and failure["node"]
    assert "Traceback" in log


def test_settings_that_do_not_parse_and_unknown_kinds(tmp_path: Path) -> None:
    attempt = make_order(tmp_path, kind="evaluate")
    assert run_stage(attempt)[0] == 2
    assert "no stage program for kind 'evaluate'" in read_failure(attempt)["message"]
    (attempt / "failure.json").unlink()
    (tmp_path / "settings.json").write_text('{"num_rollout": "many"}')
    assert run_stage(attempt)[0] == 2
    assert "settings.json: " in read_failure(attempt)["message"]


def test_the_first_failure_is_kept(tmp_path: Path) -> None:
    attempt = make_order(tmp_path, kind="evaluate")
    (attempt / "failure.json").write_text('{"first": 1}')
    assert run_stage(attempt, RANK="1")[0] == 2
    assert read_failure(attempt) == {"first": 1}


@pytest.mark.slow
def test_sigterm_stops_soon_and_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    (tmp_path / "p.jsonl").write_text('{"prompt": "ab"}\n')
    first = make_order(tmp_path)
    assert run_stage(first)[0] == 0
    made = parse_result((first / "result.json").read_bytes())
    first = first.rename(tmp_path / "init")
    attempt = make_order(tmp_path, kind="rollout")
    order = json.loads((attempt / "order.json").read_text())
    files = [{"path": f.path, "size_bytes": f.size_bytes, "digest": f.digest} for f in made.files]
    order["inputs"]["weights"] = {
        "role": "weights", "iteration": 0, "kind": "init", "digest": "d", "path": str(first),
        "files": {f["path"]: str(first / f["path"]) for f in files},
        "content": made.content | {"files": files},
    }  # fmt: skip
    (attempt / "order.json").write_text(json.dumps(order))
    process = stage_process(attempt)
    deadline = time.monotonic() + 60
    while not (tmp_path / "reached").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - began < 30
    assert read_failure(attempt)["message"] == "stopped by SIGTERM"
    assert not (attempt / "result.json").exists()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 0),
        ({"RANK": "3"}, 3),
        ({"SLURM_PROCID": "2"}, 2),
        ({"RANK": "1", "SLURM_PROCID": "2"}, 1),
    ],
)
def test_rank(environment: dict[str, str], expected: int) -> None:
    assert current_rank(environment) == expected


def test_other_libraries_than_before_are_refused() -> None:
    found = metadata.version("pyyaml")
    check_versions({"pyyaml": found})
    with pytest.raises(ConfigError, match=f"pyyaml is {re.escape(found)} here, .* ran with 0.1"):
        check_versions({"pyyaml": "0.1"})
    with pytest.raises(ConfigError, match="no-such-library is missing here"):
        check_versions({"no-such-library": "1"})


def test_memory_that_runs_out_may_be_tried_once_more(tmp_path: Path) -> None:
    order = parse_order((make_order(tmp_path, kind="rollout") / "order.json").read_bytes())
    for error, blame in ((MemoryError("full"), "repeat"), (OSError("gone"), "system")):
        (Path(order.attempt_dir) / "failure.json").unlink(missing_ok=True)
        assert _leave_failure(order, error, code=1) == 1
        assert read_failure(Path(order.attempt_dir))["blame"] == blame


@pytest.mark.parametrize(("defers", "blame"), [(True, "outage"), (False, "user")])
def test_a_service_that_is_down_is_named_to_the_supervisor(
    tmp_path: Path, defers: bool, blame: str
) -> None:
    attempt = make_order(tmp_path)
    order = parse_order((attempt / "order.json").read_bytes())
    _leave_failure(order, ServiceDown("it said 503", service="judge", defers=defers), code=1)
    words = read_words(attempt, 1, fs=POSIX)
    assert (words.blame, words.error, words.service) == (blame, "ServiceDown", "judge")
    assert words.message == "it said 503"


@pytest.mark.slow
def test_an_evaluation_of_whatever_name_has_its_program(tmp_path: Path) -> None:
    """It gets as far as missing its weights, which this order does not have."""
    attempt = make_order(
        tmp_path, kind="eval-aime-24", settings={"eval": {"aime-24": {"prompt_data": "x"}}}
    )
    code, _ = run_stage(attempt)
    assert code == 1 and read_failure(attempt)["message"] == "KeyError: 'weights'"
