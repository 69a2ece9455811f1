"""The parts of a model's shape that only some families have: experts, latent attention, YaRN.

Plain records; `families_table.py` fills them from a `config.json`, `geometry.py` puts them together
and says what Megatron calls each field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MoeGeometry:
    """A mixture of experts, in every layer but the `dense_layers` (numbers from 0).

    scoring: what makes probabilities of the router's logits. norm_topk_prob: those of the chosen
    experts are made to sum to one. num_groups, group_top_k: experts are chosen from the best
    groups only; None where there are no groups. expert_bias: a buffer is added to the scores for
    the choice, and for nothing else. shared_ffn_size: width of the experts that every token
    visits, all together; None without.
    """

    num_experts: int
    top_k: int
    expert_ffn_size: int
    shared_ffn_size: int | None = None
    shared_gate: bool = False
    norm_topk_prob: bool = True
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    scaling_factor: float | None = None
    expert_bias: bool = False
    num_groups: int | None = None
    group_top_k: int | None = None
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MlaGeometry:
    """Multi-head latent attention (DeepSeek). q_lora_rank: None if queries are not compressed."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class YarnGeometry:
    """YaRN's scaling of rotary frequencies (arXiv 2309.00071), as DeepSeek uses it."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
