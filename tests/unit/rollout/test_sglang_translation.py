"""What is said to SGLang and understood of its answers. A real server is in tests/sglang."""

import json
from pathlib import Path

import pytest

from slurm_rl.errors import ConfigError, EngineError, ModelError
from slurm_rl.rollout.engine import Completion, Request, Sampling, Weights
from slurm_rl.rollout.sglang import (
    SglangOptions,
    parse_completion,
    plan_options,
    read_dtype,
    render_argument,
    render_command,
    render_request,
)

WEIGHTS = Weights(Path("/m"), 3, "xxh3:1", "run/v3/xxh3:1")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("tp_size", 2, ["--tp-size", "2"]),
        ("disable_cuda_graph", True, ["--disable-cuda-graph"]),
        ("disable_cuda_graph", False, []),
        ("quantization", None, []),
        ("cuda_graph_bs", [1, 2], ["--cuda-graph-bs", "1", "2"]),
        ("json_model_override_args", {"a": 1}, ["--json-model-override-args", '{"a": 1}']),
        ("mem_fraction_static", 0.8, ["--mem-fraction-static", "0.8"]),
    ],
)
def test_arguments(name: str, value: object, expected: list[str]) -> None:
    assert render_argument(name, value) == expected


def test_command_line() -> None:
    options = SglangOptions(
        {"tp_size": 2}, {}, Path("log"), python="/py", deterministic=True, random_seed=7
    )
    command = render_command(options, WEIGHTS, port=12345, dtype="float32")
    assert command[:3] == ["/py", "-m", "sglang.launch_server"]
    text = " ".join(command)
    for part in (
        "--model-path /m",
        "--port 12345",
        "--weight-version run/v3/xxh3:1",
        "--random-seed 7",
        "--enable-deterministic-inference",
        "--tp-size 2",
        "--dtype float32",
    ):
        assert part in text


def test_the_users_dtype_wins() -> None:
    options = SglangOptions({"dtype": "bfloat16"}, {}, Path("log"))
    text = " ".join(render_command(options, WEIGHTS, port=1, dtype="float32"))
    assert "--dtype bfloat16" in text
    assert "float32" not in text


def test_weights_are_served_in_their_own_dtype(tmp_path: Path) -> None:
    for text, expected in (
        ('{"dtype": "float32"}', "float32"),
        ('{"torch_dtype": "bfloat16"}', "bfloat16"),
        ("{}", None),
    ):
        config = json.loads(text) | {"architectures": ["LlamaForCausalLM"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_dtype(tmp_path) == expected
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="has no `architectures`"):
        read_dtype(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_dtype(tmp_path)


@pytest.mark.parametrize("name", ["model_path", "model-path", "port", "weight_version"])
def test_what_the_run_sets_cannot_be_set(name: str) -> None:
    with pytest.raises(ConfigError, match="is set by the run itself"):
        render_command(SglangOptions({name: "x"}, {}, Path("log")), WEIGHTS, port=1, dtype=None)


def test_options_of_a_run(make_settings, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    settings = make_settings(
        sglang={"tp_size": 1},
        sglang_env={"SGLANG_USE_CPU_ENGINE": 1},
        sglang_python="/py",
        concurrency=9,
    )
    options = plan_options(
        settings, environment={"A": "b"}, log_path=tmp_path / "log", random_seed=5
    )
    assert options.environment == {"A": "b", "SGLANG_USE_CPU_ENGINE": "1"}
    assert (options.python, options.deterministic, options.concurrency) == ("/py", True, 9)


def test_each_sample_has_its_own_seed() -> None:
    body = render_request(Request(4, (1, 2), (7, 8)), Sampling(5, 0.5, 0.9, 3, ("x",), (9,)))
    assert body["input_ids"] == [[1, 2], [1, 2]]
    assert [p.pop("sampling_seed") for p in body["sampling_params"]] == [7, 8]
    for params in body["sampling_params"]:
        assert params == {
            "max_new_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "stop": ["x"],
            "stop_token_ids": [9],
            "skip_special_tokens": False,
        }
    assert "n" not in body["sampling_params"][0]


def result(**meta: object) -> dict[str, object]:
    facts = {
        "weight_version": WEIGHTS.label,
        "output_token_logprobs": [[-0.5, 3, None], [-1.5, 4, None]],
        "finish_reason": {"type": "length", "length": 2},
    }
    return {"output_ids": [3, 4], "meta_info": facts | meta}


def test_a_result_becomes_a_completion() -> None:
    assert parse_completion(result(), label=WEIGHTS.label) == Completion(
        (3, 4), (-0.5, -1.5), "length", WEIGHTS.label
    )


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"weight_version": "run/v2/xxh3:0"}, "answered with the weights run/v2/xxh3:0"),
        ({"weight_version": None}, "answered with the weights None"),
        ({"output_token_logprobs": [[-0.5, 3, None]]}, "other tokens"),
        ({"finish_reason": None}, "for the reason None"),
    ],
)
def test_a_result_that_cannot_be_trusted_is_an_error(meta: dict[str, object], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_completion(result(**meta), label=WEIGHTS.label)
