"""Cases in both layouts: responses laid end to end (ours), and padded to a rectangle (theirs)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """Some responses: lengths and groups of samples [B], masks and numbers of tokens [R].

    Every token has the numbers that any function here may ask for, masked ones too.
    """

    lengths_B: torch.Tensor
    group_B: torch.Tensor
    rewards_B: torch.Tensor
    mask_R: torch.Tensor
    policy_R: torch.Tensor
    proximal_R: torch.Tensor
    other_R: torch.Tensor
    advantages_R: torch.Tensor
    values_R: torch.Tensor

    def pad(self, flat_R: torch.Tensor) -> torch.Tensor:
        """[R] to [B, T], 0 where there is no token. Gradients flow back."""
        parts = flat_R.split(self.lengths_B.tolist())
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

    def flat(self, padded_BT: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [row[:n] for row, n in zip(padded_BT, self.lengths_B.tolist(), strict=True)]
        )

    @property
    def mask_BT(self) -> torch.Tensor:
        return self.pad(self.mask_R).to(torch.float32)

    @property
    def trained(self) -> torch.Tensor:
        return self.mask_R != 0

    @property
    def owner_R(self) -> torch.Tensor:
        return torch.repeat_interleave(torch.arange(len(self.lengths_B)), self.lengths_B)


def _case(seed, lengths, groups, *, rewards=None, masked=0.3, spread=0.4):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    draw = partial(torch.randn, total, generator=generator, dtype=torch.float32)
    mask = (torch.rand(total, generator=generator) >= masked).to(torch.uint8)
    proximal = -draw().abs() - 0.1
    return Case(
        lengths_B=torch.tensor(lengths),
        group_B=torch.tensor(groups),
        rewards_B=torch.randn(len(lengths), generator=generator)
        if rewards is None
        else torch.tensor(rewards),
        mask_R=mask,
        proximal_R=proximal,
        policy_R=proximal + spread * draw(),
        other_R=proximal + spread * draw(),
        advantages_R=draw(),
        values_R=draw(),
    )


#: No group of one: the oracles hand its reward through. Where they can stand it, a sample of which
#: every token is masked, and one without any token.
CASES = {
    **{f"random{seed}": _case(seed, [5, 1, 7, 3, 9, 2], [0, 1, 0, 2, 1, 2]) for seed in range(6)},
    "long": _case(11, [300, 17, 111, 64], [4, 4, 4, 4]),
    "one token each": _case(12, [1, 1, 1, 1], [0, 0, 1, 1], masked=0.0),
    "equal rewards": _case(13, [4, 6, 3], [0, 0, 0], rewards=[0.1, 0.1, 0.1]),
    "no mask": _case(14, [4, 6], [0, 0], masked=0.0),
    "mostly masked": _case(15, [4, 0, 6, 5], [0, 0, 1, 1], masked=0.8),
    "huge ratios": _case(16, [4, 6, 3, 2], [0, 0, 1, 1], spread=1e4),
}
#: Without the one whose ratios are out of anything's range.
MODERATE = {name: case for name, case in CASES.items() if name != "huge ratios"}
