"""A tiny Qwen3 with random weights and a character tokenizer, made once per session."""

import os
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from slurm_rl.config.schema import Settings

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
