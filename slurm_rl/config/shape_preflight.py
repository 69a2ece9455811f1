"""Looks at the shapes of the models that are trained, or run, by Megatron-core: is the family one
that the trainer knows, are the files whole and of that shape, can each role be laid out as asked?

Reads `config.json` and the headers of weights. What a job would find out is found out here, before
it waits in a queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as File

from slurm_rl.config.problems import Path, Problem
from slurm_rl.config.roles import role_megatron
from slurm_rl.config.schema import Settings
from slurm_rl.config.stages import is_megatron_stage, stage_kinds, uses_reference
from slurm_rl.config.train_schema import Critic, Reference, Teacher
from slurm_rl.errors import ModelError
from slurm_rl.models.geometry import Geometry, parse_model_config, read_geometry
from slurm_rl.models.headers import read_headers
from slurm_rl.models.layout import read_layout_sizes
from slurm_rl.models.sizes import REQUIRED
from slurm_rl.models.splits import find_misfits
from slurm_rl.models.tensors import check_tensors

Problems = Iterator[Problem]

#: What Megatron-core does with the model of a role.
_USES = {"train": "trained", "critic": "trained", "reference": "run", "teacher": "run"}


def check_shapes(settings: Settings) -> Problems:
    """What no job could make use of. Models that are not there are for others to find."""
    found: dict[str, Geometry | None] = {}
    for name, (at, folder) in _models(settings).items():
        try:
            found[name] = _read_made(settings) if folder is None else _read(File(folder), name)
        except ModelError as error:
            rule = f"cannot be {_USES[name]}: {error.message}"
            yield Problem(at, rule, error.hint or "mend it, or choose another model")
            found[name] = None
    for kind in _megatron_roles(settings):
        geometry = found[kind if kind in found else "train"]
        if geometry is not None:
            yield from _check_layout(settings, kind, geometry)


def _models(settings: Settings) -> dict[str, tuple[Path, str | None]]:
    """The models that Megatron-core runs -> where the settings name them, and their folders."""
    made: Path = ("init_model", "config")
    is_made = settings.init_model is not None
    found = {"train": (made if is_made else ("hf_checkpoint",), settings.hf_checkpoint)}
    sections: dict[str, Critic | Reference | Teacher | None] = {
        "critic": settings.critic,
        "reference": settings.reference,
    }
    if is_megatron_stage(settings, "teacher"):
        sections["teacher"] = settings.teacher
    for name, section in sections.items():
        if section is not None and section.hf_checkpoint is not None:
            found[name] = ((name, "hf_checkpoint"), section.hf_checkpoint)
    return found


def _megatron_roles(settings: Settings) -> list[str]:
    kinds = [kind for kind in stage_kinds(settings) if is_megatron_stage(settings, kind)]
    if "reference" not in kinds and uses_reference(settings):
        kinds.append("reference")
    return kinds


def _read_made(settings: Settings) -> Geometry | None:
    """The shape of a model that is made; None where it leaves sizes to transformers' classes.

    Raises ModelError.
    """
    config = {} if settings.init_model is None else settings.init_model.sized_config
    if any(name not in config for name in ("model_type", *REQUIRED)):
        return None
    return parse_model_config(config, where="its model")


def _read(folder: File, name: str) -> Geometry | None:
    """The shape of the model in `folder`; None if there is none. Raises ModelError."""
    if not (folder / "config.json").is_file():
        return None
    geometry, headers = read_geometry(folder), read_headers(folder)
    if name != "critic":  # whose head may be there or not
        check_tensors(geometry, folder=folder, shapes=headers.shapes)
    return geometry


def _check_layout(settings: Settings, kind: str, geometry: Geometry) -> Problems:
    options = role_megatron(settings, kind)
    own = settings.reference.megatron if kind == "reference" else options
    for misfit in find_misfits(
        geometry,
        read_layout_sizes(options),
        sequence_parallel=bool(options.get("sequence_parallel")),
    ):
        holder = kind if misfit.key in own else "train"
        yield Problem((holder, "megatron", misfit.key), misfit.rule, misfit.fix, misfit.value)
