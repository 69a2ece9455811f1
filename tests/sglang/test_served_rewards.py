"""Rewards of models that a real SGLang serves, against transformers on the same files."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from toy.sglang_cpu import CPU_ARGUMENTS, CPU_ENVIRONMENT
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from slurm_rl.config.schema import Settings
from slurm_rl.rollout.rewards import Grader
from slurm_rl.rollout.samples import Sample
from slurm_rl.stages.score import serving_model
from slurm_rl.types import Order

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(400)]

CHARACTERS = "0123456789 abcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    "{% for message in messages %}{{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
ANSWERS = ["yes it is", "no", "a long answer of more than a few words", "7"]
CONFIG = LlamaConfig(
    vocab_size=len(CHARACTERS) + 2,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
    num_labels=2,
    pad_token_id=0,
    eos_token_id=1,
    dtype="float32",
)


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def grade(
    folder: Path, sglang_python: str, root: Path, *, reward: str, options: dict[str, Any]
) -> list[float]:
    """The rewards of ANSWERS, as the score stage finds them."""
    settings = Settings.model_validate(
        {
            "run": {"name": "scored", "dir": str(root)},
            "num_rollout": 1,
            "hf_checkpoint": str(folder),
            "rollout": {
                "prompt_data": "none",
                "sglang_python": sglang_python,
                "sglang_env": CPU_ENVIRONMENT,
                "server_start_timeout_s": 280,
                "rollout_batch_size": 4,
                "rewards": [{"rm_type": reward, "options": options}],
            },
            "score": {
                "server": {
                    "hf_checkpoint": str(folder),
                    "sglang": CPU_ARGUMENTS | {"is_embedding": reward == "served_rm"},
                }
            },
            "train": {"global_batch_size": 4},
        }
    )
    order = Order(
        run_dir=str(root),
        run_id="run",
        kind="score",
        iteration=0,
        timeline=0,
        attempt_dir=str(root),
        settings_path="",
        code_dir="",
        inputs={},
    )
    samples = [
        Sample(0, i, (1,), (2,), (0.0,), (1,), prompt="is it so", response=answer)
        for i, answer in enumerate(ANSWERS)
    ]

    async def ask(url: str | None) -> list[float]:
        async with Grader(settings, score_url=url) as grader:
            graded = await grader.grade(samples)
        return [float(sample.reward or 0.0) for sample in graded.samples]

    with serving_model(order, settings) as url:
        return asyncio.run(ask(url))


def test_a_reward_model_gives_what_transformers_computes(
    tmp_path: Path, sglang_python: str
) -> None:
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(CONFIG).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer = save_tokenizer(tmp_path / "model")
    found = grade(
        tmp_path / "model",
        sglang_python,
        tmp_path,
        reward="served_rm",
        options={"index": 1},
    )
    wanted = []
    for answer in ANSWERS:
        messages = [
            {"role": "user", "content": "is it so"},
            {"role": "assistant", "content": answer},
        ]
        tokens = tokenizer.apply_chat_template(messages, return_dict=False)
        with torch.no_grad():
            wanted.append(model(torch.tensor([tokens])).logits[0, 1].item())
    assert len({round(value, 3) for value in wanted}) == len(wanted), "they tell answers apart"
    assert found == pytest.approx(wanted, abs=1e-4)


def test_a_judge_is_read(tmp_path: Path, sglang_python: str) -> None:
    torch.manual_seed(2)
    model = LlamaForCausalLM(CONFIG).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer = save_tokenizer(tmp_path / "model")
    pattern = r"(\d)"
    options = {
        "template": "{prompt} {response}",
        "pattern": pattern,
        "scale": 10,
        "max_tokens": 16,
        "unreadable": -1,
    }
    found = grade(tmp_path / "model", sglang_python, tmp_path, reward="judge", options=options)
    wanted = []
    for answer in ANSWERS:
        messages = [{"role": "user", "content": f"is it so {answer}"}]
        tokens = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        said = model.generate(tokens, do_sample=False, max_new_tokens=16, eos_token_id=1)
        digits = re.findall(pattern, tokenizer.decode(said[0, tokens.shape[1] :]))
        wanted.append(int(digits[-1]) / 10 if digits else -1.0)
    assert len(set(wanted)) > 1, "they tell answers apart"
    assert found == wanted
