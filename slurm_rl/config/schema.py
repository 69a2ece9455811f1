"""The configuration as types: names, defaults and the rules that one field can check alone.

Data, sampling and algorithm names follow slime; `megatron:` and `sglang:` hold those programs'
own names; `slurm:` holds sbatch's own. One owner per value: what derives from others is a
property. Reading files and reporting errors is in `load.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from slurm_rl.config.rollout_schema import EvalSet, Name, Rollout, Score, Service
from slurm_rl.config.sections import (
    Container,
    EnvName,
    EnvValue,
    Positive,
    Seconds,
    Section,
    Slurm,
    Stage,
)
from slurm_rl.config.train_schema import Critic, Reference, Teacher, Train

#: Kinds of stages that evaluate: `eval-<name>`, one for each entry of `eval`.
EVAL_PREFIX = "eval-"
#: Begins the kind of the jobs of a pool of the rollout's shards: `rollout-spot`.
POOL_PREFIX = "rollout-"


class Run(Section):
    """Where the run lives and what squeue calls it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")] = Field(
        description="Name of the run; the first part of every job's name."
    )
    dir: str = Field(description="Directory that will hold `<name>/`, on the shared file system.")
    group: str | None = Field(
        None, description="Unix group that may read the run and take it over (`slurm-rl adopt`)."
    )


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


#: Behind the characters of such a model's tokenizer: pad, eos and bos.
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>")


class InitModel(Section):
    """A model with random weights, made by the init stage: for demos and tests."""

    config: dict[str, Any] = Field(
        description="A Hugging Face model config, `model_type` included."
    )
    characters: str = Field(
        description="The tokenizer's alphabet: one token a character, then pad, eos and bos."
    )

    @property
    def num_tokens(self) -> int:
        """Of the tokenizer: the characters and the special ones."""
        return len(self.characters) + len(SPECIAL_TOKENS)

    @property
    def sized_config(self) -> dict[str, Any]:
        """The config with its vocabulary, which is the tokenizer's unless it says another."""
        return {"vocab_size": self.num_tokens} | self.config


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
    code: list[str] = Field(
        default_factory=list,
        description="Folders of your code; snapshotted. Each is itself a package: with"
        " `[code/boxes]`, `boxes.task.score` is in `code/boxes/task.py`.",
    )
    launcher: Literal["slurm", "local"] = Field(
        "slurm", description="Slurm jobs or local processes."
    )
    chain: Chain = Field(default_factory=Chain, description="How jobs follow each other.")
    retention: Retention = Field(default_factory=Retention, description="What is kept.")
    versions: Literal["same", "any"] = Field(
        "same", description="`same`: a stage refuses other library versions than those before it."
    )
    rollout: Rollout = Field(description="Prompts, sampling, engine, reward.")
    train: Train = Field(description="The update of the policy.")
    critic: Critic | None = Field(None, description="The value model of `gae`, its own role.")
    reference: Reference = Field(
        default_factory=Reference, description="What KL is measured against, if it is."
    )
    teacher: Teacher | None = Field(None, description="On-policy distillation.")
    score: Score = Field(
        default_factory=Score, description="Grading in a stage of its own, after the rollout."
    )
    eval: dict[Name, EvalSet] = Field(
        default_factory=dict,
        description="Evaluations by name; they never hold up the chain, save with"
        " `launcher: local`, where one machine does all in turn.",
    )
    services: dict[Name, Service] = Field(
        default_factory=dict, description="Servers outside the run that rewards ask, by name."
    )
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
        """The job settings of a stage kind (`init`, `rollout`, `eval-aime`, `tick`, …)."""
        if kind.startswith(EVAL_PREFIX):
            return self.eval[kind.removeprefix(EVAL_PREFIX)]
        section: Stage | None = getattr(self, kind)
        if section is None:
            raise KeyError(f"{kind} is not configured")
        return section
