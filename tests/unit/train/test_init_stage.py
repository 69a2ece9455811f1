"""The init stage: links to a user's model, or a model made on the spot; and refusals."""

import json
from pathlib import Path

import pytest

from slurm_rl.config.schema import Settings
from slurm_rl.config.train_schema import Critic
from slurm_rl.errors import ModelError
from slurm_rl.stages.init import make_tokenizer, run_init
from slurm_rl.storage.digest import digest_entries, digest_file
from slurm_rl.types import Order

TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def settings_with(**top):
    return Settings.model_validate(
        {
            "run": {"name": "t", "dir": "/x"},
            "num_rollout": 1,
            "rollout": {"prompt_data": "p", "rollout_batch_size": 1},
            "train": {"global_batch_size": 1},
        }
        | top
    )


def made_with(config=None, *, seed=1, characters="0123456789+="):
    model = {"config": TINY | (config or {}), "characters": characters}
    return settings_with(init_model=model, seed=seed)


def init(settings, folder):
    folder.mkdir()
    return run_init(Order("", "r", "init", 0, 0, str(folder), "", "", {}), settings)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "a"
    return folder, init(made_with(), folder)


def test_files_are_digested_and_are_version_zero(made):
    folder, result = made
    names = {entry.path for entry in result.files}
    assert {"weights/config.json", "weights/model.safetensors", "weights/tokenizer.json"} <= names
    assert names == {f"weights/{path.name}" for path in (folder / "weights").iterdir()}
    for entry in result.files:
        assert digest_file(folder / entry.path) == entry.digest
    assert result.content["weights"] == {"version": 0, "digest": digest_entries(result.files)}


def test_the_bytes_depend_on_the_seed_alone(made, tmp_path):
    assert init(made_with(), tmp_path / "again").files == made[1].files
    other = init(made_with(seed=2), tmp_path / "other").files
    differing = {a.path for a, b in zip(made[1].files, other, strict=True) if a != b}
    assert differing == {"weights/model.safetensors"}


def test_transformers_loads_it_and_the_tokenizer_is_one_of_characters(made):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = made[0] / "weights"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("12+3=")["input_ids"] == [1, 2, 10, 3, 11]
    assert tokenizer.decode([1, 2, 10, 3, 11]) == "12+3="
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (12, 13, 14)
    chat = [{"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "1+1="
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == 15 and model.config.eos_token_id == 13
    assert model.generation_config.eos_token_id == 13


def test_a_users_model_is_linked_and_digested(made, tmp_path):
    source = made[0] / "weights"
    (source / "README.md").write_text("not needed")
    try:
        result = init(settings_with(hf_checkpoint=str(source)), tmp_path / "linked")
    finally:
        (source / "README.md").unlink()
    assert result.files == made[1].files
    for entry in result.files:
        link = tmp_path / "linked" / entry.path
        assert link.is_symlink() and Path(link.readlink()).is_absolute()


def changed_copy(made, folder, change):
    folder.mkdir()
    for path in (made[0] / "weights").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    change(folder)
    return settings_with(hf_checkpoint=str(folder))


def set_config(**values):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (truncate, r"model\.safetensors: \d+ bytes, but its header promises \d+"),
        (lambda folder: (folder / "model.safetensors").unlink(), "there is no such file"),
        (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
        (
            set_config(model_type="gpt2"),
            "'gpt2' is not supported; supported are deepseek_v3, glm4, ",
        ),
        (set_config(num_hidden_layers=2), r"model\.layers\.1\..* is missing"),
        (set_config(num_hidden_layers=0), "num_hidden_layers = 0 is no whole number of at least 1"),
    ],
)
def test_a_bad_model_is_one_line(made, tmp_path, change, said):
    settings = changed_copy(made, tmp_path / "model", change)
    with pytest.raises(ModelError, match=said) as error:
        init(settings, tmp_path / "attempt")
    assert "\n" not in str(error.value)


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match="hf_checkpoint must be a Hugging Face model directory"):
        init(settings_with(hf_checkpoint=str(tmp_path / "nowhere")), tmp_path / "attempt")


@pytest.mark.parametrize(
    ("config", "characters", "said"),
    [
        ({"model_type": None}, "ab", "model_type"),
        ({"vocab_size": 3}, "abc", "vocab_size = 3 is smaller than the tokenizer's 6"),
        ({"model_type": "no-such-model"}, "ab", "transformers refuses it"),
        ({}, "aa", "distinct"),
    ],
)
def test_a_bad_init_model_is_one_line(tmp_path, config, characters, said):
    with pytest.raises(ModelError, match=said):
        init(made_with(config, characters=characters), tmp_path / "attempt")


def test_characters_of_every_kind():
    text = "a b\nü="
    tokenizer = make_tokenizer(text)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_character_outside_the_alphabet_is_an_error_not_a_padding_token():
    with pytest.raises(Exception, match="UNK"):
        make_tokenizer("ab")("abc")


def all_models(made, tmp_path, *, critic=None, teacher=None, reference=None):
    """Settings with a critic, a reference and a teacher, on the model that was made."""
    source = str(made[0] / "weights")
    return settings_with(
        hf_checkpoint=source,
        train={
            "global_batch_size": 1,
            "advantage_estimator": "gae",
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
        },
        critic={"hf_checkpoint": critic},
        reference={"hf_checkpoint": reference or source},
        teacher={"hf_checkpoint": teacher or source},
    )


def test_the_commit_holds_every_model_with_its_digest(made, tmp_path):
    result = init(all_models(made, tmp_path), tmp_path / "a")
    for name in ("weights", "critic", "reference", "teacher"):
        own = [entry for entry in result.files if entry.path.startswith(f"{name}/")]
        assert result.content[name]["digest"] == digest_entries(own)
        assert {e.path for e in own} == {
            f"{name}/{path.name}" for path in (tmp_path / "a" / name).iterdir()
        }
    assert result.content["critic"]["version"] == 0
    assert result.content["critic"]["head"]["made"] == "created"
    # The same again, wherever it is made; and another seed is another head, and nothing else.
    assert init(all_models(made, tmp_path), tmp_path / "b") == result
    other = all_models(made, tmp_path).model_copy(update={"seed": 5})
    found = init(other, tmp_path / "c")
    differing = [a.path for a, b in zip(result.files, found.files, strict=True) if a != b]
    assert differing == ["critic/model-00002-of-00002.safetensors"]


def test_a_critic_of_the_policy_that_was_made_survives_a_move(tmp_path):
    settings = made_with().model_copy(update={"critic": Critic()})
    init(settings, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "moved")
    for path in (tmp_path / "moved" / "critic").iterdir():
        assert path.read_bytes(), path  # no link leads to where it was


@pytest.mark.parametrize("name", ["critic", "reference", "teacher"])
def test_a_model_of_another_vocabulary_is_refused(made, tmp_path, name):
    init(made_with(characters="0123456789+-"), tmp_path / "other")
    settings = all_models(made, tmp_path, **{name: str(tmp_path / "other" / "weights")})
    with pytest.raises(ModelError, match=f"vocabulary of the {name} model is not the policy's"):
        init(settings, tmp_path / "attempt")


def test_a_model_beside_the_policy_that_is_not_there_names_its_setting(made, tmp_path):
    settings = all_models(made, tmp_path, teacher=str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"teacher\.hf_checkpoint must be"):
        init(settings, tmp_path / "attempt")


def test_a_teacher_that_sglang_serves_may_be_of_any_family(made, tmp_path):
    source = changed_copy(made, tmp_path / "x", set_config(model_type="gemma9")).hf_checkpoint
    settings = all_models(made, tmp_path, teacher=source)
    with pytest.raises(ModelError, match="gemma9"):
        init(settings, tmp_path / "a")
    served = settings.teacher.model_copy(update={"backend": "sglang"})
    init(settings.model_copy(update={"teacher": served}), tmp_path / "b")
