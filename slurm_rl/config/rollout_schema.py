"""The rollout's part of the configuration: data, sampling, engines, rewards, turns, evaluation.

Names follow slime's where it has one. What a data set may set for itself is `DataSet`; what an
evaluation may, is `EvalSet`; both fall back to `rollout`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from slurm_rl.config.sections import (
    EnvName,
    EnvValue,
    Fraction,
    Positive,
    Seconds,
    Section,
    Slurm,
    Stage,
)

Share = Annotated[float, Field(gt=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
#: A data set's name: it is part of metric names and of file names.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")]
#: Fields that say under which keys a row holds its parts.
KEY_FIELDS = ("input_key", "label_key", "metadata_key", "tool_key")


class Overrides(Section):
    """What a data set or an evaluation may set for itself; unset: as `rollout` has it."""

    input_key: str | None = Field(None, description="Key of a row that holds the prompt.")
    label_key: str | None = Field(None, description="Key of a row that the reward compares with.")
    metadata_key: str | None = Field(None, description="Key of a row that is handed on untouched.")
    tool_key: str | None = Field(None, description="Key of a row that lists its tools.")
    system_prompt: str | None = Field(None, description="Put before the conversation.")
    apply_chat_template: bool | None = Field(None, description="Wrap in the model's template.")
    n_samples_per_prompt: Positive | None = Field(None, description="Samples of each prompt.")
    rollout_max_response_len: Positive | None = Field(None, description="Most response tokens.")
    rollout_temperature: NotNegative | None = Field(
        None, description="Sampling temperature; 0 (the likeliest token) in evaluations only."
    )
    rollout_top_p: Share | None = Field(None, description="Nucleus sampling.")
    rollout_top_k: int | None = Field(None, description="Sample from the k likeliest; -1: all.")
    rollout_min_p: Fraction | None = Field(None, description="Least share of the likeliest's.")
    rollout_stop: list[str] | None = Field(None, description="Texts that end a response.")
    rm_type: str | None = Field(None, description="A built-in reward by name.")
    custom_rm_path: str | None = Field(None, description="Your reward, `package.module.function`.")


class DataSet(Overrides):
    """One data set of a mixture."""

    name: Name = Field(description="Its name, in metrics and in `samples`.")
    path: str = Field(
        description="`x.jsonl`, `x.parquet`, a folder that `datasets` saved, or"
        " `reasoning_gym:NAME`; `@[a:b]` behind it takes a slice of the rows."
    )
    weight: Annotated[float, Field(gt=0)] = Field(1.0, description="Share in the mixture.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of a procedural data set, `size` and `seed`."
    )


class Reward(Section):
    """One term of a weighted reward."""

    name: Name | None = Field(None, description="Its name in metrics; default: the reward's.")
    weight: float = Field(1.0, description="Factor before the sum.")
    rm_type: str | None = Field(None, description="A built-in reward by name.")
    custom_rm_path: str | None = Field(None, description="Your own, `package.module.function`.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Handed to the reward as `args.reward_options`."
    )


class Overlong(Section):
    """DAPO's soft penalty for long answers (arXiv 2503.14476, eq. 13)."""

    buffer_len: Positive = Field(description="Tokens before the limit where it begins to grow.")
    penalty_factor: NotNegative = Field(1.0, description="Penalty at the limit.")


class Sandbox(Section):
    """Where code that a model wrote runs."""

    timeout_s: Seconds = Field(10.0, description="Wall time of one run.")
    memory_mb: Positive = Field(1024, description="Address space.")
    require: Literal["isolated", "best_effort"] = Field(
        "isolated",
        description="`isolated`: halt where the kernel gives no user namespaces; else go on"
        " with limits alone.",
    )


class Service(Section):
    """A server outside the run that rewards ask."""

    url: str | None = Field(None, description="Its address.")
    url_file: str | None = Field(None, description="A file that holds the address of now.")
    health: str = Field("/health", description="Path that answers 200 while it works.")
    on_down: Literal["defer", "halt"] = Field(
        "halt", description="`defer`: samples stay ungraded, and a score stage grades them later."
    )
    timeout_s: Seconds = Field(60.0, description="Longest wait for one answer.")
    retries: Annotated[int, Field(ge=0)] = Field(3, description="Tries again, ever later.")
    down_after_s: Seconds = Field(
        60.0, description="Time without a healthy answer after which it counts as down."
    )


class Server(Section):
    """A model that the score stage serves by SGLang while it grades."""

    hf_checkpoint: str = Field(description="Hugging Face directory of the reward model or judge.")
    sglang: dict[str, Any] = Field(
        default_factory=dict, description="SGLang's own server arguments, as `is_embedding`."
    )


class Score(Stage):
    """The stage that grades what the rollout did not."""

    enabled: bool = Field(
        False, description="Grade in a stage of its own, also where no service is deferred."
    )
    server: Server | None = Field(None, description="A model to serve meanwhile, as `score`.")
    concurrency: Positive = Field(64, description="Groups that are graded at once.")
    poll_s: Seconds = Field(30.0, description="How often a service that is down is asked again.")


class Pool(Section):
    """Shards of a rollout that ask Slurm for the same, as an array of their own."""

    shards: Positive = Field(description="Shards that run here.")
    slurm: Slurm = Field(
        default_factory=Slurm, description="What they ask for; wins over `rollout.slurm`."
    )
    replicas: Positive | None = Field(None, description="Wins over `rollout.replicas`.")
    sglang: dict[str, Any] = Field(
        default_factory=dict, description="Wins over `rollout.sglang`, argument by argument."
    )


class Rollout(Stage):
    """Prompts, sampling, engine, reward."""

    engine: Literal["sglang", "embedded"] = Field(
        "sglang", description="SGLang servers, or the small in-process engine for CPU machines."
    )
    embedded_threads: Positive = Field(
        1, description="Threads of the embedded engine: results depend on the number."
    )
    shards: Positive = Field(1, description="Parallel pieces, each a Slurm array task.")
    pools: dict[Name, Pool] = Field(
        default_factory=dict,
        description="Shards by what they ask Slurm for: partitions, GPU types, fallbacks, each an"
        " array of its own. `shards` is their sum then.",
    )
    array_throttle: Positive | None = Field(
        None, description="Most shards at once: the `%n` of each Slurm array."
    )
    # -- data
    prompt_data: str | list[DataSet] = Field(
        description="A data set (see `DataSet.path`), or a mixture of several."
    )
    data_options: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of a single procedural data set."
    )
    input_key: str = Field("prompt", description="Key of a line that holds the prompt.")
    label_key: str | None = Field(None, description="Key of a line that the reward compares with.")
    metadata_key: str | None = Field(None, description="Key of a line that is handed on untouched.")
    tool_key: str | None = Field(
        None, description="Key of a line that lists its tools, for the chat template."
    )
    system_prompt: str | None = Field(None, description="Put before the conversation.")
    apply_chat_template: bool = Field(False, description="Wrap the prompt in the model's template.")
    apply_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the chat template."
    )
    rollout_shuffle: bool = Field(True, description="Visit prompts in an order drawn per epoch.")
    rollout_batch_size: Positive = Field(description="Prompts in one iteration.")
    n_samples_per_prompt: Positive = Field(1, description="Samples drawn for each prompt: a group.")
    rollout_max_prompt_len: Positive | None = Field(
        None, description="Prompts of more tokens are left out."
    )
    # -- sampling
    rollout_max_response_len: Positive = Field(1024, description="Most tokens of a response.")
    rollout_max_context_len: Positive | None = Field(
        None, description="Most tokens of prompt and response together; unset: the model's."
    )
    rollout_temperature: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Sampling temperature; log-probs are taken at it too."
    )
    rollout_top_p: Share = Field(1.0, description="Nucleus sampling.")
    rollout_top_k: int = Field(-1, description="Sample from the k likeliest tokens; -1: from all.")
    rollout_min_p: Fraction = Field(
        0.0, description="Sample from tokens of at least this share of the likeliest's probability."
    )
    rollout_stop: list[str] = Field(default_factory=list, description="Texts that end a response.")
    rollout_stop_token_ids: list[int] = Field(
        default_factory=list, description="Tokens that end a response, besides the model's own."
    )
    # -- which groups make the batch
    over_sampling_batch_size: Positive | None = Field(
        None, description="Groups under way at once, to fill a batch from; unset: the batch's."
    )
    dynamic_sampling_filter_path: str | None = Field(
        None, description="`nonzero_std`, or your own `(args, group) -> keep` by dotted path."
    )
    max_groups: Positive | None = Field(
        None,
        description="Groups generated in one iteration, dropped ones included; unset: 16 batches.",
    )
    on_exhausted: Literal["halt", "train"] = Field(
        "halt", description="When `max_groups` did not fill a batch: halt, or train on less."
    )
    admission: Literal["cursor", "arrival"] | None = Field(
        None,
        description="Which finished groups fill the batch: the first of the data (`cursor`) or the"
        " first to arrive; unset: `cursor` if `deterministic`, else `arrival`.",
    )
    close_at: Share = Field(
        1.0, description="Share of the batch at which the rollout ends; the rest carries over."
    )
    close_after_s: Seconds | None = Field(
        None, description="Seconds after which the rollout ends with what is finished."
    )
    partial_rollout: bool = Field(
        False, description="Answers that were cut off go on in the next iteration."
    )
    mask_offpolicy_in_partial_rollout: bool = Field(
        False, description="Tokens of earlier weights are not trained on."
    )
    # -- rewards
    rm_type: str | None = Field(None, description="A built-in reward by name.")
    custom_rm_path: str | None = Field(
        None, description="Your reward, `package.module.function`, from `code`."
    )
    rewards: list[Reward] = Field(
        default_factory=list, description="A weighted sum, instead of rm_type or custom_rm_path."
    )
    reward_key: str | None = Field(
        None, description="Which entry of a reward that is an object is trained on."
    )
    group_rm: bool = Field(False, description="custom_rm_path takes a whole group, returns a list.")
    reward_timeout_s: Seconds = Field(
        600.0,
        description="Longest that a reward, a filter, a tool or a method of an environment may"
        " take.",
    )
    reward_retries: Annotated[int, Field(ge=0)] = Field(
        0, description="Tries again after a reward failed, before `on_reward_error`."
    )
    on_reward_error: Literal["halt", "drop"] = Field(
        "halt",
        description="When a reward, a generate function, an environment or a tool failed: halt"
        " the run, or leave the group out.",
    )
    reward_workers: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Processes for rewards that may hang: `math`, `deepscaler`, `reasoning_gym`,"
        " your own patterns; 0: a quarter of the cores, at most 8.",
    )
    rm_url: str | None = Field(None, description="Address that `remote_rm` posts to.")
    rm_service: str | None = Field(None, description="Entry of `services` that `remote_rm` asks.")
    overlong: Overlong | None = Field(None, description="Penalty for answers near the limit.")
    sandbox: Sandbox = Field(default_factory=Sandbox, description="Where a model's code runs.")
    # -- several turns
    custom_generate_function_path: str | None = Field(
        None, description="Your `async (args, sample, sampling_params)`, by dotted path."
    )
    tools: list[str] = Field(
        default_factory=list, description="`calculator`, `python`, or your own by dotted path."
    )
    environment: str | None = Field(
        None, description="An environment to talk to, by dotted path; see docs/rollout.md."
    )
    generate_timeout_s: Seconds = Field(
        3600.0,
        description="Longest that your generate function may take for one conversation, the"
        " engine's answers not counted.",
    )
    max_turns: Positive = Field(8, description="Answers of the model in one conversation.")
    max_tool_output_len: Positive = Field(2048, description="Characters kept of a tool's answer.")
    # -- engines
    replicas: Positive = Field(1, description="SGLang servers on the shard's node.")
    engine_nodes: Positive = Field(1, description="Nodes over which one SGLang server spans.")
    concurrency: Positive = Field(256, description="Requests in flight to one server.")
    sglang: dict[str, Any] = Field(
        default_factory=dict, description="SGLang's own server arguments."
    )
    sglang_python: str | None = Field(None, description="Interpreter that has SGLang, if another.")
    sglang_env: dict[EnvName, EnvValue] = Field(
        default_factory=dict, description="Environment of the SGLang servers alone."
    )
    request_timeout_s: Seconds = Field(
        3600.0, description="A group that takes longer means that the server hangs."
    )
    server_start_timeout_s: Seconds = Field(
        900.0, description="A server that is not healthy by then is given up."
    )
    probe_tolerance: Annotated[float, Field(gt=0)] = Field(
        0.25, description="Largest mean gap of the probe's log-probs, engine against trainer."
    )
    use_rollout_routing_replay: bool = Field(
        False, description="Mixtures of experts: train through the experts that the engine chose."
    )
    stage_weights: str | None = Field(
        None, description="Node-local folder for copies of the weights, as `/dev/shm`."
    )
    stage_weights_gb: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Most that the copies may take; unset: room for two versions."
    )

    @model_validator(mode="before")
    @classmethod
    def _count_shards(cls, data: Any) -> Any:
        """`shards` follows from `pools` where it is not set. What is malformed is told later."""
        pools = data.get("pools") if isinstance(data, dict) else None
        if not isinstance(pools, dict) or "shards" in data:
            return data
        counts = [pool.get("shards") for pool in pools.values() if isinstance(pool, dict)]
        total = sum(count for count in counts if isinstance(count, int))
        return {**data, "shards": total} if total > 0 else data


class EvalSet(Stage, Overrides):
    """One evaluation: a data set, how often, and what it asks for."""

    prompt_data: str = Field(description="A data set, as in `DataSet.path`.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of a procedural data set."
    )
    interval: Positive | None = Field(
        None, description="Every n-th weights version; unset: the last one only."
    )
    before_training: bool = Field(True, description="Evaluate version 0 too.")
    pass_k: list[Positive] = Field(
        default_factory=list, description="k of pass@k and maj@k; default: powers of 2 up to n."
    )
