"""The init stage: weights version 0, and every other model that the run needs, as Hugging Face
directories.

Either the user's checkpoint, by links (nothing is copied, everything is digested), or a model
with random weights and a tokenizer of single characters, made on the spot for demos and
tests. It refuses models that the trainer does not support before any GPU is asked for.

    weights/     config.json, generation_config.json, tokenizer files, safetensors
    critic/      the first critic, if there is one (`critic_model.py`)
    reference/   the model that `reference.hf_checkpoint` names
    teacher/     the model that `teacher.hf_checkpoint` names
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from slurm_rl.config.schema import SPECIAL_TOKENS, InitModel, Settings
from slurm_rl.config.stages import uses_reference
from slurm_rl.config.train_schema import Critic
from slurm_rl.errors import ConfigError, ModelError
from slurm_rl.models.geometry import read_geometry
from slurm_rl.models.headers import INDEX, read_headers
from slurm_rl.models.tensors import check_tensors
from slurm_rl.seeds import derive_seed
from slurm_rl.stages.critic_model import COMPANION_SUFFIXES, make_critic
from slurm_rl.storage.digest import digest_entries
from slurm_rl.storage.durable import list_files, seal_files
from slurm_rl.types import Order, Result

log = logging.getLogger(__name__)

_SPECIAL_IDS = ("pad_token_id", "eos_token_id", "bos_token_id")
_PAD, _EOS, _BOS = SPECIAL_TOKENS
#: Each message's text and nothing else: a model of characters knows no roles.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def run_init(order: Order, settings: Settings) -> Result:
    """Make the models' folders in the attempt directory; returns their files and version 0.

    Raises ModelError for a model that is missing, damaged or not supported; ConfigError for
    settings that name none. On disk is then a directory that nothing names.
    """
    root = Path(order.attempt_dir)
    weights = root / "weights"
    weights.mkdir()
    if settings.hf_checkpoint is not None:
        link_checkpoint(Path(settings.hf_checkpoint), weights)
    elif settings.init_model is not None:
        make_model(settings.init_model, weights, seed=derive_seed(settings.seed, "init"))
    else:
        raise ConfigError("neither hf_checkpoint nor init_model is set", hint="set one of them")
    check_model(weights)
    content: dict[str, Any] = {"weights": {"version": 0}}
    if settings.critic is not None:
        content["critic"] = {"version": 0} | _make_critic(settings, settings.critic, root)
    if settings.reference.hf_checkpoint is not None and uses_reference(settings):
        content["reference"] = _link_other(root, "reference", settings.reference.hf_checkpoint)
    if settings.teacher is not None:
        content["teacher"] = _link_other(root, "teacher", settings.teacher.hf_checkpoint)
    files = []
    for folder, facts in content.items():
        names = [f"{folder}/{name}" for name in list_files(root / folder)]
        own = seal_files(root, names)
        facts["digest"] = digest_entries(own)
        files += own
    _check_others(root, settings)
    return Result(files=files, content=content)


def _make_critic(settings: Settings, critic: Critic, root: Path) -> dict[str, Any]:
    """`critic/`, from a model of its own or from the policy; what is recorded of its head."""
    folder = root / "critic"
    folder.mkdir()
    source = root / "weights" if critic.hf_checkpoint is None else Path(critic.hf_checkpoint)
    head = make_critic(source, folder, seed=derive_seed(settings.seed, "critic"))
    log.info("the critic's value head was %s", head.made)
    return {"head": head.as_content()}


def _link_other(root: Path, name: str, source: str) -> dict[str, Any]:
    folder = root / name
    folder.mkdir()
    link_checkpoint(Path(source), folder, setting=f"{name}.hf_checkpoint")
    return {}


def _check_others(root: Path, settings: Settings) -> None:
    """The models beside the policy must be of use to it. Raises ModelError."""
    teacher = settings.teacher
    if (root / "reference").exists():
        check_model(root / "reference")
        _check_vocabulary(root, "reference")
        if settings.reference.ema is not None:
            _check_same_shape(root, "reference")
    if (root / "critic").exists():
        _check_vocabulary(root, "critic")
    if teacher is not None:
        if teacher.backend == "megatron":  # SGLang serves every family
            check_model(root / "teacher")
        _check_vocabulary(root, "teacher")


def _check_same_shape(root: Path, name: str) -> None:
    """An average is of one model: both must be of one shape."""
    found = [dataclasses.replace(read_geometry(root / f), dtype="") for f in (name, "weights")]
    if found[0] != found[1]:
        raise ModelError(
            f"{name}.ema: {name}.hf_checkpoint has another shape than the policy",
            hint="an average is of one model; choose a checkpoint of the same",
        )


def _check_vocabulary(root: Path, name: str) -> None:
    """Its tokens must be the policy's: as many, and the same where both say so."""
    sizes = [read_vocab_size(root / folder / "config.json") for folder in (name, "weights")]
    tables = [_read_vocabulary(root / folder / "tokenizer.json") for folder in (name, "weights")]
    if None not in tables and tables[0] != tables[1]:
        raise ModelError(
            f"the vocabulary of the {name} model is not the policy's: their tokenizer.json differ",
            hint=f"choose a {name}.hf_checkpoint with the policy's tokenizer",
        )
    # Embeddings may be padded to different sizes around one vocabulary; without tokenizers to
    # compare, the sizes must do.
    if None in tables and sizes[0] != sizes[1]:
        raise ModelError(
            f"the {name} model's vocab_size is {sizes[0]}, the policy's {sizes[1]}",
            hint=f"choose a {name}.hf_checkpoint with the policy's tokenizer",
        )


def read_vocab_size(path: Path) -> Any:
    """Rows of the embedding by a `config.json`; None if it does not say."""
    config: dict[str, Any] = json.loads(path.read_bytes())
    # Models that see have one config inside another.
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")


def _read_vocabulary(path: Path) -> Any:
    """The table of tokens in a `tokenizer.json`, added ones too; None if there is no such file."""
    try:
        content = json.loads(path.read_bytes())
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens", [])}
        vocab = content["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    pairs = vocab if isinstance(vocab, dict) else {str(row): i for i, row in enumerate(vocab)}
    return {**pairs, **added}


def link_checkpoint(source: Path, weights: Path, *, setting: str = "hf_checkpoint") -> None:
    """Link what a Hugging Face directory needs into `weights`; ModelError if it is none."""
    if not (source / "config.json").is_file():
        raise ModelError(
            f"{source}: there is no config.json",
            hint=f"{setting} must be a Hugging Face model directory on the shared file system",
        )
    names = set(read_headers(source).files)
    names |= {
        path.name
        for path in source.iterdir()
        if path.is_file() and path.suffix in COMPANION_SUFFIXES
    }
    if (source / INDEX).exists():
        names.add(INDEX)
    for name in sorted(names):
        (weights / name).symlink_to((source / name).resolve())


def check_model(weights: Path) -> None:
    """ModelError unless the trainer supports the model and its files are whole."""
    check_tensors(read_geometry(weights), folder=weights, shapes=read_headers(weights).shapes)


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
    made.save_pretrained(weights, max_shard_size="5GB")
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
