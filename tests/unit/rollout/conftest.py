"""A tiny Qwen3 with random weights and a character tokenizer, made once per session."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from toy.orders import weights_input
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from slurm_rl.config.schema import Settings
from slurm_rl.types import Input, Order, Result

os.environ.setdefault("HF_HUB_OFFLINE", "1")

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789=+ "


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {c: i for i, c in enumerate([*CHARACTERS, "<pad>", "<eos>"])}
    backend = Tokenizer(models.WordLevel(vocab))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def make_model(path: Path, *, seed: int) -> Path:
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def make_settings(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Settings of a small run; keyword arguments replace fields of `rollout`."""

    def make(**rollout: object) -> Settings:
        defaults = {
            "engine": "embedded",
            "prompt_data": str(tmp_path / "prompts.jsonl"),
            "label_key": "label",
            "rollout_batch_size": 3,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 6,
            "rm_type": "prefix_match",
        }
        return Settings.model_validate(
            {
                "run": {"name": "t", "dir": str(tmp_path)},
                "hf_checkpoint": "unused",
                "num_rollout": 2,
                "deterministic": True,
                "launcher": "local",
                "rollout": {k: v for k, v in (defaults | rollout).items() if v is not None},
                "train": {"global_batch_size": 12},
            }
        )

    return make


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [json.dumps({"prompt": f"{c}{d}=", "label": f"{d}{c}"}) for c in "abc" for d in "de"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def make_order(tmp_path: Path, tiny_model: Path):  # type: ignore[no-untyped-def]
    """An order in an attempt directory of its own; `previous` is the result before."""
    source = weights_input(tiny_model, tmp_path / "init")
    count = iter(range(1000))

    def make(
        *, previous: Result | None = None, weights: Input = source, **changes: object
    ) -> Order:
        number, num_shards = next(count), changes.get("num_shards", 1)
        stage = tmp_path / (f"alone-{number}" if num_shards == 1 else "stage")
        slot = stage if num_shards == 1 else stage / f"shard-{changes['shard']:04d}"
        attempt = slot / f"a{number:04d}-0"
        attempt.mkdir(parents=True)
        inputs = {"weights": weights}
        if previous is not None:
            inputs["previous"] = Input(
                "previous", 0, "rollout", "xxh3:p", "", content=previous.content
            )
        values = {"iteration": 0, "run_dir": str(tmp_path), "run_id": "run", "kind": "rollout", "timeline": 0,
                  "attempt_dir": str(attempt), "settings_path": "", "code_dir": "", "inputs": inputs}  # fmt: skip
        return Order(**(values | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def code(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Writes a module of the user's and puts it on the path, as the stage's entry does; its name."""
    written: list[str] = []

    def write(text: str) -> str:
        name = f"mycode_{tmp_path.name}_{len(written)}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)
        return name

    sys.path.insert(0, str(tmp_path))
    yield write
    sys.path.remove(str(tmp_path))
    for name in written:
        sys.modules.pop(name, None)
