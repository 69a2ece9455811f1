"""A SGLang plugin that makes per-request `sampling_seed` and `return_routed_experts` work on a CPU.

SGLang honours the seed only under `--enable-deterministic-inference`, which it allows for
GPU attention backends and computes with Triton kernels. This registers `torch_native` as an
allowed backend and gives the one hash that sampling needs in plain PyTorch. The matrix
products stay the CPU's own: log-probs may still differ in the last bits with the batch.
The experts that tokens were sent to it keeps in pinned memory, which there is only with an
accelerator; here that is ordinary memory.
SGLang loads it in each of its processes through the `sglang.srt.plugins` entry point.
"""

import sys

_MASK = 0xFFFFFFFF


def murmur_hash32(seed, positions, col_indices):
    """MurmurHash3 (32 bits) of (seed, position, column): int64[B, N] for B seeds, N columns.

    The same numbers as the Triton kernel of this name in sglang.kernels.
    """
    import torch

    seed = seed.to(torch.int64)[:, None]
    state = torch.zeros_like(seed)
    for word in (seed, seed >> 32, positions.to(torch.int64)[:, None], col_indices[None, :]):
        state = _mix(state, word.to(torch.int64) & _MASK)
    state = state ^ 16  # bytes hashed
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)


def _mix(state, word):
    word = (_rotate_left((word * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK
    return (_rotate_left(state ^ word, 13) * 5 + 0xE6546B64) & _MASK


def _rotate_left(value, bits):
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def register():
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        return
    from sglang.kernels.ops.sampling import murmur_hash
    from sglang.srt import batch_invariant_ops, server_args

    if "torch_native" not in server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        server_args.add_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None
    murmur_hash.murmur_hash32 = murmur_hash32
    sampler = sys.modules.get("sglang.srt.layers.sampler")
    if sampler is not None:
        sampler.murmur_hash32 = murmur_hash32
    _keep_experts_in_ordinary_memory()


def _keep_experts_in_ordinary_memory():
    import torch
    from sglang.srt.state_capturer import base

    class HostCache(base.BaseHostCache):
        def __init__(self, num_tokens, num_layers, topk_size, name):
            self.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
            self.num_tokens = num_tokens
            self.num_layers = num_layers
            self.topk_size = topk_size
            self.name = name

    base.BaseHostCache = HostCache
