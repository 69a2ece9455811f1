"""The kernels of the GPU, run by Triton's interpreter on a CPU, against PyTorch's operations.

float32 throughout: what agrees is what they compute. How they round in bfloat16, and that the
compiled ones give the same bits each time, tests/gpu says.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity.plain_layers import rotate, swiglu

from slurm_rl.train import fused_layers, fused_vocab
from slurm_rl.train.vocab_parallel import fused, logprobs_and_entropy

few = settings(max_examples=15, deadline=None)


def compare(ours, theirs, inputs, *, atol):
    """Values and gradients of two functions that should be one."""
    results = []
    for function in (ours, theirs):
        own = [t.clone().requires_grad_() for t in inputs]
        out = function(*own)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
        results.append([out.detach(), *(t.grad for t in own)])
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, atol=atol, rtol=1e-5)


@few
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    size=st.sampled_from([1, 8, 40, 128, 130]),
    programs=st.sampled_from([1, 2, 512]),
    seed=st.integers(0, 99),
)
def test_norm(rows, size, programs, seed):
    torch.manual_seed(seed)
    most, fused_layers._MOST_PROGRAMS = fused_layers._MOST_PROGRAMS, programs
    try:
        compare(
            lambda x, w: fused_layers.RMSNormFunction.apply(x, w, 1e-6),
            lambda x, w: torch.nn.functional.rms_norm(x, (size,), w, 1e-6),
            (torch.randn(*rows, size) * 3, torch.randn(size)),
            atol=2e-5,
        )
    finally:
        fused_layers._MOST_PROGRAMS = most


def test_a_norm_over_more_rows_than_its_programs_hold_at_a_time():
    few_rows = fused_layers._tile(128)["ROWS"]
    most, fused_layers._MOST_PROGRAMS = fused_layers._MOST_PROGRAMS, 2
    try:
        compare(
            lambda x, w: fused_layers.RMSNormFunction.apply(x, w, 1e-6),
            lambda x, w: torch.nn.functional.rms_norm(x, (128,), w, 1e-6),
            (torch.randn(5 * few_rows + 3, 128), torch.randn(128)),
            atol=5e-5,
        )
    finally:
        fused_layers._MOST_PROGRAMS = most


@few
@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=2),
    width=st.sampled_from([1, 7, 64, 1024, 1500]),
    seed=st.integers(0, 99),
)
def test_swiglu(rows, width, seed):
    torch.manual_seed(seed)
    x = torch.randn(*rows, 2 * width) * 4
    compare(fused_layers.SwiGLUFunction.apply, swiglu, (x,), atol=2e-5)


@few
@given(
    num=st.integers(0, 9),
    heads=st.integers(1, 5),
    sizes=st.sampled_from([(8, 8), (16, 4), (24, 12)]),
    is_interleaved=st.booleans(),
    gap=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_rotary(num, heads, sizes, is_interleaved, gap, seed):
    """gap: the rows are cut from wider ones, as queries are from what one product gave."""
    torch.manual_seed(seed)
    width, size = sizes
    angles = torch.outer(torch.arange(50.0), 10_000.0 ** -(torch.arange(0, size, 2) / size))
    twice = torch.stack((angles, angles), -1).flatten(-2)
    freqs = (twice if is_interleaved else torch.cat((angles, angles), -1))[:, None, None]
    positions = torch.randint(0, 50, (num,), dtype=torch.int32)

    def plain(x):
        own = freqs[:, 0, 0][positions.long()][:, None]
        return rotate(x[..., :width], own, is_interleaved)

    def ours(x):
        cut = x[..., :width]
        return fused_layers.RotaryFunction.apply(cut, freqs, positions, is_interleaved)

    compare(ours, plain, (torch.randn(num, heads, width + gap),), atol=1e-5)


@few
@given(
    num=st.integers(0, 5),
    shape=st.sampled_from([(3, 3), (11, 16), (4096, 4096), (4097, 5000), (9000, 9000)]),
    temperature=st.sampled_from([1.0, 0.7, 1.3]),
    scale=st.sampled_from([0.0, 1.0, 60.0]),
    which=st.sampled_from([(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)]),
    seed=st.integers(0, 99),
)
def test_logprobs_and_entropy(num, shape, temperature, scale, which, seed):
    """Against the way that a CPU goes; huge logits and equal ones too."""
    torch.manual_seed(seed)
    width, columns = shape
    logits = torch.randn(num, columns) * scale
    targets = torch.randint(0, width, (num,))
    weights = torch.randn(2, num) * torch.tensor(which)[:, None]

    def total(found):
        return torch.stack([part * w for part, w in zip(found, weights, strict=True)])

    def ours(x):
        options = {"temperature": temperature, "width": width, "kernels": fused_vocab}
        return total(fused(x, targets, **options))

    def theirs(x):
        options = {"targets_N": targets, "temperature": temperature, "vocab_size": width}
        return total(logprobs_and_entropy(x, **options))

    compare(ours, theirs, (logits,), atol=3e-5)


@pytest.mark.parametrize("wrong", [0.0, 1e-3])
def test_the_comparison_can_fail(wrong):
    def off(x):
        return swiglu(x) + wrong

    inputs = (torch.randn(3, 16),)
    if wrong:
        with pytest.raises(AssertionError):
            compare(fused_layers.SwiGLUFunction.apply, off, inputs, atol=2e-5)
    else:
        compare(fused_layers.SwiGLUFunction.apply, off, inputs, atol=2e-5)
