"""Stand-in for `sglang-kernel`, which is published as a CUDA build only.

On a CPU without AMX, SGLang computes with plain PyTorch but still imports some kernels by
name. Every name resolves to a function that fails, saying so, if it is ever called.
"""

__version__ = "0.4.5"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a stand-in: there is no kernel on a CPU")

    missing.__name__ = name
    return missing
