from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slurm_rl.config.checks import check_settings
from slurm_rl.config.schema import Settings
from slurm_rl.config.validation import schema_paths, validate_settings

Load = Callable[..., Settings]
Complaints = Callable[..., list[str]]
CONTAINER = {"runtime": "apptainer", "image": "/x.sif"}
SLURM = {"launcher": "slurm"}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"hf_checkpoint": None}, "hf_checkpoint is missing; add it, or an init_model for a small random one"),
        ({"init_model": {"config": {}, "characters": "ab"}}, "init_model is given beside hf_checkpoint; keep one of the two"),
        ({"chain__lease_s": 5}, "chain.lease_s = 5.0 is shorter than two heartbeats of 5 s; raise it"),
        ({"rollout__rm_type": None}, "rollout.rm_type is missing; name a built-in reward, or your own as custom_rm_path, or list several as rewards"),
        ({"rollout__custom_rm_path": "a.b"}, 'rollout.custom_rm_path = "a.b" is given beside rm_type; keep one of the two'),
        ({"rollout__rm_type": None, "rollout__custom_rm_path": "score"}, 'rollout.custom_rm_path = "score" is not a dotted path; write package.module.function'),
        ({"rollout__shards": 9}, "rollout.shards = 9 is more than rollout_batch_size = 8; lower it: a shard needs a prompt"),
        ({"rollout__shards": 4, "max_array_tasks": 3}, "rollout.shards = 4 is more than max_array_tasks = 3; lower it, or raise max_array_tasks if the site allows"),
        ({"rollout__shards": 4, "max_submit_jobs": 3}, "rollout.shards = 4 is more than max_submit_jobs = 3: the array could never be submitted; lower it"),
        ({**SLURM, "train__slurm": {"gres": "gpu:a100:4"}}, "train.num_ranks is needed: train.slurm.gres does not say how many ranks there are; set it, or ask with nodes and gpus_per_node"),
        ({**SLURM, "train__slurm": {"nodes": 2, "ntasks_per_node": 4}}, "train.num_ranks is needed: train.slurm.ntasks_per_node does not say how many ranks there are; set it, or ask with nodes and gpus_per_node"),
        ({"rollout__rollout_top_k": 0}, "rollout.rollout_top_k = 0 must be at least 1, or -1 for all tokens; change it"),
        ({"rollout__apply_chat_template_kwargs": {"a": 1}}, "rollout.apply_chat_template_kwargs has no effect without apply_chat_template; set apply_chat_template: true"),
        ({"rollout__engine": "embedded", "rollout__sglang": {"tp_size": 1}}, "rollout.sglang has no effect with engine: embedded; take it out, or set engine: sglang"),
        ({"deterministic": True}, "rollout.sglang.enable_deterministic_inference must be true with deterministic: true; add it, or set deterministic: false"),
        ({**SLURM, "rollout__sglang": {"tp_size": 2, "dp_size": 4}, "rollout__slurm__gpus_per_node": "a100:4"}, "rollout.sglang needs 8 GPUs (tp × pp × dp), but a node of the job has 4; lower tp_size or dp_size, or ask for more"),
        ({"train__global_batch_size": 15}, "train.global_batch_size = 15 does not divide the 32 samples of an iteration (rollout_batch_size 8 × n_samples_per_prompt 4); use a divisor, as 32"),
        ({"rollout__n_samples_per_prompt": 1, "train__global_batch_size": 8}, "rollout.n_samples_per_prompt = 1 gives grpo nothing to compare: every advantage would be 0; use at least 2"),
        ({"train__use_kl_loss": True}, "train.use_kl_loss = true has no effect with kl_loss_coef = 0; raise kl_loss_coef, or set use_kl_loss: false"),
        ({"train__kl_loss_coef": 0.1}, "train.kl_loss_coef = 0.1 has no effect without use_kl_loss; set use_kl_loss: true, or take it out"),
        ({"train__megatron": {}}, "train.megatron.lr is missing; add the learning rate, as 1.0e-6"),
        ({"train__megatron__lr": -1}, "train.megatron.lr = -1 must be at least 0; raise it"),
        ({"train__megatron__lr_decay_style": "cosine"}, "train.lr_decay_iters is missing, and lr_decay_style: cosine needs a horizon; add it: optimizer steps until min_lr, kept when the run is extended"),
        ({"train__lr_decay_iters": 5, "train__lr_warmup_iters": 5}, "train.lr_warmup_iters = 5 is not below lr_decay_iters = 5; lower it"),
        ({"train__megatron__tensor_model_parallel_size": 0}, "train.megatron.tensor_model_parallel_size = 0 must be at least 1; raise it"),
        ({"train__megatron__tensor_model_parallel_size": 2}, "train.megatron lays the model out over 2 ranks (tensor × pipeline × context); the train job has 1: make that a multiple, or lower a size"),
        ({"train__megatron__expert_model_parallel_size": 2}, "train.megatron lays the experts out over 2 ranks (expert tensor × expert × pipeline); the train job has 1: make that a multiple, or lower a size"),
        ({"train__megatron__expert_model_parallel_size": 0}, "train.megatron.expert_model_parallel_size = 0 must be at least 1; raise it"),
        ({"train__megatron__virtual_pipeline_model_parallel_size": 2}, "train.megatron.virtual_pipeline_model_parallel_size = 2 has no effect with pipeline_model_parallel_size = 1; take it out"),
        ({"train__num_ranks": 3}, "train.global_batch_size = 16 does not divide by the 3 data-parallel ranks; use a multiple"),
        ({"train__megatron__sequence_parallel": True}, "train.megatron.sequence_parallel = true has no effect with tensor_model_parallel_size = 1; take it out"),
        ({"container__runtime": "apptainer"}, "container.image is missing, and runtime: apptainer needs one; add it"),
        ({"container__image": "/x.sif"}, 'container.image = "/x.sif" has no effect with runtime: none; set container.runtime: apptainer or pyxis'),
        ({"container": CONTAINER, "rollout__container": {"bind": ["/a"]}}, 'rollout.container.bind = ["/a"] has no effect with runtime: none; set rollout.container.runtime: apptainer or pyxis'),
        ({"container": CONTAINER, "train__python": "python3"}, 'train.python = "python3" has no effect in a container; set container.python instead'),
        ({"container": {"runtime": "pyxis", "image": "x"}}, 'container.runtime = "pyxis" is a plugin of srun; use apptainer or none with launcher: local'),
        ({"slurm__time": "00:02:00"}, 'slurm.time = "00:02:00" is not longer than init\'s signal_s = 120 s; raise time or lower signal_s'),
        ({"train__slurm": {"time": "10", "signal_s": 600}}, 'train.slurm.time = "10" is not longer than train\'s signal_s = 600 s; raise time or lower signal_s'),
        ({"train__slurm": {"time": "1:00:00", "time_min": "2:00:00"}}, 'train.slurm.time_min = "2:00:00" is longer than time = 1:00:00; lower it'),
        ({"slurm__time": "1 hour"}, 'slurm.time = "1 hour" is not a wall time; write it as "HH:MM:SS" or "D-HH"'),
        ({"slurm__time": "auto"}, 'slurm.time = "auto" has no time_max to stay within; set slurm.time_max to the partition\'s limit (`slurm-rl doctor` prints it)'),
        ({"slurm__fallback": {"after": "soon", "qos": "x"}}, 'slurm.fallback.after = "soon" is not a wall time; write it as "HH:MM:SS" or "D-HH"'),
        ({"slurm__fallback": {"after": "10"}}, "slurm.fallback names neither a partition nor a qos; name where to go"),
        ({"chain__budget": {"until": "tomorrow"}}, 'chain.budget.until = "tomorrow" is not a time; write it as 2030-01-31T18:00'),
        ({"slurm__gpus_per_node": "a100:x"}, 'slurm.gpus_per_node = "a100:x" must be a number, or a type and a number; write it as 8 or "a100:4"'),
        ({"slurm__partiton": "a"}, 'slurm.partiton = "a" is not an option of sbatch; did you mean partition?'),
        ({"train__slurm": {"gpus-per-node": 8}}, "train.slurm.gpus-per-node = 8 is written with underscores; write gpus_per_node"),
        ({"slurm__job_name": "x"}, 'slurm.job_name = "x" names the job and its log; take the line out'),
        ({"slurm__signal": "B:USR1@60"}, 'slurm.signal = "B:USR1@60" is ours: set signal_s; take the line out'),
        ({"slurm__gres": ["a"]}, 'slurm.gres = ["a"] must be text, a number or true/false; change it'),
        ({**SLURM, "train__num_ranks": 4, "train__slurm": {"nodes": 1, "gpus_per_node": 8}}, "train.num_ranks = 4 is not the 1 × 8 GPUs that the train job asks for; take it out, or change nodes or gpus_per_node"),
        ({"rollout__array_throttle": 1}, "rollout.array_throttle = 1 has no effect with launcher: local, where there are no arrays; take it out"),
        ({**SLURM, "rollout__shards": 4, "rollout__array_throttle": 4}, "rollout.array_throttle = 4 has no effect on arrays of 4 shard(s); lower it, or take it out"),
        ({"score__concurrency": 2}, "score.concurrency has no effect: there is no score stage; set score.enabled: true, or on_down: defer for a service"),
        ({"eval__aime": {"prompt_data": "/d", "interval": 9}}, "eval.aime.interval = 9 is more than num_rollout = 3: no version is a multiple; lower it, or take it out: the last version is evaluated anyway"),
        ({"eval__aime": {"prompt_data": "/d", "slurm": {"partiton": "a"}}}, 'eval.aime.slurm.partiton = "a" is not an option of sbatch; did you mean partition?'),
        ({"eval__aime": {"prompt_data": "/d", "slurm": {"time": "00:01:00"}}}, 'eval.aime.slurm.time = "00:01:00" is not longer than eval-aime\'s signal_s = 120 s; raise time or lower signal_s'),
        ({"eval__aime": {"prompt_data": "/d", "python": "p", "container": CONTAINER}}, 'eval.aime.python = "p" has no effect in a container; set container.python instead'),
        ({"score__enabled": True, "score__slurm": {"time": "1:00:00"}, "chain__pack": "iteration"}, 'score.slurm.time is "1:00:00" for score and null for init, but chain.pack: iteration runs both in one job; set slurm.time at the top for all, or chain.pack: stage'),
        ({**SLURM, "train__num_ranks": 4, "train__slurm": {"nodes": 3}}, "train.num_ranks = 4 does not spread evenly over 3 nodes; change it"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together(
    complaints: Complaints, values: dict[str, Any], line: str
) -> None:
    found = complaints(**values)
    assert line in found


def test_pack_iteration_shows_both_shapes(complaints: Complaints) -> None:
    (line,) = complaints(
        chain__pack="iteration", slurm__time="01:00:00", rollout__slurm={"time": "02:00:00"}
    )
    assert line == (
        'rollout.slurm.time is "02:00:00" for rollout and "01:00:00" for init, but chain.pack:'
        " iteration runs both in one job; set slurm.time at the top for all, or chain.pack: stage"
    )


@pytest.mark.parametrize(
    "values",
    [
        {"slurm": {"hint": "nomultithread", "requeue": True, "bb": "x", "site_only_option": "y"}},
        {"slurm": {"time": "UNLIMITED", "signal_s": 600}},
        {"slurm": {"nodelist": "a", "mem_per_gpu": "4G", "gres": "gpu:4"}},
        {"chain__pack": "iteration", "slurm": {"time": "01:00:00", "nodes": 2}},
        {"train__use_kl_loss": True, "train__kl_loss_coef": 0.01},
        {**SLURM, "rollout__shards": 8, "rollout__array_throttle": 4},
        {"chain__pack": "iteration", "slurm": {"gpus_per_node": 1}, "score__enabled": True},
        {"eval__aime": {"prompt_data": "/d/x.jsonl", "interval": 3}},
        {"deterministic": True, "rollout__sglang": {"enable_deterministic_inference": True}},
        {"deterministic": True, "rollout__engine": "embedded"},
        {"train__num_ranks": 4, "train__megatron__pipeline_model_parallel_size": 2},
        {"container": CONTAINER, "train__container": {"runtime": "none"}, "train__python": "p"},
        {"rollout__rm_type": None, "rollout__custom_rm_path": "mine.score"},
        {"train__lr_decay_iters": 9, "train__megatron__lr_decay_style": "cosine"},
    ],
)
def test_settings_that_do(load: Load, values: dict[str, Any]) -> None:
    load(**values)


@pytest.mark.parametrize(
    "value", [None, "x", 0, -1, 1.5, True, [], {}, [1], {"a": 1}, "1e400", "~"]
)
def test_any_value_anywhere_is_accepted_or_explained(
    changed: Callable[..., dict[str, Any]], value: Any
) -> None:
    passthrough: list[tuple[str, ...]] = [
        ("train", "megatron", "tensor_model_parallel_size"),
        ("train", "megatron", "lr"),
        ("train", "megatron", "lr_decay_style"),
        ("rollout", "sglang", "tp_size"),
        ("rollout", "sglang", "unknown"),
        ("slurm", "unknown"),
        ("slurm", "gres"),
    ]
    for path in [*schema_paths(), *passthrough]:
        data = changed(chain={"pack": "iteration"}, slurm={"time": "1:00:00"}, launcher="slurm")
        target = data
        for part in path[:-1]:
            if not isinstance(target.get(str(part)), dict):
                target[str(part)] = {}
            target = target[str(part)]
        target[str(path[-1])] = value
        settings, problems = validate_settings(data)
        if settings is not None:
            problems = check_settings(settings)
        for problem in problems:
            line = problem.render({(): "f"})
            assert "\n" not in line
            assert "does not fit here" not in line, line
