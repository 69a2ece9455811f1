"""What every part of the configuration is made of: the strict section, and a stage's own job.

`slurm:` holds sbatch's own names. `schema.py` has the whole.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
EnvValue = Annotated[str, Field(pattern=r"^[^\x00]*$")] | int | float
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the configuration: unknown keys are refused, values never coerced silently."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_null(cls, data: Any) -> Any:
        """Null is no entries, where a setting is entries by name (`eval: null`)."""
        if not isinstance(data, dict):
            return data
        empty: dict[str, Any] = {
            name: {}
            for name, field in cls.model_fields.items()
            if field.default_factory is dict and name in data and data[name] is None
        }
        return {**data, **empty}


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
