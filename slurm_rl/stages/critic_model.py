"""The model that a critic starts from: a language model with a value head in place of its logits.

Owns the one place where a head is drawn. On disk it is what transformers calls
`<X>ForTokenClassification` with one label: `score.weight` [1, hidden] and `score.bias` [1]. The
tensors of the model are taken over by links. A source that has a head keeps it: a critic of an
earlier run, or a reward model (`<X>ForSequenceClassification`, whose head has no bias).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slurm_rl.errors import ModelError
from slurm_rl.models.geometry import Geometry, parse_model_config, read_model_config
from slurm_rl.models.headers import INDEX, read_headers
from slurm_rl.models.tensors import check_tensors

if TYPE_CHECKING:
    import torch

    from slurm_rl.train.weights import WeightsLayout

_CONFIG = "config.json"
_HEAD = ("score.weight", "score.bias")
_LOGITS = "lm_head.weight"
#: What a class of transformers says after its family's name.
_CLASS = re.compile(r"For(CausalLM|SequenceClassification|TokenClassification)$")
#: Suffixes of what is taken along from a model's directory besides its weights.
COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")


@dataclass(frozen=True, slots=True)
class CriticHead:
    """Where a critic's head is from. `seed` and `std` are those of one that was drawn.

    Example: CriticHead("created", seed=7, std=0.015384615384615385).
    """

    made: Literal["created", "loaded"]
    seed: int | None = None
    std: float | None = None

    def as_content(self) -> dict[str, Any]:
        """What a commit says of it."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


def make_critic(source: Path, folder: Path, *, seed: int) -> CriticHead:
    """Write the critic that starts from the model in `source` into `folder`, which is empty.

    A head is drawn if `source` has none: normal, with standard deviation 1 / (hidden + 1), so that
    values begin near 0; the bias is 0. The bytes depend on the source and the seed alone. Raises
    ModelError if the source is no such model, or if its head has another shape (both are named).
    A crash midway leaves files that nothing names.
    """
    from slurm_rl.train.weights import read_layout

    config, layout = _critic_config(source), read_layout(source)
    _check_head(source, layout, config.get("hidden_size"))
    geometry = parse_model_config(config, where=str(source / _CONFIG))
    tensors, head = _head_tensors(source, layout, geometry, seed=seed)
    _write_tensors(source, folder, layout, tensors)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / _CONFIG).write_text(text)
    _link_companions(source, folder)
    check_tensors(geometry, folder=folder, shapes=read_headers(folder).shapes)
    return head


def _critic_config(source: Path) -> dict[str, Any]:
    path, config = source / _CONFIG, read_model_config(source)
    name = next(iter(config.get("architectures") or []), "")
    if name and not _CLASS.search(name):
        raise ModelError(
            f"{path}: a critic cannot start from a {name}",
            hint="a …ForCausalLM, …ForSequenceClassification or …ForTokenClassification can be one",
        )
    if not name.endswith("Classification"):
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        config.pop("num_labels", None)
    family = _CLASS.sub("", name) or _class_of(str(config.get("model_type")))
    return config | {
        "architectures": [f"{family}ForTokenClassification"],
        # There are no logits to share the embedding with.
        "tie_word_embeddings": False,
    }


def _class_of(model_type: str) -> str:
    """`qwen3_moe` -> `Qwen3Moe`, as transformers names the classes of our families."""
    return "".join(part.capitalize() for part in model_type.split("_"))


def _check_head(source: Path, layout: WeightsLayout, hidden_size: Any) -> None:
    """ModelError unless the head that the source may have is a critic's."""
    for name, shape in zip(_HEAD, ((1, hidden_size), (1,)), strict=True):
        if layout.shapes.get(name, shape) != shape:
            raise ModelError(
                f"{source}: {name}, the value head, has shape {list(layout.shapes[name])}, but a "
                f"critic's is {list(shape)}",
                hint="start the critic from a model without a head, or with one of that shape",
            )


def _head_tensors(
    source: Path, layout: WeightsLayout, geometry: Geometry, *, seed: int
) -> tuple[dict[str, torch.Tensor], CriticHead]:
    """The tensors of the head that the source's files lack, and where the head is from."""
    import numpy as np
    import torch

    dtype = getattr(torch, geometry.dtype)
    weight, bias = _HEAD
    if weight not in layout.shapes:
        std = 1.0 / (geometry.hidden_size + 1)
        # numpy's, which gives the same numbers on every machine.
        drawn = np.random.default_rng(seed).standard_normal((1, geometry.hidden_size)) * std
        head = CriticHead("created", seed=seed, std=std)
        return {weight: torch.from_numpy(drawn).to(dtype), bias: torch.zeros(1, dtype=dtype)}, head
    missing = {} if bias in layout.shapes else {bias: torch.zeros(1, dtype=layout.dtypes[weight])}
    return missing, CriticHead("loaded")


def _write_tensors(
    source: Path, folder: Path, layout: WeightsLayout, head: dict[str, torch.Tensor]
) -> None:
    """The source's files by links, without its logits, and what is new in a file of its own.

    They get names of one series: beside a `model.safetensors` nobody would look for a second file.
    """
    from safetensors.torch import save_file

    from slurm_rl.train.weights import WeightsReader

    kept = {
        name: [tensor for tensor in members if tensor != _LOGITS]
        for name, members in layout.files.items()
    }
    sources = [name for name, members in kept.items() if members]
    total = len(sources) + bool(head)
    names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    home: dict[str, str] = {}
    with WeightsReader(source, layout) as reader:
        for name, own in zip(names, sources, strict=False):
            if len(kept[own]) == len(layout.files[own]):
                _link(source / own, folder / name)
            else:
                tensors = {tensor: reader.read(tensor, None, 0, 0) for tensor in kept[own]}
                save_file(tensors, folder / name, metadata=layout.headers[own] or None)
            home |= dict.fromkeys(kept[own], name)
    if head:
        save_file(head, folder / names[-1], metadata={"format": "pt"})
        home |= dict.fromkeys(head, names[-1])
    sizes = [tensor.nbytes for tensor in head.values()]
    sizes += [
        math.prod(layout.shapes[tensor]) * layout.dtypes[tensor].itemsize
        for members in kept.values()
        for tensor in members
    ]
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": home}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _link_companions(source: Path, folder: Path) -> None:
    for path in sorted(source.iterdir()):
        wanted = path.suffix in COMPANION_SUFFIXES and path.name not in (_CONFIG, INDEX)
        if path.is_file() and wanted:
            _link(path, folder / path.name)


def _link(path: Path, target: Path) -> None:
    """A link to where the file really is; a relative one among folders of one attempt, so that a
    run that is moved stays whole."""
    real, folder = path.resolve(), target.parent.resolve()
    target.symlink_to(os.path.relpath(real, folder) if folder.parent in real.parents else real)
