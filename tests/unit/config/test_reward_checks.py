from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from slurm_rl.config.checks import check_settings
from slurm_rl.config.reward_checks import BOXED, REWARD_NAMES
from slurm_rl.config.schema import Settings
from slurm_rl.rollout.rewards import BUILT_IN, find_reward

Complaints = Callable[..., list[str]]
SERVER = {"hf_checkpoint": "/models/rm"}
NO_TYPE = {"rollout__rm_type": None}
SERVICE = {"url": "http://rm:1"}


def test_the_rewards_that_are_accepted_are_those_that_exist() -> None:
    plain = [name for name in REWARD_NAMES if not name.startswith(BOXED)]
    assert sorted(plain) == sorted(BUILT_IN)
    for name in REWARD_NAMES:
        assert find_reward(rm_type=name, custom_rm_path=None).name == name


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"rollout__rm_type": "gsm8"},
            'rollout.rm_type = "gsm8" must be one of .*; did you mean gsm8k\\?',
        ),
        ({"rollout__rm_type": "boxed_dapo"}, 'rollout.rm_type = "boxed_dapo" must be one of'),
        (
            {"rollout__rewards": [{"rm_type": "f1"}]},
            "rollout.rewards is given beside rm_type; keep one",
        ),
        (
            {**NO_TYPE, "rollout__rewards": [{"weight": 2.0}]},
            r"rollout.rewards\[0\] needs rm_type or custom_rm_path",
        ),
        (
            {**NO_TYPE, "rollout__rewards": [{"rm_type": "f1", "custom_rm_path": "a.b"}]},
            r"rollout.rewards\[0\] needs rm_type or",
        ),
        (
            {**NO_TYPE, "rollout__rewards": [{"rm_type": "f1"}, {"rm_type": "f1"}]},
            r"rollout.rewards\[1\] is called 'f1' like another",
        ),
        (
            {**NO_TYPE, "rollout__rewards": [{"custom_rm_path": "a.overlong"}]},
            "is called 'overlong' like another part",
        ),
        (
            {**NO_TYPE, "rollout__rewards": [{"rm_type": "f1", "weight": 0.0}]},
            r"rollout.rewards\[0\].weight = 0 leaves the reward out",
        ),
        (
            {**NO_TYPE, "rollout__rewards": [{"rm_type": "f2"}]},
            r'rollout.rewards\[0\].rm_type = "f2" must be one of',
        ),
        (
            {**NO_TYPE, "rollout__rewards": [{"rm_type": "f1", "options": {"a": 1}}]},
            r"rollout.rewards\[0\].options.a = 1 is no option of f1; it takes none",
        ),
        (
            {**NO_TYPE, "rollout__rewards": [{"rm_type": "format", "options": {"patern": "a"}}]},
            "is no option of format; did you mean pattern\\?",
        ),
        (
            {**NO_TYPE, "rollout__rewards": [{"rm_type": "format", "options": {"pattern": "("}}]},
            "is no regular expression",
        ),
        (
            {
                **NO_TYPE,
                "score__server": SERVER,
                "rollout__rewards": [{"rm_type": "judge", "options": {"pattern": "a"}}],
            },
            "has no group; put the number in parentheses",
        ),
        (
            {**NO_TYPE, "rollout__rewards": [{"rm_type": "code", "options": {"max_tests": True}}]},
            "has the wrong type",
        ),
        (
            {"rollout__reward_key": "total"},
            'rollout.reward_key = "total" has no effect: built-in rewards are numbers',
        ),
        (
            {"rollout__group_rm": True},
            "rollout.group_rm = true has no effect without rollout.custom_rm_path",
        ),
        (
            {"rollout__rm_type": "remote_rm"},
            'rollout.rm_type = "remote_rm" needs an address; set rollout.rm_url',
        ),
        (
            {
                "rollout__rm_type": "remote_rm",
                "rollout__rm_url": "http://a",
                "rollout__rm_service": "rm",
                "services": {"rm": SERVICE},
            },
            'rollout.rm_url = "http://a" is given beside rm_service',
        ),
        (
            {"rollout__rm_type": "remote_rm", "rollout__rm_url": "a:80"},
            'rollout.rm_url = "a:80" is no address',
        ),
        (
            {
                "rollout__rm_type": "remote_rm",
                "rollout__rm_service": "rmm",
                "services": {"rm": SERVICE},
            },
            'rollout.rm_service = "rmm" is no entry of services; did you mean rm\\?',
        ),
        ({"services": {"rm": {}}}, "services.rm needs exactly one of url and url_file"),
        (
            {"services": {"rm": {**SERVICE, "url_file": "/a"}}},
            "services.rm needs exactly one of url and url_file",
        ),
        ({"services": {"rm": {"url": "rm:1"}}}, 'services.rm.url = "rm:1" is no address'),
        (
            {"services": {"rm": {**SERVICE, "health": "health"}}},
            'services.rm.health = "health" is no path; write /health',
        ),
        ({"services": {"rm": SERVICE}}, "services.rm is asked by no reward"),
        (
            {
                "rollout__rm_type": "remote_rm",
                "rollout__rm_service": "rm",
                "services": {"rm": {**SERVICE, "on_down": "defer"}},
                "rollout__dynamic_sampling_filter_path": "nonzero_std",
            },
            'services.rm.on_down = "defer" cannot go with rollout.dynamic_sampling_filter_path',
        ),
        (
            {"rollout__rm_type": "judge"},
            'rollout.rm_type = "judge" asks the score stage\'s server, and there is none',
        ),
        (
            {
                "rollout__rm_type": "judge",
                "score__server": SERVER,
                "eval": {"a": {"prompt_data": "/a"}},
            },
            "eval.a.rm_type is missing, and rollout's judge is given in the score stage",
        ),
        (
            {"score__server": SERVER, "eval": {"a": {"prompt_data": "/a", "rm_type": "served_rm"}}},
            'eval.a.rm_type = "served_rm" is given in the score stage',
        ),
        (
            {"eval": {"a": {"prompt_data": "/a", "rm_type": "f2"}}},
            'eval.a.rm_type = "f2" must be one of',
        ),
        (
            {"eval": {"a": {"prompt_data": "/a", "rm_type": "f1", "custom_rm_path": "a.b"}}},
            'eval.a.custom_rm_path = "a.b" is given beside rm_type',
        ),
        (
            {"rollout__overlong": {"buffer_len": 4000}},
            "rollout.overlong.buffer_len = 4000 is not below rollout.rollout_max_response_len",
        ),
        (
            {"rollout__overlong": {"buffer_len": 1, "penalty_factor": 0.0}},
            "rollout.overlong.penalty_factor = 0 makes overlong have no effect",
        ),
    ],
)
def test_what_is_refused(complaints: Complaints, values: dict[str, Any], line: str) -> None:
    found = complaints(**values)
    assert any(re.search(line, entry) for entry in found), found


@pytest.mark.parametrize(
    "values",
    [
        {
            **NO_TYPE,
            "rollout__rewards": [
                {"rm_type": "f1", "weight": -0.5},
                {"custom_rm_path": "a.b", "name": "f2"},
            ],
        },
        {
            "rollout__rm_type": "remote_rm",
            "rollout__rm_url": "http://a",
            "rollout__reward_key": "total",
        },
        {
            **NO_TYPE,
            "rollout__rewards": [
                {"custom_rm_path": "a.b", "options": {"x": 1}},
                {"rm_type": "code", "options": {"all_or_nothing": True, "max_tests": 3}},
            ],
        },
        {
            "rollout__rm_type": "boxed_remote_rm",
            "rollout__rm_service": "rm",
            "services": {"rm": {"url_file": "/a", "on_down": "defer"}},
        },
        # A reward of the user's may ask any of them.
        {**NO_TYPE, "rollout__custom_rm_path": "a.b", "services": {"rm": SERVICE}},
        {**NO_TYPE, "rollout__custom_rm_path": "a.b", "rollout__group_rm": True},
        {"rollout__sandbox": {"memory_mb": 100}},
    ],
)
def test_what_is_accepted(changed: Callable[..., dict[str, Any]], values: dict[str, Any]) -> None:
    assert check_settings(Settings.model_validate(changed(**values))) == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("rm:1", "is no address"),
        ("ftp://rm", "is no address"),
        ("http://", "is an address without a host"),
        ("http://:30/x", "is an address without a host"),
        ("http:///x", "is an address without a host"),
        ("http://rm:x", "is no address (Port"),
        ("http://rm:99999", "is no address (Port"),
        ("http://rm:0", "is no address"),
        ("http://[::1", "is no address (Invalid IPv6 URL)"),
        ("http://a b", "is no address"),
    ],
)
def test_addresses_have_a_scheme_a_host_and_a_port(
    complaints: Complaints, text: str, rule: str
) -> None:
    asked = {"rollout__rm_type": "remote_rm"}
    for values, place in (
        ({"rollout__rm_url": text}, "rollout.rm_url"),
        ({"rollout__rm_service": "rm", "services__rm": {"url": text}}, "services.rm.url"),
    ):
        (line,) = complaints(**asked, **values)
        assert line.startswith(f'{place} = "{text}" {rule}'), line
        assert line.endswith("; write it as http://host:port/path")


def test_a_query_is_for_an_address_that_is_asked_as_it_is(
    load: Callable[..., Settings], complaints: Complaints
) -> None:
    load(rollout__rm_type="remote_rm", rollout__rm_url="https://rm:8000/score?key=1")
    load(rollout__rm_type="remote_rm", rollout__rm_url="http://[::1]:80")
    (line,) = complaints(
        rollout__rm_type="remote_rm",
        rollout__rm_service="rm",
        services__rm={"url": "http://rm:1/x?key=1"},
    )
    assert line.startswith('services.rm.url = "http://rm:1/x?key=1" is an address with a query')


def test_what_no_reward_asks_is_refused(
    load: Callable[..., Settings], complaints: Complaints
) -> None:
    rule = "has no effect: no reward is remote_rm; take it out"
    url, server = {"rollout__rm_url": "http://rm:1"}, {"score__server": SERVER}
    assert complaints(**url) == [f'rollout.rm_url = "http://rm:1" {rule}']
    assert complaints(rollout__rm_service="rm", services__rm=SERVICE) == [
        f'rollout.rm_service = "rm" {rule}'
    ]
    (line,) = complaints(**server)
    assert line.startswith("score.server serves a model that no reward asks (served_rm and judge")
    # A row may name the reward, and the user's own may ask.
    load(**url, rollout__metadata_key="m")
    load(**url, rollout__rm_type=None, rollout__custom_rm_path="a.b")
    load(**server, rollout__rm_type="judge")
    (line,) = complaints(**url, rollout__dynamic_sampling_filter_path="nonzero_std")
    assert line == f'rollout.rm_url = "http://rm:1" {rule}'
    (line,) = complaints(
        rollout__rm_type="remote_rm", rollout__rm_service="score", services__score=SERVICE
    )
    assert line == "services.score is the name of another server of ours; rename it"


@pytest.mark.parametrize(
    "own",
    [
        {"rollout__environment": "my.Env"},
        {"rollout__tools": ["calculator", "my.search"], "rollout__apply_chat_template": True},
        {"rollout__custom_generate_function_path": "my.generate"},
        {"rollout__dynamic_sampling_filter_path": "my.keep"},
    ],
    ids=lambda own: next(iter(own)),
)
def test_the_user_s_code_may_ask_what_no_reward_does(
    load: Callable[..., Settings], own: dict[str, Any]
) -> None:
    load(rollout__rm_url="http://rm:1", **own)
    load(rollout__rm_service="rm", services__rm=SERVICE, **own)
    load(services__rm=SERVICE, **own)
    if "rollout__dynamic_sampling_filter_path" not in own:  # it comes before the score stage
        load(score__server=SERVER, **own)


@pytest.mark.parametrize(
    "built_in",
    [
        {"rollout__environment": "reasoning_gym", "rollout__prompt_data": "reasoning_gym:lcm"},
        {"rollout__tools": ["calculator"], "rollout__apply_chat_template": True},
    ],
    ids=["environment", "tools"],
)
def test_what_is_built_in_asks_nobody(complaints: Complaints, built_in: dict[str, Any]) -> None:
    found = complaints(rollout__rm_url="http://rm:1", score__server=SERVER, **built_in)
    assert [line.split(" = ")[0].split(" serves")[0] for line in found] == [
        "rollout.rm_url",
        "score.server",
    ]


def test_the_served_model_s_arguments_are_sglang_s(
    load: Callable[..., Settings], complaints: Complaints
) -> None:
    load(rollout__rm_type="served_rm", score__server={**SERVER, "sglang": {"is_embedding": True}})
    (line,) = complaints(
        rollout__rm_type="judge", score__server={**SERVER, "sglang": {"is_embeddings": True}}
    )
    assert line.startswith("score.server.sglang.is_embeddings is not a setting of SGLang")
    assert "is_embedding" in line.partition(";")[2]
