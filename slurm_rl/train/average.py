"""A moving average of two models' weights, from Hugging Face files to Hugging Face files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from slurm_rl.train.export import read_companions
from slurm_rl.train.weights import WeightsReader, read_layout, write_weights


def average_weights(old: Path, new: Path, folder: Path, *, decay: float) -> None:
    """decay × old + (1 − decay) × new of each tensor, computed and stored in float32.

    In bfloat16 an average that moves by little would not move at all. Files and names are those of
    `old`; so is what lies beside the weights. `folder` is made here. One tensor of each is in
    memory at a time. A crash leaves files that nothing names.
    """
    source = read_layout(old)
    layout = replace(source, dtypes=dict.fromkeys(source.dtypes, torch.float32))
    folder.mkdir()
    with WeightsReader(old, source) as left, WeightsReader(new, read_layout(new)) as right:

        def mixed() -> Iterator[tuple[str, torch.Tensor]]:
            for name in sorted(layout.dtypes):
                a, b = (reader.read(name, None, 0, 0).float() for reader in (left, right))
                yield name, torch.lerp(b, a, decay)

        for _ in write_weights(folder, mixed(), layout=layout):
            pass
    for name, data in read_companions(old).items():
        (folder / name).write_bytes(data)
