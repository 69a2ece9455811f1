"""A tokenizer in which one text has many token forms, a scripted engine, and groups to run."""

from __future__ import annotations

import asyncio
import string
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from slurm_rl.config.schema import Settings
from slurm_rl.rollout.data import Visit
from slurm_rl.rollout.data.rows import Prompt
from slurm_rl.rollout.engine import Completion, Request, Sampling, Weights
from slurm_rl.rollout.groups import PlannedGroup

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LABEL = "run/v3/xxh3:1"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, and merges: `ab` and `12` are one token each, or two."""
    merges = [("a", "b"), ("1", "2"), ("t", "h"), ("th", "e"), ("o", "o"), ("e", "r")]
    characters = sorted({*string.printable, "…", "é"})
    vocabulary = {piece: i for i, piece in enumerate([*characters, *("".join(m) for m in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|end|>"])
    backend.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


class ScriptedEngine:
    """Answers by a script: `say(session, turn, request)` gives a text, tokens, or a finish too.

    A text ends with the end token. Log-probs are -(n + 1) / 1024 for the engine's n-th token of a
    session, so that each can be told from all others.
    """

    concurrency = 64

    def __init__(self, tokenizer: Any, say: Callable[..., Any], *, delay: Any = None) -> None:
        self.asked: list[tuple[Request, Sampling]] = []
        self.said: dict[str, list[Completion]] = defaultdict(list)
        self.label = LABEL
        self._tokenizer, self._say, self._delay = tokenizer, say, delay
        self._cut = asyncio.Event()

    async def generate(self, request: Request, sampling: Sampling) -> list[Completion]:
        self.asked.append((request, sampling))
        turn = len(self.said[request.session])
        if self._delay is not None:
            await self._delay(request, turn)
        if self._cut.is_set():
            return [Completion((7,), (-0.5,), "abort", self.label)]  # what there was
        said = self._say(request.session, turn, request)
        said = await said if asyncio.iscoroutine(said) else said
        finish = "stop"
        if isinstance(said, tuple) and len(said) == 2 and isinstance(said[1], str):
            said, finish = said
        if isinstance(said, str):
            said = self._tokenizer.encode(said, add_special_tokens=False)
            if finish == "stop":
                said = [*said, self._tokenizer.eos_token_id]
        tokens = tuple(said)
        if len(tokens) > sampling.max_new_tokens:
            tokens, finish = tokens[: sampling.max_new_tokens], "length"
        start = sum(len(c.tokens) for c in self.said[request.session])
        logprobs = tuple(-(start + i + 1) / 1024 for i in range(len(tokens)))
        completion = Completion(tokens, logprobs, finish, self.label)  # type: ignore[arg-type]
        self.said[request.session].append(completion)
        return [completion]

    async def abort(self) -> None:
        self._cut.set()


@pytest.fixture(scope="session")
def chat() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def chat_maker() -> Callable[[], PreTrainedTokenizerFast]:
    return make_tokenizer


@pytest.fixture(scope="session")
def scripted(chat: Any) -> Callable[..., ScriptedEngine]:
    def make(say: Callable[..., Any], **options: Any) -> ScriptedEngine:
        return ScriptedEngine(options.pop("tokenizer", chat), say, **options)

    return make


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("served"), 3, "xxh3:1", LABEL)


@pytest.fixture(scope="session")
def make_group(chat: Any) -> Callable[..., PlannedGroup]:
    def make(
        prompt: Any = "hi",
        *,
        num: int = 2,
        index: int = 5,
        limit: int = 400,
        tokens: Any = None,
        tokenizer: Any = None,
        **fields: Any,
    ) -> PlannedGroup:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = (tokenizer or chat).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids = tuple(tokens or (tokenizer or chat).encode(text, add_special_tokens=False))
        row = Prompt(0, prompt, fields.pop("label", "7"), fields.pop("metadata", {}), **fields)
        visit = Visit(index, row, ids)
        request = Request(index, ids, tuple(range(100, 100 + num)))
        return PlannedGroup(visit, request, Sampling(limit, temperature=0.9), "key")

    return make


@pytest.fixture(scope="session")
def turn_maker(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Settings]:
    folder = tmp_path_factory.mktemp("turns")

    def make(**rollout: Any) -> Settings:
        rollout = {
            "engine": "embedded",
            "prompt_data": "p.jsonl",
            "rollout_batch_size": 3,
            "n_samples_per_prompt": 4,
            "rm_type": "gsm8k",
            "apply_chat_template": True,
        } | rollout
        values = {
            "run": {"name": "t", "dir": str(folder)},
            "hf_checkpoint": "unused",
            "num_rollout": 2,
            "launcher": "local",
            "rollout": rollout,
            "train": {"global_batch_size": 12},
        }
        return Settings.model_validate(values)

    return make


@pytest.fixture
def turn_settings(make_settings: Callable[..., Settings]) -> Callable[..., Settings]:
    def make(**rollout: Any) -> Settings:
        return make_settings(**{"apply_chat_template": True, "max_turns": 4} | rollout)

    return make
