"""The configuration as types: names, defaults and the rules that one field can check alone.

Data, sampling and algorithm names follow slime; `megatron:` and `sglang:` hold those programs'
own names; `slurm:` holds sbatch's own. One owner per value: what derives from others is a
property. Reading files and reporting errors is in `load.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
EnvValue = Annotated[str, Field(pattern=r"^[^\x00]*$")] | int | float
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values never coerced silently."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Run(Section):
    """Where the run lives and what squeue calls it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")] = Field(
        description="Name of the run; the first part of every job's name."
    )
    dir: str = Field(description="Directory that will hold `<name>/`, on the shared file system.")
    group: str | None = Field(
        None, description="Unix group that may read the run and take it over (`slurm-rl adopt`)."
    )


class Fallback(Section):
    """Where a stage goes that waits too long for its own place; once."""

    after: str = Field(description="Wait in the queue, as a wall time: `02:00:00`.")
    partition: str | None = Field(None, description="Partition to go to.")
    qos: str | None = Field(None, description="Quality of service to go to.")


class Slurm(Section):
    """sbatch options under their own names (underscores for hyphens); unset ones are omitted."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    partition: str | None = Field(None, description="Partition, or several with commas.")
    account: str | None = Field(None, description="Account that is charged.")
    qos: str | None = Field(None, description="Quality of service.")
    nodes: Positive | None = Field(None, description="Nodes of the job.")
    ntasks_per_node: Positive | None = Field(None, description="Tasks on each node.")
    cpus_per_task: Positive | None = Field(None, description="CPU cores of each task.")
    gpus_per_node: int | str | None = Field(None, description="GPUs on each node: `8`, `a100:4`.")
    mem: str | None = Field(None, description="Memory of each node, as `64G`.")
    time: str | None = Field(
        None,
        description="Wall time as sbatch takes it: `04:00:00`, `1-12`; `auto`: learnt from the run",
    )
    time_max: str | None = Field(
        None, description="Most that `time: auto` may ask for: the partition's limit."
    )
    time_min: str | None = Field(None, description="Shortest wall time that is still of use.")
    constraint: str | None = Field(None, description="Node features that are asked for.")
    reservation: str | None = Field(None, description="Reservation to run in.")
    exclude: str | None = Field(None, description="Nodes to stay away from.")
    comment: str | None = Field(None, description="Yours: sites put policy in it.")
    signal_s: Positive | None = Field(
        None,
        description="Seconds before the time limit at which the job is told to stop; if unset,"
        " 120, or what the run's own stages were measured to need.",
    )
    fallback: Fallback | None = Field(None, description="Where to go after waiting too long.")


class Container(Section):
    """What the stage's program runs in. The supervisor stays on the host."""

    runtime: Literal["none", "apptainer", "pyxis"] = Field("none", description="How it is started.")
    image: str | None = Field(None, description="Image: a path, or a name that the runtime knows.")
    bind: list[str] = Field(default_factory=list, description="Mounts, as `src:dst` or `src`.")
    writable: bool = Field(False, description="Let the program write in the image's file system.")
    python: str = Field("python3", description="The interpreter inside the image.")
    args: list[str] = Field(default_factory=list, description="Passed through verbatim.")


class Budget(Section):
    """What a run may use before it halts."""

    gpu_hours: Annotated[float, Field(gt=0)] | None = Field(
        None, description="GPUs × hours of all attempts, failed ones included."
    )
    until: str | None = Field(
        None, description="Time after which nothing new starts: `2030-01-31T18:00`."
    )


class Chain(Section):
    """How jobs follow each other."""

    lag: Literal[0, 1] = Field(
        0, description="Rollout i uses the weights of version max(0, i − lag); 1 overlaps both."
    )

    pack: Literal["stage", "iteration"] = Field(
        "stage", description="What one Slurm job runs: one stage, or an iteration's stages in turn."
    )
    window: Positive = Field(
        3, description="Links kept in the queue ahead, the running one included."
    )
    max_attempts: Positive = Field(
        5, description="Attempts of a stage that may end without a commit before the run halts."
    )
    lease_s: Seconds = Field(
        60.0, description="Silence of a heartbeat after which a claim is free."
    )
    heartbeat_s: Seconds = Field(5.0, description="Interval of a claim's heartbeat.")
    submit_deadline_s: Seconds = Field(
        90.0, description="Age from which an intent that the queue does not show is over."
    )
    tick_s: Seconds = Field(600.0, description="Interval of the advancer jobs.")
    retry_delay_s: Annotated[float, Field(ge=0)] = Field(
        15.0, description="Wait before a failed stage is submitted again; doubles each time."
    )
    max_stops: Positive = Field(
        100, description="Preemptions of one stage, without a commit, before the run halts."
    )
    exclude_s: Annotated[float, Field(ge=0)] = Field(
        3600.0, description="How long a stage stays away from nodes on which it failed; 0: never."
    )
    budget: Budget = Field(default_factory=Budget, description="What the run may use.")


class Stage(Section):
    """What every stage may set for its own jobs."""

    slurm: Slurm = Field(
        default_factory=Slurm,
        description="What this stage asks for; wins over the top-level `slurm`.",
    )
    container: Container | None = Field(
        None, description="Replaces the top-level `container` as a whole."
    )
    python: str | None = Field(None, description="The stage's own interpreter (no container).")
    env: dict[EnvName, EnvValue] = Field(
        default_factory=dict, description="Environment; wins over the top-level `env`."
    )
    deadline_s: Seconds = Field(
        43200.0, description="A stage that runs longer is stopped and tried again."
    )


class InitModel(Section):
    """A model with random weights, made by the init stage: for demos and tests."""

    config: dict[str, Any] = Field(
        description="A Hugging Face model config, `model_type` included."
    )
    characters: str = Field(
        description="The tokenizer's alphabet: one token a character, then pad, eos and bos."
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
    prompt_data: str = Field(description="A jsonl file of prompts.")
    input_key: str = Field("prompt", description="Key of a line that holds the prompt.")
    label_key: str | None = Field(None, description="Key of a line that the reward compares with.")
    metadata_key: str | None = Field(None, description="Key of a line that is handed on untouched.")
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
    rollout_max_response_len: Positive = Field(1024, description="Most tokens of a response.")
    rollout_temperature: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Sampling temperature; log-probs are taken at it too."
    )
    rollout_top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling.")
    rollout_top_k: int = Field(-1, description="Sample from the k likeliest tokens; -1: from all.")
    rollout_stop: list[str] = Field(default_factory=list, description="Texts that end a response.")
    rollout_stop_token_ids: list[int] = Field(
        default_factory=list, description="Tokens that end a response, besides the model's own."
    )
    rm_type: str | None = Field(None, description="A built-in reward by name.")
    custom_rm_path: str | None = Field(
        None, description="Your reward, `package.module.function`, from `code`."
    )
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


class Train(Stage):
    """The update."""

    advantage_estimator: Literal["grpo"] = Field(
        "grpo", description="How rewards become advantages."
    )
    normalize_advantages_std: bool = Field(True, description="GRPO's division by the group's std.")
    eps_clip: Fraction = Field(0.2, description="Clip of the probability ratio.")
    eps_clip_high: Fraction | None = Field(None, description="Upper clip; `eps_clip` if unset.")
    use_kl_loss: bool = Field(
        False, description="Add a KL term towards the initial model to the loss."
    )
    kl_loss_coef: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight of the KL term.")
    kl_loss_type: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator of the KL term.")
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus.")
    global_batch_size: Positive = Field(description="Samples in one optimizer step.")
    micro_batch_size: Positive = Field(8, description="Samples in one forward pass.")
    num_ranks: Positive | None = Field(
        None, description="Processes of the train job; default: nodes × gpus_per_node, or 1."
    )
    lr_decay_iters: Positive | None = Field(
        None, description="Horizon of the LR schedule in optimizer steps, fixed when a run is made."
    )
    lr_warmup_iters: Annotated[int, Field(ge=0)] = Field(
        0, description="Optimizer steps over which the learning rate rises."
    )
    megatron: dict[str, Any] = Field(
        default_factory=dict,
        description="Megatron-core's own names: layout, optimizer (lr, …), model, DDP.",
    )
    save_steps: Positive | None = Field(
        None,
        description="Optimizer steps between saves inside a train stage; unset: a stage that is"
        " killed starts again from its inputs.",
    )
    check_first_ratio: Annotated[float, Field(gt=0)] = Field(
        1e-4, description="Largest |ratio - 1| accepted before the first optimizer step."
    )


class Retention(Section):
    """Which checkpoints and samples are kept; `slurm-rl gc` and the ticks delete the others."""

    keep_last: Annotated[int, Field(ge=2)] | None = Field(
        None, description="Newest iterations whose checkpoints stay; unset: nothing is deleted."
    )
    keep_every: Positive | None = Field(
        None, description="Of older ones, every n-th iteration's checkpoint stays too."
    )
    keep_samples: bool = Field(True, description="Keep the samples of iterations that are pruned.")
    gc_grace_s: Seconds = Field(
        3600.0,
        description="From the mark to the deletion; earlier readers are waited for.",
    )
    archive: str | None = Field(
        None,
        description="Directory on another file system; pruned files are copied there first.",
    )


class Settings(Section):
    """A whole run."""

    run: Run = Field(description="Name and place.")
    hf_checkpoint: str | None = Field(
        None, description="Hugging Face model directory to start from."
    )
    init_model: InitModel | None = Field(
        None, description="Make a small random model instead of loading one."
    )
    num_rollout: Annotated[int, Field(gt=0, le=1_000_000)] = Field(
        description="Iterations of the run."
    )
    seed: int = Field(1234, description="Every random choice derives from it.")
    deterministic: bool = Field(
        False, description="Same bytes however often the run is killed; slower."
    )
    code: list[str] = Field(default_factory=list, description="Folders of your code; snapshotted.")
    launcher: Literal["slurm", "local"] = Field(
        "slurm", description="Slurm jobs or local processes."
    )
    chain: Chain = Field(default_factory=Chain, description="How jobs follow each other.")
    retention: Retention = Field(default_factory=Retention, description="What is kept.")
    versions: Literal["same", "any"] = Field(
        "same", description="`same`: a stage refuses other library versions than those before it."
    )
    rollout: Rollout = Field(description="Prompts, sampling, engine, reward.")
    train: Train = Field(description="The update.")
    # What a site file usually holds; a config may set any of it too.
    slurm: Slurm = Field(default_factory=Slurm, description="Defaults of every stage's `slurm`.")
    tick: Stage = Field(default_factory=Stage, description="Shape of the advancer jobs.")
    init: Stage = Field(default_factory=Stage, description="Shape of the init stage's job.")
    submit_from: Literal["anywhere", "login"] = Field(
        "anywhere", description="`login`: compute nodes may not submit, so no advancer jobs."
    )
    gpu_request: Literal["gpus_per_node", "gres"] = Field(
        "gpus_per_node", description="`gres`: ask by `--gres=gpu:…` where a site wants that."
    )
    host_python: str | None = Field(None, description="Interpreter of the supervisor on the nodes.")
    setup: list[str] = Field(default_factory=list, description="Shell lines before Python starts.")
    container: Container = Field(default_factory=Container, description="For every stage.")
    env: dict[EnvName, EnvValue] = Field(
        default_factory=dict, description="Environment of every stage; not for secrets."
    )
    env_file: str | None = Field(None, description="KEY=VALUE lines of secrets; mode 0600.")
    network_interface: str | None = Field(None, description="Interface the ranks meet on.")
    hostname_suffix: str = Field(
        "", description="Added to a node's name to reach its fast network."
    )
    purge_days: Positive | None = Field(
        None, description="Days after which the site deletes files that nobody read."
    )
    max_submit_jobs: Positive | None = Field(None, description="Jobs that the site lets you queue.")
    max_array_tasks: Positive = Field(1000, description="Tasks that the site lets an array have.")
    sbatch_template: str | None = Field(None, description="Your own copy of `sbatch/job.sh`.")

    @property
    def run_dir(self) -> Path:
        """The run directory: `<run.dir>/<run.name>`."""
        return Path(self.run.dir) / self.run.name

    def stage(self, kind: str) -> Stage:
        """The job settings of a stage kind (`init`, `rollout`, `train`, `tick`)."""
        section: Stage = getattr(self, kind)
        return section
