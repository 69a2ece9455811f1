"""The Triton kernels on a GPU against PyTorch's operations in float64, and for the same bits again."""

import itertools

import pytest
import torch
from parity.plain_layers import rotate, swiglu


def relative(found, wanted):
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_logprobs_and_entropy(dtype, limit):
    from slurm_rl.train import fused_vocab
    from slurm_rl.train.vocab_parallel import fused

    torch.manual_seed(0)
    num, width, columns, temperature = 300, 151_936, 152_064, 0.8
    logits = (torch.randn(num, columns, device="cuda") * 4).to(dtype)
    targets = torch.randint(0, width, (num,), device="cuda")
    weights = torch.randn(2, num, device="cuda", dtype=torch.float64)
    results = []
    for _ in range(2):
        mine = logits.clone().requires_grad_()
        options = {"temperature": temperature, "width": width, "kernels": fused_vocab}
        found = fused(mine, targets, **options)
        (found[0] * weights[0] + found[1] * weights[1]).sum().backward()
        results.append((*(t.detach() for t in found), mine.grad))
    exact = logits[:, :width].double().requires_grad_()
    every = (exact / temperature).log_softmax(-1)
    logprobs = every.gather(1, targets[:, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    (logprobs * weights[0] + entropy * weights[1]).sum().backward()
    assert relative(results[0][0], logprobs.detach()) < 2e-6
    assert relative(results[0][1], entropy.detach()) < 2e-6
    assert relative(results[0][2][:, :width], exact.grad) < limit
    assert (results[0][2][:, width:] == 0).all()
    assert all(map(torch.equal, *results))


def rotated(x, freqs, positions, is_interleaved):
    angles = freqs[:, 0, 0].double()[positions.long()][:, None]
    return rotate(x, angles, is_interleaved)


def cases():
    from slurm_rl.train import fused_layers as kernels

    x, weight = torch.randn(5000, 16, 128), torch.randn(128)
    norm = torch.nn.functional.rms_norm
    yield (
        "norm of heads",
        (x, weight),
        lambda x, w: kernels.RMSNormFunction.apply(x, w, 1e-6),
        lambda x, w: norm(x, (128,), w, 1e-6),
    )
    yield (
        "norm",
        (torch.randn(700, 3, 1536), torch.randn(1536)),
        lambda x, w: kernels.RMSNormFunction.apply(x, w, 1e-6),
        lambda x, w: norm(x, (1536,), w, 1e-6),
    )
    yield "swiglu", (torch.randn(333, 2, 6144),), kernels.SwiGLUFunction.apply, swiglu
    positions = torch.randint(0, 40_000, (900,), dtype=torch.int32, device="cuda")
    for interleaved, size in itertools.product((False, True), (128, 64)):
        angles = torch.outer(torch.arange(40_000.0), 1e6 ** -(torch.arange(0, size, 2) / size))
        twice = torch.stack((angles, angles), -1).flatten(-2)
        freqs = twice if interleaved else torch.cat((angles, angles), -1)
        freqs = freqs[:, None, None].cuda()
        yield (
            f"rotary {interleaved} {size}",
            (torch.randn(900, 8, 128),),
            lambda x, f=freqs, i=interleaved: kernels.RotaryFunction.apply(x, f, positions, i),
            lambda x, f=freqs, i=interleaved: rotated(x, f, positions, i),
        )


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 5e-6), (torch.bfloat16, 1e-2)])
def test_layers(dtype, limit):
    torch.manual_seed(0)
    for name, inputs, ours, theirs in cases():
        given = [t.cuda().to(dtype) for t in inputs]
        results = []
        for function, kind in ((ours, dtype), (ours, dtype), (theirs, torch.float64)):
            own = [t.to(kind).requires_grad_() for t in given]
            own = [t.detach().clone().requires_grad_() for t in own]
            out = function(*own)
            above = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).cuda()
            out.backward(above.to(dtype).to(kind))
            results.append([out.detach(), *(t.grad for t in own)])
        for mine, again, exact in zip(*results, strict=True):
            assert relative(mine, exact) < limit, name
            assert torch.equal(mine, again), name


@pytest.mark.parametrize("heads", [(16, 8), (4, 4), (8, 2)])
@pytest.mark.parametrize("width", [64, 96, 128])
def test_attention_of_packed_sequences(heads, width):
    """PyTorch's variable-length kernel, as this machine has it, against one sequence at a time."""
    from slurm_rl.train import cpu

    with cpu.megatron_imports():
        from slurm_rl.train.attention import attend_spans, attend_varlen, causal_spans
        from slurm_rl.train.varlen import find_kernel

    torch.manual_seed(0)
    lengths = (5, 1, 700, 64)
    spans = causal_spans(lengths, cp_rank=0, cp_size=1)
    options = {"spans": spans, "scale": width**-0.5}
    given = [
        torch.randn(sum(lengths), n, width).bfloat16().cuda() for n in (heads[0], *heads[1:] * 2)
    ]
    above = torch.randn(sum(lengths), heads[0] * width).bfloat16().cuda()
    kernel = find_kernel()
    assert kernel is not None

    def packed(q, k, v):
        return attend_varlen(q, k, v, kernel=kernel, **options)

    def one_by_one(q, k, v):
        return attend_spans(*(t[:, None] for t in (q, k, v)), **options)[:, 0]

    results = []
    for function, dtype in ((packed, torch.bfloat16), (one_by_one, torch.float32)):
        own = [t.to(dtype).clone().requires_grad_() for t in given]
        out = function(*own)
        out.backward(above.to(dtype))
        results.append([out.detach(), *(t.grad for t in own)])
    for mine, exact in zip(*results, strict=True):
        assert relative(mine, exact.double()) < 2e-2
