"""The init stage: weights version 0, as a Hugging Face directory.

Either the user's checkpoint, by links (nothing is copied, everything is digested), or a model
with random weights and a tokenizer of single characters, made on the spot for demos and
tests. It refuses models that the trainer does not support before any GPU is asked for.

    weights/   config.json, generation_config.json, tokenizer files, safetensors
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from slurm_rl.config.schema import SPECIAL_TOKENS, InitModel, Settings
from slurm_rl.errors import ConfigError, ModelError
from slurm_rl.seeds import derive_seed
from slurm_rl.storage.digest import digest_entries
from slurm_rl.storage.durable import list_files, seal_files
from slurm_rl.types import Order, Result

log = logging.getLogger(__name__)

#: Suffixes and names of what is linked besides the weights themselves.
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_SPECIAL_IDS = ("pad_token_id", "eos_token_id", "bos_token_id")
_PAD, _EOS, _BOS = SPECIAL_TOKENS
#: Each message's text and nothing else: a model of characters knows no roles.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def run_init(order: Order, settings: Settings) -> Result:
    """Make `weights/` in the attempt directory; returns its files and version 0.

    Raises ModelError for a model that is missing, damaged or not supported; ConfigError for
    settings that name none. On disk is then a directory that nothing names.
    """
    weights = Path(order.attempt_dir) / "weights"
    weights.mkdir()
    if settings.hf_checkpoint is not None:
        link_checkpoint(Path(settings.hf_checkpoint), weights)
    elif settings.init_model is not None:
        make_model(settings.init_model, weights, seed=derive_seed(settings.seed, "init"))
    else:
        raise ConfigError("neither hf_checkpoint nor init_model is set", hint="set one of them")
    check_model(weights)
    names = [f"weights/{name}" for name in list_files(weights)]
    files = seal_files(Path(order.attempt_dir), names)
    return Result(files=files, content={"weights": {"version": 0, "digest": digest_entries(files)}})


def link_checkpoint(source: Path, weights: Path) -> None:
    """Link what a Hugging Face directory needs into `weights`; ModelError if it is none."""
    from slurm_rl.train.weights import INDEX, read_layout

    if not (source / "config.json").is_file():
        raise ModelError(
            f"{source}: there is no config.json",
            hint="hf_checkpoint must be a Hugging Face model directory on the shared file system",
        )
    names = set(read_layout(source).files)
    names |= {
        path.name
        for path in source.iterdir()
        if path.is_file() and path.suffix in _COMPANION_SUFFIXES
    }
    if (source / INDEX).exists():
        names.add(INDEX)
    for name in sorted(names):
        (weights / name).symlink_to((source / name).resolve())


def check_model(weights: Path) -> None:
    """ModelError unless the trainer supports the model and its files are whole."""
    from slurm_rl.train.families import check_tensors
    from slurm_rl.train.geometry import read_geometry
    from slurm_rl.train.weights import read_layout

    check_tensors(read_geometry(weights), folder=weights, layout=read_layout(weights))


def make_model(model: InitModel, weights: Path, *, seed: int) -> None:
    """A model with random weights and its tokenizer; the bytes depend on config and seed.

    Raises ModelError if transformers refuses the config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    tokenizer = make_tokenizer(model.characters)
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        **{name: getattr(tokenizer, name) for name in _SPECIAL_IDS},
    } | model.config
    if fields["vocab_size"] < len(tokenizer):
        raise ModelError(
            f"init_model.config.vocab_size = {fields['vocab_size']} is smaller than the "
            f"tokenizer's {len(tokenizer)} (init_model.characters and three special tokens)",
            hint="leave vocab_size out",
        )
    kind = fields.pop("model_type", None)
    if kind is None:
        raise ModelError("init_model.config has no model_type", hint="for example llama")
    try:
        config = AutoConfig.for_model(kind, **fields)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"init_model.config: transformers refuses it: {error}") from error
    special = {name: getattr(config, name) for name in _SPECIAL_IDS}
    made.generation_config = GenerationConfig(**special)
    made.save_pretrained(weights)
    tokenizer.save_pretrained(weights)


def make_tokenizer(characters: str) -> Any:
    """One token a character, in the order given, then pad, eos and bos.

    A character outside the alphabet is an error where the text is encoded (there is no
    unknown token). Raises ModelError for an empty alphabet or a repeated character.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not characters or len(set(characters)) != len(characters):
        raise ModelError("init_model.characters must be distinct characters, at least one")
    vocabulary = {token: i for i, token in enumerate([*characters, _PAD, _EOS, _BOS])}
    inner = Tokenizer(models.WordLevel(vocabulary))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=_PAD, eos_token=_EOS, bos_token=_BOS
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer
