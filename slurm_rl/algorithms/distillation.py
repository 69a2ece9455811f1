"""Distance from a student to a teacher, on tokens that the student sampled.

Both policies' log-probabilities are at the rollout's temperature and over one vocabulary.
Legend: N trained tokens laid end to end, K the teacher's most likely tokens at each.
"""

from __future__ import annotations

from typing import Literal

import torch

from slurm_rl.algorithms.numerics import as_float, gradient_where_finite

#: What is not among the K tokens has at least this probability, in both policies: in float32 the
#: rest of a sum near 1 is noise, and its logarithm would make a large number of it.
TAIL_FLOOR = 1e-6


def distillation_advantages(
    student_logprobs_N: torch.Tensor, *, teacher_logprobs_N: torch.Tensor, coef: float
) -> torch.Tensor:
    """-coef × (student - teacher log-probability) of each sampled token, float[N], detached.

    Added to any estimator's advantages (which are not whitened again), it makes the policy
    gradient that of coef × KL(student || teacher), token by token: the k1 estimate as a reward.
    The student is the proximal policy. No denominator.

    Source: on-policy distillation, Agarwal et al. (arXiv 2306.13649) with reverse KL; in this
    form Lu et al., "On-policy distillation" (Thinking Machines, 2025).
    """
    student_N = as_float(student_logprobs_N.detach())
    return -coef * (student_N - as_float(teacher_logprobs_N.detach()))


def topk_kl(
    student_logprobs_NK: torch.Tensor,
    *,
    teacher_logprobs_NK: torch.Tensor,
    direction: Literal["forward", "reverse"],
) -> torch.Tensor:
    """KL of two distributions over the K tokens and one bucket for all others, float[N].

    forward, KL(teacher || student): sum_k t_k log(t_k / s_k) + t_rest log(t_rest / s_rest)
    reverse, KL(student || teacher): the same with s and t exchanged
    where t_rest = 1 - sum_k t_k, at least 1e-6 (TAIL_FLOOR), and s_rest likewise.

    Never more than the KL over the whole vocabulary, and equal to it where the others are
    distributed alike. Both [N, K], at the same token ids; the gradient flows through the
    student's. A token id that one gives no probability (-inf) adds 0 where it is weighed by it.
    No denominator. Source: Agarwal et al. (arXiv 2306.13649), with the rest in one bucket.
    """
    teacher_NK = as_float(teacher_logprobs_NK.detach())
    student_NK = as_float(student_logprobs_NK)
    # Not a number if any of a row is none; -inf counts 0.
    whole_N1 = (student_NK.detach().exp() + teacher_NK.exp()).sum(dim=-1, keepdim=True)
    divisors = (teacher_NK,) if direction == "reverse" else ()
    student_NK = gradient_where_finite(student_NK, whole_N1, *divisors)
    teacher_NL, student_NL = _with_rest(teacher_NK), _with_rest(student_NK)
    if direction == "forward":
        p_NL, q_NL = teacher_NL, student_NL
    else:
        p_NL, q_NL = student_NL, teacher_NL
    # Not p × (log p - log q) where p is 0: 0 × inf.
    terms_NL = torch.where(p_NL == -torch.inf, 0.0, p_NL.exp() * (p_NL - q_NL))
    return terms_NL.sum(dim=-1)


def _with_rest(logprobs_NK: torch.Tensor) -> torch.Tensor:
    """[N, K + 1]: the log-probability of all other tokens behind those given."""
    total_N = torch.clamp(torch.exp(logprobs_NK).sum(dim=-1), max=1.0 - TAIL_FLOOR)
    return torch.cat([logprobs_NK, torch.log1p(-total_N)[:, None]], dim=-1)
