"""What is said to SGLang and understood of its answers. A real server is in tests/sglang."""

import json
import time
from pathlib import Path

import orjson
import pytest

from slurm_rl.errors import ConfigError, EngineError, ModelError
from slurm_rl.rollout.engine import Completion, Request, Sampling, Weights
from slurm_rl.rollout.sglang.options import (
    Place,
    SglangOptions,
    plan_environments,
    plan_log_path,
    plan_options,
    plan_sizes,
    read_dtype,
    render_argument,
    render_command,
    visible_gpus,
)
from slurm_rl.rollout.sglang.wire import (
    parse_answer,
    parse_completion,
    parse_scoring,
    render_request,
    render_scoring,
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


@pytest.mark.parametrize(
    "name", ["model_path", "model-path", "port", "weight_version", "nnodes", "served_model_name"]
)
def test_what_the_run_sets_cannot_be_set(name: str) -> None:
    with pytest.raises(ConfigError, match="is set by the run itself"):
        render_command(SglangOptions({name: "x"}, {}, Path("log")), WEIGHTS, port=1, dtype=None)


def test_options_of_a_run(make_settings, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    settings = make_settings(
        sglang={"tp_size": 1},
        sglang_env={"SGLANG_USE_CPU_ENGINE": 1},
        sglang_python="/py",
        concurrency=9,
        replicas=2,
    )
    options = plan_options(
        settings, environment={"A": "b"}, log_path=tmp_path / "log", random_seed=5
    )
    assert options.environment == {"A": "b", "SGLANG_USE_CPU_ENGINE": "1"}
    assert (options.python, options.deterministic, options.concurrency) == ("/py", True, 9)
    assert (options.replicas, options.num_nodes) == (2, 1)
    assert plan_log_path(options, 0) == tmp_path / "log"
    assert plan_log_path(options, 1) == tmp_path / "log-1"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"cuda_graph_max_bs_decode": 1024, "max_running_requests": 1024}),
        ({"device": "cpu"}, {}),
        ({"dp_size": 3}, {"cuda_graph_max_bs_decode": 342, "max_running_requests": 342}),
        # With attention split over workers SGLang divides the second by their number.
        (
            {"dp_size": 3, "tp_size": 3, "enable_dp_attention": True},
            {"cuda_graph_max_bs_decode": 342, "max_running_requests": 1026},
        ),
        ({"cuda_graph_max_bs_decode": 8}, {"max_running_requests": 1024}),
        ({"cuda_graph_bs_decode": [1, 8]}, {"max_running_requests": 1024}),
        ({"disable_cuda_graph": True}, {"max_running_requests": 1024}),
        ({"max_running_requests": 99}, {"cuda_graph_max_bs_decode": 1024}),
    ],
)
def test_graphs_are_captured_for_the_concurrency(arguments: dict, expected: dict) -> None:  # type: ignore[type-arg]
    options = SglangOptions(arguments, {}, Path("log"), concurrency=1024)
    assert plan_sizes(options) == expected
    command = render_command(options, WEIGHTS, port=1, dtype=None)
    for name, value in (expected | arguments).items():
        if isinstance(value, int) and not isinstance(value, bool):
            flag = "--" + name.replace("_", "-")
            assert command.count(flag) == 1
            assert command[command.index(flag) + 1] == str(value)


def test_replicas_differ_in_what_must_differ() -> None:
    options = SglangOptions({}, {}, Path("log"), random_seed=(1 << 31) - 1, replicas=2)
    seeds = set()
    for replica in range(2):
        command = render_command(options, WEIGHTS, port=1, dtype=None, replica=replica)
        seeds.add(int(command[command.index("--random-seed") + 1]))
    assert len(seeds) == 2
    assert all(0 <= seed < 1 << 31 for seed in seeds)


def test_all_nodes_of_a_server_start_the_same_command_but_for_the_rank() -> None:
    options = SglangOptions({"tp_size": 16}, {}, Path("log"), random_seed=5, num_nodes=2)
    commands = [
        render_command(options, WEIGHTS, port=1, dtype=None, place=Place(rank, 2, "n1:2000"))
        for rank in range(2)
    ]
    differ = [(a, b) for a, b in zip(*commands, strict=True) if a != b]
    assert differ == [("0", "1")]
    for part in ("--nnodes 2", "--node-rank 1", "--dist-init-addr n1:2000"):
        assert part in " ".join(commands[1])


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, ("3", "1")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, ("GPU-a", "GPU-b")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({}, ("0", "1")),
    ],
)
def test_gpus_that_a_node_shows(
    environment: dict[str, str], expected: tuple[str, ...], tmp_path: Path
) -> None:
    for name in ("0000:1b:00.0", "0000:43:00.0"):
        (tmp_path / name).mkdir()
    assert visible_gpus(environment, driver=tmp_path) == expected
    assert visible_gpus({}, driver=tmp_path / "none") == ()


def test_each_replica_has_gpus_of_its_own() -> None:
    gpus = tuple("abcdefgh")
    options = SglangOptions({"tp_size": 2, "pp_size": 2}, {"A": "b"}, Path("log"), gpus=gpus)
    assert plan_environments(options) == [{"A": "b"}], "one server sees what we see"
    two = SglangOptions({"tp_size": 2, "pp_size": 2}, {}, Path("log"), gpus=gpus, replicas=2)
    assert [e["CUDA_VISIBLE_DEVICES"] for e in plan_environments(two)] == ["a,b,c,d", "e,f,g,h"]
    with pytest.raises(ConfigError, match=r"3 servers of 4 GPUs .* do not fit on the 8 GPUs"):
        plan_environments(
            SglangOptions({"tp_size": 2, "dp_size": 2}, {}, Path("log"), gpus=gpus, replicas=3)
        )
    shared = {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}
    assert len(plan_environments(SglangOptions(shared, {}, Path("l"), gpus=gpus, replicas=2))) == 2
    cpu = SglangOptions({"device": "cpu"}, {}, Path("log"), replicas=3)
    assert plan_environments(cpu) == [{}, {}, {}]


def test_each_sample_has_its_own_seed_start_and_limit() -> None:
    sampling = Sampling(5, 0.5, 0.9, 3, 0.1, ("x",), (9,))
    body = render_request(Request(4, (1, 2), (7, 8), ((), (5, 6))), sampling)
    assert body["input_ids"] == [[1, 2], [1, 2, 5, 6]]
    assert body["return_logprob"] is True
    params = body["sampling_params"]
    assert [p.pop("sampling_seed") for p in params] == [7, 8]
    assert [p.pop("max_new_tokens") for p in params] == [5, 3]
    for shared in params:
        assert shared == {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "min_p": 0.1,
            "stop": ["x"],
            "stop_token_ids": [9],
            "skip_special_tokens": False,
        }
    assert "n" not in params[0]


def test_scoring_generates_nothing() -> None:
    body = render_scoring((1, 2, 3))
    assert body["input_ids"] == [1, 2, 3]
    assert body["logprob_start_len"] == 0
    assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
    scored = [[None, 1, None], [-0.5, 2, None], [-1.5, 3, None]]
    meta = {"weight_version": WEIGHTS.label, "input_token_logprobs": scored}

    def answer(**changes: object) -> bytes:
        return orjson.dumps({"meta_info": meta | changes})

    assert parse_scoring(answer(), (1, 2, 3), label=WEIGHTS.label) == [-0.5, -1.5]
    for changes, message in (
        ({"weight_version": "other"}, "with the weights other"),
        ({"input_token_logprobs": scored[:2]}, "scored other tokens"),
        ({"input_token_logprobs": [*scored[:2], [None, 3, None]]}, "NaN"),
        ({"input_token_logprobs": None}, "did not score"),
    ):
        with pytest.raises(EngineError, match=message):
            parse_scoring(answer(**changes), (1, 2, 3), label=WEIGHTS.label)


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
        ({"output_token_logprobs": []}, "other tokens"),
        ({"output_token_logprobs": [[-0.5, 3, None], [float("nan"), 4, None]]}, "log-prob nan"),
        ({"output_token_logprobs": [[-0.5, 3, None], [float("-inf"), 4, None]]}, "log-prob -inf"),
        ({"finish_reason": None}, "for the reason None"),
    ],
)
def test_a_result_that_cannot_be_trusted_is_an_error(meta: dict[str, object], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_completion(result(**meta), label=WEIGHTS.label)


def test_what_was_cut_off_counts_as_far_as_it_is_complete() -> None:
    abort = {"type": "abort", "message": "Abort"}
    cut = result(finish_reason=abort) | {"output_ids": [3, 4, 5]}
    completion = parse_completion(cut, label=WEIGHTS.label)
    assert completion == Completion((3, 4), (-0.5, -1.5), "abort", WEIGHTS.label)
    # Taken from the queue before it began: SGLang leaves most of it out.
    early = {"weight_version": WEIGHTS.label, "finish_reason": abort}
    completion = parse_completion({"output_ids": [], "meta_info": early}, label=WEIGHTS.label)
    assert completion == Completion((), (), "abort", WEIGHTS.label)
    with pytest.raises(EngineError, match="other tokens"):
        parse_completion(cut | {"output_ids": [9, 4, 5]}, label=WEIGHTS.label)


def test_an_answer_costs_little_per_token() -> None:
    """At 35,000 tokens a second and more, parsing must stay a few percent of one core."""
    num, length = 16, 2000
    triples = [[-0.12345678 - i / 1e5, i % 150_000, None] for i in range(length)]
    one = {"text": "", "output_ids": [t[1] for t in triples]}
    one["meta_info"] = result()["meta_info"] | {"output_token_logprobs": triples}  # type: ignore[operator]
    data = orjson.dumps([one] * num)
    request, sampling = Request(0, (1, 2), tuple(range(num))), Sampling(length)
    times = []
    for _ in range(5):
        began = time.process_time()
        answer = parse_answer(data, request, sampling, label=WEIGHTS.label)
        times.append(time.process_time() - began)
    assert len(answer.completions) == num
    per_token_us = min(times) / (num * length) * 1e6
    assert per_token_us < 5.0, f"{per_token_us:.2f} µs a token"


def test_the_server_is_told_to_say_its_routing(make_settings) -> None:  # type: ignore[no-untyped-def]
    for routed in (False, True):
        settings = make_settings(engine="sglang", use_rollout_routing_replay=routed)
        options = plan_options(settings, environment={}, log_path=Path("/l"), random_seed=1)
        command = render_command(options, WEIGHTS, port=1, dtype=None)
        assert ("--enable-return-routed-experts" in command) == routed
