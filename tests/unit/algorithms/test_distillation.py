"""Distance to a teacher: by hand, against the whole vocabulary, and gradients."""

import math
from itertools import pairwise

import pytest
import torch

from slurm_rl.algorithms.aggregation import weighted_sum
from slurm_rl.algorithms.distillation import TAIL_FLOOR, distillation_advantages, topk_kl

DIRECTIONS = ["forward", "reverse"]


def test_sampled_token_by_hand():
    # The student likes the first token more than the teacher does, the second less.
    student = torch.tensor([0.5, 0.1]).log().requires_grad_()
    found = distillation_advantages(
        student, teacher_logprobs_N=torch.tensor([0.25, 0.2]).log(), coef=2.0
    )
    assert found.tolist() == pytest.approx([-2 * math.log(2), 2 * math.log(2)], rel=1e-5)
    assert not found.requires_grad


def test_its_policy_gradient_is_that_of_the_reverse_kl():
    logits = torch.tensor([0.5, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    student = logits.log_softmax(0)
    advantages = distillation_advantages(student, teacher_logprobs_N=teacher, coef=0.7)
    # In expectation over the tokens that the student samples.
    loss = -(student.detach().exp() * advantages * student).sum()
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    exact = 0.7 * (student.exp() * (student - teacher)).sum()
    (expected,) = torch.autograd.grad(exact, logits)
    assert torch.allclose(found, expected)


def test_topk_by_hand():
    # Two of many tokens: teacher 0.5, 0.3, rest 0.2; student 0.4, 0.1, rest 0.5.
    teacher, student = torch.tensor([[0.5, 0.3]]).log(), torch.tensor([[0.4, 0.1]]).log()
    forward = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.1) + 0.2 * math.log(0.2 / 0.5)
    reverse = 0.4 * math.log(0.4 / 0.5) + 0.1 * math.log(0.1 / 0.3) + 0.5 * math.log(0.5 / 0.2)
    for direction, expected in (("forward", forward), ("reverse", reverse)):
        found = topk_kl(student, teacher_logprobs_NK=teacher, direction=direction)
        assert found.tolist() == pytest.approx([expected], rel=1e-5)


def vocabularies(seed, size=12):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, 5, size, generator=generator, dtype=torch.float64) * 2
    return student.log_softmax(-1), teacher.log_softmax(-1)


def full_kl(student, teacher, direction):
    p, q = (teacher, student) if direction == "forward" else (student, teacher)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_a_bucket_never_adds_and_all_tokens_leave_none(direction, seed):
    student, teacher = vocabularies(seed)
    exact = full_kl(student, teacher, direction)
    found = []
    for k in range(1, student.shape[1] + 1):
        ids = teacher.topk(k).indices
        found.append(
            topk_kl(
                student.gather(1, ids),
                teacher_logprobs_NK=teacher.gather(1, ids),
                direction=direction,
            )
        )
    # More tokens know more of it, none knows more than there is, and all know all of it.
    for fewer, more in pairwise(found):
        assert (more >= fewer - 1e-9).all()
    assert (found[-1] <= exact + 1e-5).all()
    assert torch.allclose(found[-1], exact, atol=2 * TAIL_FLOOR * 20)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equal_policies_are_at_distance_zero(direction):
    student, _ = vocabularies(0)
    top = student.topk(3).values.float()
    assert (topk_kl(top, teacher_logprobs_NK=top, direction=direction) == 0).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients_are_those_of_finite_differences(direction):
    student, teacher = vocabularies(1)
    ids = teacher.topk(4).indices
    top = teacher.gather(1, ids)

    def loss(values):
        return topk_kl(values.gather(1, ids), teacher_logprobs_NK=top, direction=direction)

    assert torch.autograd.gradcheck(loss, (student.detach().requires_grad_(),))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_sure_student_and_a_sure_teacher_stay_finite(direction):
    # In float32 both sums are 1, and nothing is left for the rest.
    sure = torch.tensor([[0.0, -40.0]], requires_grad=True)
    unsure = torch.tensor([[-0.7, -0.7]], requires_grad=True)
    for student, teacher in ((sure, unsure), (unsure, sure), (sure, sure)):
        found = topk_kl(student, teacher_logprobs_NK=teacher, direction=direction)
        (gradient,) = torch.autograd.grad(found.sum(), student)
        assert torch.isfinite(found).all() and torch.isfinite(gradient).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_has_no_probability_weighs_nothing(direction):
    some, none = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.5, 0.0]]).log()
    student, teacher = (some, none) if direction == "forward" else (none, some)
    found = topk_kl(student, teacher_logprobs_NK=teacher, direction=direction)
    # 0.5 log(0.5 / 0.5) + 0 + 0.5 log(0.5 / 0.25)
    assert found.tolist() == pytest.approx([0.5 * math.log(2)], rel=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["student", "teacher"])
def test_a_token_without_weight_counts_nothing_whatever_it_holds(direction, bad, place):
    student, teacher = (x[:2, :3].float().clone() for x in vocabularies(2))
    (student if place == "student" else teacher)[1, 2] = bad
    student.requires_grad_()
    found = topk_kl(student, teacher_logprobs_NK=teacher, direction=direction)
    weighted_sum(found, weights_N=torch.tensor([1.0, 0.0])).backward()
    assert student.grad[1].tolist() == [0.0] * 3
    assert torch.isfinite(student.grad[0]).all() and student.grad[0].abs().sum() > 0


def test_float64_stays():
    student, teacher = vocabularies(0)
    assert topk_kl(student, teacher_logprobs_NK=teacher, direction="forward").dtype == torch.float64
