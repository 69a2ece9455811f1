"""Rules of the rollout: each mistake is one line that says what to do; what is sensible passes."""

from __future__ import annotations

import pytest

BAD = [
    ({"rollout__over_sampling_batch_size": 8}, "over_sampling_batch_size", "not more than"),
    ({"rollout__max_groups": 3}, "max_groups", "less than"),
    ({"rollout__on_exhausted": "train"}, "on_exhausted", "no group is ever dropped"),
    ({"rollout__dynamic_sampling_filter_path": "nonzero"}, "dynamic_sampling", "neither"),
    (
        {"rollout__dynamic_sampling_filter_path": "nonzero_std", "score__enabled": True},
        "dynamic_sampling",
        "after the rollout",
    ),
    ({"rollout__close_at": 0.9, "deterministic": True}, "close_at", "deterministic: false"),
    ({"rollout__close_at": 0.9, "rollout__admission": "cursor"}, "close_at", "arrival"),
    ({"rollout__close_after_s": 60.0, "rollout__admission": "cursor"}, "close_after_s", "arrival"),
    ({"rollout__admission": "arrival", "deterministic": True}, "admission", "leave it out"),
    ({"rollout__partial_rollout": True}, "partial_rollout", "waited for"),
    ({"rollout__mask_offpolicy_in_partial_rollout": True}, "mask_offpolicy", "partial_rollout"),
    (
        {"rollout__rollout_max_prompt_len": 100, "rollout__rollout_max_context_len": 100},
        "rollout_max_prompt_len",
        "no room",
    ),
    (
        {"eval": {"t": {"prompt_data": "/d.jsonl", "rm_type": "gsm8k", "pass_k": [1, 8]}}},
        "eval.t.pass_k",
        "n_samples_per_prompt",
    ),
    (
        {"eval": {"t": {"prompt_data": "/d.jsonl", "pass_k": [1, 2, 1]}}},
        "eval.t.pass_k[2] = 1",
        "is there twice",
    ),
    ({"rollout__rollout_stop": ["a", ""]}, 'rollout.rollout_stop[1] = ""', "is empty"),
    (
        {"rollout__prompt_data": [{"name": "a", "path": "/d.jsonl", "rollout_stop": [""]}]},
        "rollout.prompt_data[0].rollout_stop[0]",
        "would end every response at once; take it out",
    ),
    (
        {"eval": {"t": {"prompt_data": "/d.jsonl", "rollout_stop": [""]}}},
        "eval.t.rollout_stop[0]",
        "is empty",
    ),
    (
        {"rollout__rollout_stop_token_ids": [3, -1]},
        "rollout.rollout_stop_token_ids[1] = -1",
        "is no token: they count from 0; take it out",
    ),
    ({"rollout__rollout_top_k": 0}, "rollout_top_k", "-1 for all"),
]


@pytest.mark.parametrize(("changes", "setting", "words"), BAD)
def test_a_mistake_is_told(complaints, changes, setting, words):
    told = complaints(**changes)
    assert len([text for text in told if setting in text and words in text]) == 1, told


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout__close_at": 0.95},
        {"rollout__close_at": 0.95, "rollout__partial_rollout": True},
        {"rollout__dynamic_sampling_filter_path": "nonzero_std", "rollout__on_exhausted": "train"},
        {"rollout__dynamic_sampling_filter_path": "agent.filters.keep"},
        {"rollout__on_reward_error": "drop", "rollout__on_exhausted": "train"},
    ],
)
def test_what_makes_sense_passes(load, changes):
    load(**changes)
