"""Looks at the model that the settings name: is it there, and can it do what is asked of it?

Reads `config.json` and the tokenizer's settings, no weights. For a model that is made, the settings
say the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path as File
from typing import Any

from slurm_rl.config.data_checks import data_uses
from slurm_rl.config.problems import Path, Problem
from slurm_rl.config.routing_checks import check_dense_layers, check_experts
from slurm_rl.config.schema import InitModel, Settings

Problems = Iterator[Problem]

_DOWNLOAD = "download the model there, or mend the path"
_TOKENIZERS = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"}
#: Files beside `tokenizer_config.json` that bring a chat template.
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
#: Weights as the trainer reads them.
_WEIGHTS = ".safetensors"
#: SGLang, which serves reward models, reads these too.
_OLD_WEIGHTS = ".bin"


def check_model(settings: Settings) -> Problems:
    """What is missing of the models, and limits that are beyond the trained one."""
    server = settings.score.server
    if server is not None:
        yield from _check_served(File(server.hf_checkpoint))
    yield from _check_others(settings)
    if settings.init_model is not None:
        config = settings.init_model.sized_config
        yield from _check_made(settings.init_model)
    elif settings.hf_checkpoint is not None:
        folder = File(settings.hf_checkpoint)
        missing = list(_check_trained(folder))
        yield from missing
        if missing:
            return
        config = read_json(folder / "config.json")
        yield from _check_template(settings, folder)
    else:
        return
    try:
        yield from (*check_experts(settings, config), *check_dense_layers(settings, config))
    except (TypeError, ValueError) as error:
        at: Path = ("hf_checkpoint",) if settings.init_model is None else ("init_model", "config")
        yield Problem(at, f"has a size that is no number ({error})", "mend it")
    yield from _check_context(settings, config.get("max_position_embeddings"))
    yield from _check_stop_tokens(settings, config.get("vocab_size"))


def _check_others(settings: Settings) -> Problems:
    """The models beside the policy: those that critic, reference and teacher name."""
    sections = {
        "critic": settings.critic,
        "reference": settings.reference,
        "teacher": settings.teacher,
    }
    for name, section in sections.items():
        if section is not None and section.hf_checkpoint is not None:
            folder, at = File(section.hf_checkpoint), (name, "hf_checkpoint")
            yield from _check_folder(folder, at, weights=(_WEIGHTS,))


def _check_trained(folder: File) -> Problems:
    at: Path = ("hf_checkpoint",)
    yield from _check_folder(folder, at, weights=(_WEIGHTS,))
    if folder.is_dir() and not _TOKENIZERS & set(os.listdir(folder)):
        yield Problem(at, "has no tokenizer", _DOWNLOAD, str(folder))


def _check_served(folder: File) -> Problems:
    """SGLang's arguments may name a tokenizer elsewhere, or none."""
    at: Path = ("score", "server", "hf_checkpoint")
    yield from _check_folder(folder, at, weights=(_WEIGHTS, _OLD_WEIGHTS))


def _check_folder(folder: File, path: Path, *, weights: tuple[str, ...]) -> Problems:
    if not folder.is_dir():
        yield Problem(path, "is not a directory", _DOWNLOAD, str(folder))
        return
    names = os.listdir(folder)
    if "config.json" not in names:
        yield Problem(path, "has no config.json", _DOWNLOAD, str(folder))
    if not any(name.endswith(weights) for name in names):
        rule = f"has no {' or '.join(f'*{suffix}' for suffix in weights)}"
        yield Problem(path, rule, _DOWNLOAD, str(folder))


def _check_made(model: InitModel) -> Problems:
    at: Path = ("init_model", "characters")
    if not model.characters:
        yield Problem(at, "is empty", "list the tokenizer's characters", "")
    for index, character in enumerate(model.characters):
        if character in model.characters[:index]:
            rule = f"has {character!r} twice"
            yield Problem(at, rule, "take one out", model.characters)
            break
    if "model_type" not in model.config:
        yield Problem(("init_model", "config", "model_type"), "is missing", "add it, as llama")
    size, least = model.config.get("vocab_size"), model.num_tokens
    if isinstance(size, int) and size < least:
        rule = f"is less than the tokenizer's {least} (characters and three special tokens)"
        yield Problem(("init_model", "config", "vocab_size"), rule, "leave it out", size)


def _check_template(settings: Settings, folder: File) -> Problems:
    """A template that is asked for must be there, where the tokenizer's files say that."""
    config = read_json(folder / "tokenizer_config.json")
    has_own = "chat_template" in settings.rollout.apply_chat_template_kwargs
    if not config or config.get("chat_template") or has_own:
        return
    if any((folder / name).exists() for name in (*_TEMPLATES, "tekken.json")):
        return
    for use in data_uses(settings):
        if use.has_template(settings.rollout):
            at = ("rollout",) if use.own.apply_chat_template is None else use.own_at or ()
            rule = f"needs a chat template, and the tokenizer in {folder} has none"
            fix = "set it to false, or give one as apply_chat_template_kwargs.chat_template"
            yield Problem((*at, "apply_chat_template"), rule, fix, True)


def _check_context(settings: Settings, positions: Any) -> Problems:
    """Limits beyond the model's positions, which could never be met.

    A long `rollout_max_response_len` is none: answers end where the context does.
    """
    if not isinstance(positions, int) or isinstance(positions, bool):
        return
    rollout = settings.rollout
    takes = f"the model's max_position_embeddings = {positions}"
    context, prompt = rollout.rollout_max_context_len, rollout.rollout_max_prompt_len
    if context is not None and context > positions:
        rule = f"is more than {takes}"
        yield Problem(("rollout", "rollout_max_context_len"), rule, "lower it", context)
    elif prompt is not None and prompt >= positions:
        rule = f"leaves no room for an answer in {takes}"
        yield Problem(("rollout", "rollout_max_prompt_len"), rule, "lower it", prompt)


def _check_stop_tokens(settings: Settings, vocab_size: Any) -> Problems:
    for i, token in enumerate(settings.rollout.rollout_stop_token_ids):
        if isinstance(vocab_size, int) and token >= vocab_size:
            rule = f"is no token: the model's vocab_size is {vocab_size}"
            at = ("rollout", "rollout_stop_token_ids", i)
            yield Problem(at, rule, "mend it, or take it out", token)


def read_json(path: File) -> dict[str, Any]:
    """What a file says; nothing where it is not there or is none of ours to judge."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
