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
from slurm_rl.config.schema import InitModel, Settings

Problems = Iterator[Problem]

_TOKENIZERS = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"}
#: Files beside `tokenizer_config.json` that bring a chat template.
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
#: Tokens of the tokenizer of characters besides its characters.
_NUM_SPECIAL = 3


def check_model(settings: Settings) -> Problems:
    """What is missing of the models, and limits that are beyond the trained one."""
    server = settings.score.server
    if server is not None:
        yield from _check_folder(File(server.hf_checkpoint), ("score", "server", "hf_checkpoint"))
    if settings.init_model is not None:
        config = settings.init_model.config
        yield from _check_made(settings.init_model)
        default = len(settings.init_model.characters) + _NUM_SPECIAL
        vocab_size = config.get("vocab_size", default)
    elif settings.hf_checkpoint is not None:
        folder = File(settings.hf_checkpoint)
        missing = list(_check_folder(folder, ("hf_checkpoint",)))
        yield from missing
        if missing:
            return
        config = _read_json(folder / "config.json")
        vocab_size = config.get("vocab_size")
        yield from _check_template(settings, folder)
    else:
        return
    yield from _check_context(settings, config.get("max_position_embeddings"))
    yield from _check_stop_tokens(settings, vocab_size)


def _check_folder(folder: File, path: Path) -> Problems:
    value = str(folder)
    fix = "download the model there, or mend the path"
    if not folder.is_dir():
        yield Problem(path, "is not a directory", fix, value)
        return
    names = set(os.listdir(folder))
    if "config.json" not in names:
        yield Problem(path, "has no config.json", fix, value)
    if not any(name.endswith(".safetensors") for name in names):
        yield Problem(path, "has no *.safetensors", fix, value)
    if not names & _TOKENIZERS:
        yield Problem(path, "has no tokenizer", fix, value)


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
    size, least = model.config.get("vocab_size"), len(model.characters) + _NUM_SPECIAL
    if isinstance(size, int) and size < least:
        rule = f"is less than the tokenizer's {least} (characters and three special tokens)"
        yield Problem(("init_model", "config", "vocab_size"), rule, "leave it out", size)


def _check_template(settings: Settings, folder: File) -> Problems:
    """A template that is asked for must be there, where the tokenizer's files say that."""
    config = _read_json(folder / "tokenizer_config.json")
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
    """Lengths that the model's positions cannot hold, wherever they are set."""
    if not isinstance(positions, int) or isinstance(positions, bool):
        return
    rollout = settings.rollout
    takes = f"the model's max_position_embeddings = {positions}"
    context, prompt = rollout.rollout_max_context_len, rollout.rollout_max_prompt_len
    if context is not None and context > positions:
        rule = f"is more than {takes}"
        yield Problem(("rollout", "rollout_max_context_len"), rule, "lower it", context)
        return
    if prompt is not None and prompt >= positions:
        rule = f"leaves no room for an answer in {takes}"
        yield Problem(("rollout", "rollout_max_prompt_len"), rule, "lower it", prompt)
        return
    for at, length in _response_lengths(settings):
        if length >= positions:
            rule = f"leaves no room for a prompt in {takes}"
            yield Problem(at, rule, "lower it", length)
        elif context is None and prompt is not None and prompt + length > positions:
            rule = f"and rollout_max_prompt_len = {prompt} together are more than {takes}"
            fix = f"lower one, or set rollout_max_context_len: {positions} to cut answers there"
            yield Problem(at, rule, fix, length)


def _response_lengths(settings: Settings) -> Iterator[tuple[Path, int]]:
    name = "rollout_max_response_len"
    yield ("rollout", name), settings.rollout.rollout_max_response_len
    for use in data_uses(settings):
        if use.own_at is not None and use.own.rollout_max_response_len is not None:
            yield (*use.own_at, name), use.own.rollout_max_response_len


def _check_stop_tokens(settings: Settings, vocab_size: Any) -> Problems:
    for i, token in enumerate(settings.rollout.rollout_stop_token_ids):
        if isinstance(vocab_size, int) and token >= vocab_size:
            rule = f"is no token: the model's vocab_size is {vocab_size}"
            at = ("rollout", "rollout_stop_token_ids", i)
            yield Problem(at, rule, "mend it, or take it out", token)


def _read_json(path: File) -> dict[str, Any]:
    """What a file says; nothing where it is not there or is none of ours to judge."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
