"""What is shipped to be copied: the code in docs/rollout.md, and configs/tools.yaml."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_rl.config.load import load_settings
from slurm_rl.rollout.data import Visit
from slurm_rl.rollout.data.rows import Prompt
from slurm_rl.rollout.embedded import EmbeddedEngine
from slurm_rl.rollout.engine import Request, Sampling, Weights
from slurm_rl.rollout.groups import PlannedGroup
from slurm_rl.rollout.turns import make_generate

ROOT = Path(__file__).parents[4]
CONFIG = ROOT / "configs" / "tools.yaml"


def doc_block(word: str) -> str:
    text = (ROOT / "docs" / "rollout.md").read_text()
    (found,) = [
        block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in block
    ]
    return str(found)


def test_the_documented_environment_and_function_run(
    turn_settings, scripted, make_group, served, chat, code
) -> None:  # type: ignore[no-untyped-def]
    said = ["5", "7", "done"]
    ways = {
        "environment": f"{code(doc_block('class Guess'))}.Guess",
        "custom_generate_function_path": f"{code(doc_block('async def generate'))}.generate",
    }
    found = {}
    for way, path in ways.items():
        engine = scripted(lambda session, turn, request: said[turn])
        settings = turn_settings(**{way: path})
        generate = make_generate(settings, engine=engine, tokenizer=chat, weights=served)
        (found[way],) = asyncio.run(generate(make_group("guess", num=1, label="7")))
    assert (found["environment"].reward, found["environment"].response) == (1.0, "7")
    last = found["custom_generate_function_path"]
    assert last.status == "completed"
    assert chat.decode(last.response_tokens).count("user\ngo on") == 2


def test_the_documented_tool_has_a_schema(turn_settings, code) -> None:  # type: ignore[no-untyped-def]
    from slurm_rl.rollout.turns import tool_schemas

    (schema,) = tool_schemas(turn_settings(tools=[f"{code(doc_block('def search'))}.search"]))
    assert schema["function"]["parameters"]["required"] == ["query"]


@pytest.fixture
def boxes_code() -> Any:
    """As the stage's entry does with the snapshot of `code`."""
    sys.path.insert(0, str(ROOT / "configs" / "code"))
    yield
    sys.path.remove(str(ROOT / "configs" / "code"))


def test_the_shipped_run_asks_its_tool(tmp_path: Path, boxes_code: None) -> None:
    """Its model, its data, its code, and the embedded engine: one rollout of a few rows."""
    from transformers import AutoTokenizer

    from slurm_rl.rollout.user_imports import import_function
    from slurm_rl.stages.init import make_model

    settings = load_settings(CONFIG)
    rollout = settings.rollout
    assert settings.init_model is not None
    make_model(settings.init_model, tmp_path, seed=3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    score = import_function(rollout.custom_rm_path, field="x")  # type: ignore[arg-type]
    engine, weights = EmbeddedEngine(tokenizer), Weights(tmp_path, 0, "d", "v0")
    engine.start(weights)
    generate = make_generate(settings, engine=engine, tokenizer=tokenizer, weights=weights)
    assert generate is not None
    lines = (ROOT / "configs" / "data" / "boxes.jsonl").read_text().splitlines()
    rewards = set()
    try:
        for index, line in enumerate(lines[:6]):
            row = json.loads(line)
            ids = tuple(tokenizer.encode(row["prompt"], add_special_tokens=False))
            prompt = Prompt(index, row["prompt"], row["label"], row["metadata"])
            request = Request(index, ids, tuple(range(1000 * index, 1000 * index + 16)))
            sampling = Sampling(rollout.rollout_max_response_len)
            group = PlannedGroup(Visit(index, prompt, ids), request, sampling, "key")
            for sample in asyncio.run(generate(group)):
                box = row["metadata"]["boxes"].get(sample.metadata["opened"], "?")
                assert sample.loss_mask == (1, 0, 0, 0, 1)
                assert tokenizer.decode(sample.response_tokens[1:4]) == f">{box}="
                assert sample.status == "completed"
                rewards.add(score(None, sample))
    finally:
        engine.stop()
    assert {0.0, 0.5} <= rewards <= {0.0, 0.5, 1.0}
