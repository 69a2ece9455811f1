"""Names that other programs give to what a run has here, so that an unknown key finds its place.

Owns the table: a name elsewhere -> the settings here that mean the same, or a sentence where
there is none. Every path in it is a setting, which a test holds it to. Our own names, and those
that pass through to Megatron-core and SGLang, are not in it: they are found by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_rl.config.passthrough import SGLANG, Table

_SGLANG_PREFIX = "sglang_"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a name is here: `settings` by dotted path (NAME: one that you choose), and a remark."""

    settings: tuple[str, ...] = ()
    remark: str = ""

    def __str__(self) -> str:
        here = f"here it is {', '.join(self.settings)}" if self.settings else ""
        return ": ".join(part for part in (here, self.remark) if part)


def _at(*settings: str, remark: str = "") -> Meaning:
    return Meaning(settings, remark)


def _none(remark: str) -> Meaning:
    return Meaning((), remark)


_OWN_JOBS = "take the line out: a stage is a job of its own, and has all the GPUs that it asks for"
_OTHER_SHAPE = "it takes what docs/training.md says"
_TRACKER = "take the line out: each commit has its metrics, `slurm-rl metrics RUN` shows them"
_KEPT = "every iteration is saved; this says which stay"

#: Name elsewhere -> what it is here.
ELSEWHERE: Mapping[str, Meaning] = {
    # -- evaluation
    "eval_interval": _at("eval.NAME.interval"),
    "eval_prompt_data": _at("eval.NAME.prompt_data"),
    "eval_config": _at("eval.NAME", remark="a section for each data set"),
    "n_samples_per_eval_prompt": _at("eval.NAME.n_samples_per_prompt"),
    "eval_input_key": _at("eval.NAME.input_key"),
    "eval_label_key": _at("eval.NAME.label_key"),
    "eval_max_response_len": _at("eval.NAME.rollout_max_response_len"),
    "eval_temperature": _at("eval.NAME.rollout_temperature"),
    "eval_top_p": _at("eval.NAME.rollout_top_p"),
    "eval_top_k": _at("eval.NAME.rollout_top_k"),
    "skip_eval_before_train": _at("eval.NAME.before_training", remark="false skips it"),
    "val_files": _at("eval.NAME.prompt_data"),
    "val_before_train": _at("eval.NAME.before_training"),
    "test_freq": _at("eval.NAME.interval"),
    # -- batches
    "balance_data": _none("take the line out: ranks share the batch evenly"),
    "use_dynamic_batch_size": _at("train.max_tokens_per_gpu", remark="setting it packs"),
    "log_probs_chunk_size": _at("train.log_probs_max_tokens_per_gpu"),
    "num_steps_per_rollout": _at("train.minibatches"),
    "ppo_epochs": _at("train.epochs"),
    "ppo_max_token_len_per_gpu": _at("train.max_tokens_per_gpu"),
    "log_prob_max_token_len_per_gpu": _at("train.log_probs_max_tokens_per_gpu"),
    "num_epoch": _at("num_rollout", remark="iterations, not epochs"),
    "total_epochs": _at("num_rollout", remark="iterations, not epochs"),
    "train_batch_size": _at("rollout.rollout_batch_size"),
    "ppo_mini_batch_size": _at("train.global_batch_size", remark="samples, not prompts"),
    "ppo_micro_batch_size_per_gpu": _at("train.micro_batch_size"),
    "max_prompt_length": _at("rollout.rollout_max_prompt_len"),
    "max_response_length": _at("rollout.rollout_max_response_len"),
    "train_files": _at("rollout.prompt_data"),
    "rollout_seed": _at("seed"),
    # -- machines
    "rollout_num_gpus": _at(
        "rollout.sglang.tp_size",
        "rollout.replicas",
        "rollout.shards",
        remark="GPUs of a server, servers of a job, jobs",
    ),
    "rollout_num_gpus_per_engine": _at("rollout.sglang.tp_size"),
    "gpu_memory_utilization": _at("rollout.sglang.mem_fraction_static"),
    "actor_num_nodes": _at("train.slurm.nodes", "train.num_ranks"),
    "actor_num_gpus_per_node": _at("train.slurm.gpus_per_node", "train.num_ranks"),
    "num_gpus_per_node": _at("train.slurm.gpus_per_node", "rollout.slurm.gpus_per_node"),
    "nnodes": _at("train.slurm.nodes", "rollout.slurm.nodes"),
    "n_gpus_per_node": _at("train.slurm.gpus_per_node", "rollout.slurm.gpus_per_node"),
    "colocate": _none(_OWN_JOBS),
    "offload": _none(_OWN_JOBS),
    "update_weights_interval": _at("chain.lag", remark="each iteration publishes its weights"),
    # -- checkpoints
    "save": _at("run.dir", remark="checkpoints lie in <run.dir>/<run.name>"),
    "save_interval": _at("retention.keep_every", "retention.keep_last", remark=_KEPT),
    "save_freq": _at("retention.keep_every", "retention.keep_last", remark=_KEPT),
    "load": _at("hf_checkpoint", remark="a run goes on by itself from where it was"),
    "ref_load": _at("reference.hf_checkpoint"),
    "ref_update_interval": _at("reference.update_interval"),
    "critic_load": _at("critic.hf_checkpoint"),
    "critic_lr": _at("critic.megatron.lr"),
    "critic_lr_warmup_iters": _at("critic.lr_warmup_iters"),
    "num_critic_only_steps": _at("critic.warmup_iterations", remark="iterations"),
    "critic_warmup": _at("critic.warmup_iterations", remark="iterations"),
    "cliprange_value": _at("critic.value_clip"),
    "critic_num_nodes": _at("critic.slurm.nodes", "critic.num_ranks"),
    "critic_num_gpus_per_node": _at("critic.slurm.gpus_per_node", "critic.num_ranks"),
    "megatron_to_hf_mode": _none("take the line out: weights are converted by themselves"),
    "project_name": _at("run.name"),
    "experiment_name": _at("run.name"),
    # -- algorithm
    "use_tis_correction": _at("train.use_tis"),
    "tis_imp_ratio_cap": _at("train.tis_clip", "train.use_tis"),
    "rollout_is": _at("train.use_tis", "train.tis_level"),
    "rollout_is_threshold": _at("train.tis_clip"),
    "rollout_rs": _at("train.rejection.level"),
    "rollout_rs_threshold": _at("train.rejection.high"),
    "rollout_rs_threshold_lower": _at("train.rejection.low"),
    "use_rollout_logprobs": _none("take the line out: the trainer computes them itself"),
    "use_kl_in_reward": _at("train.kl_coef", remark="above 0"),
    "kl_penalty": _at("train.kl_reward_type"),
    "norm_adv_by_std_in_grpo": _at("train.normalize_advantages_std"),
    "clip_ratio_c": _at("train.eps_clip_c"),
    "loss_agg_mode": _at("train.loss_aggregation"),
    "adv_estimator": _at("train.advantage_estimator"),
    "clip_ratio": _at("train.eps_clip"),
    "clip_ratio_high": _at("train.eps_clip_high"),
    "entropy_coeff": _at("train.entropy_coef"),
    "lam": _at("train.lambd"),
    "loss_mode": _at("train.policy_loss"),
    "loss_type": _at("train.policy_loss"),
    "custom_loss_function_path": _at("train.custom_loss_path", remark=_OTHER_SHAPE),
    "custom_advantage_function_path": _at("train.custom_advantage_path", remark=_OTHER_SHAPE),
    "custom_pg_loss_reducer_function_path": _at("train.custom_reducer_path", remark=_OTHER_SHAPE),
    "custom_tis_function_path": _at("train.custom_correction_path", remark=_OTHER_SHAPE),
    "opd_kl_coef": _at("teacher.coef"),
    "opd_teacher_load": _at("teacher.hf_checkpoint"),
    "rollout_function_path": _at(
        "rollout.custom_generate_function_path", remark="it makes one sample"
    ),
    # -- how it runs
    "debug_rollout_only": _none("there is no such mode"),
    "debug_train_only": _none("there is no such mode"),
    "use_wandb": _none(_TRACKER),
    "wandb_project": _none(_TRACKER),
    "wandb_group": _none(_TRACKER),
    "wandb_key": _none(_TRACKER),
    "use_tensorboard": _none(_TRACKER),
    # -- verl's own
    "prompt_key": _at("rollout.input_key"),
    "n": _at("rollout.n_samples_per_prompt"),
    "temperature": _at("rollout.rollout_temperature"),
    "top_p": _at("rollout.rollout_top_p"),
    "top_k": _at("rollout.rollout_top_k"),
    "optim": _at("train.megatron", remark="Megatron-core's own names: lr, weight_decay, clip_grad"),
    "grad_clip": _at("train.megatron.clip_grad"),
    "enable_gradient_checkpointing": _at("train.megatron.recompute_granularity"),
    "total_training_steps": _at("num_rollout"),
    "default_local_dir": _at("run.dir"),
    "filter_overlong_prompts": _at(
        "rollout.rollout_max_prompt_len", remark="longer ones are left out"
    ),
    "custom_reward_function": _at("rollout.custom_rm_path", remark="FOLDER.MODULE.FUNCTION"),
    "logger": _none(_TRACKER),
    "resume_mode": _none("take the line out: `slurm-rl resume RUN` goes on from what is committed"),
    # -- whole sections
    "actor_rollout_ref": _at("hf_checkpoint", "rollout", "train"),
    "data": _at("rollout.prompt_data", remark="with its keys and lengths, in rollout"),
    "algorithm": _at("train.advantage_estimator", remark="with what belongs to it, in train"),
    "trainer": _at("train", "run", "num_rollout"),
    "reward_model": _at("rollout.rm_type", "score.server"),
}
#: Value elsewhere -> the same one here, of settings that take it.
VALUES: Mapping[str, str] = {
    "kl": "k1",
    "mse": "k2",
    "vanilla": "ppo",
    "ppo": "gae",
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
}


def explain_name(name: str) -> str | None:
    """What a name of another program is here, for a person; None for one that nobody knows."""
    meaning = ELSEWHERE.get(name)
    if meaning is not None:
        return str(meaning)
    if name.startswith(_SGLANG_PREFIX):
        return _explain_argument(name.removeprefix(_SGLANG_PREFIX), SGLANG, "rollout.sglang")
    return None


def _explain_argument(name: str, table: Table, at: str) -> str | None:
    """An argument of a program that had the program's name in front."""
    owner = table.owner(name)
    if owner is not None:
        return f"take the line out: {name} {owner}"
    for current, entry in table.entries.items():
        if name == current or name in entry.get("aliases", []):
            return f"here it is {at}.{current}"
    return None
