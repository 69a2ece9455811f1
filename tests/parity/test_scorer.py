"""Log-probs of reference and teacher: those of transformers, whatever the layout of the job."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import trains
from safetensors.torch import load_file

from slurm_rl.config.schema import Settings
from slurm_rl.errors import CorruptError, ModelError
from slurm_rl.stages.init import make_model, run_init
from slurm_rl.stages.reference import run_reference
from slurm_rl.stages.signals import SIGNALS_NAME, read_signals
from slurm_rl.stages.teacher import run_teacher
from slurm_rl.types import Input


def settings_with(folder, **sections):
    value = trains.tiny_settings(folder, train=sections.pop("train", None)).model_dump()
    return Settings.model_validate(value | sections)


@pytest.fixture
def teacher(tmp_path):
    """A wider model of the same characters, of another family."""
    base = trains.tiny_settings(tmp_path, family="qwen3", model={"hidden_size": 48}).init_model
    folder = tmp_path / "teacher-model"
    folder.mkdir()
    make_model(base, folder, seed=5)
    return folder


def init_of(root, settings):
    order = trains.make_order(root, "init", 0, {}, "init")
    return trains.as_input(
        "checkpoint", 0, "init", Path(order.attempt_dir), run_init(order, settings)
    )


def logprobs_of(folder, samples):
    """[R, V] by transformers, at the rollout's temperature."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parts = []
    with torch.no_grad():
        for i in range(len(samples.rewards)):
            tokens = torch.from_numpy(samples.sample_tokens(i)).long()
            logits = model(tokens[None]).logits[0, samples.prompt_lengths[i] - 1 : -1]
            parts.append((logits / 0.8).log_softmax(-1))
    return torch.cat(parts)


def targets_of(samples):
    return torch.cat(
        [
            torch.from_numpy(samples.sample_tokens(i)[samples.prompt_lengths[i] :]).long()
            for i in range(len(samples.rewards))
        ]
    )


def teacher_order(root, settings, init):
    inputs = {
        "rollout": trains.make_rollout(root, init.content["weights"]),
        "teacher": dataclasses.replace(init, role="teacher"),
    }
    return trains.make_order(root, "teacher", 0, inputs, "teacher")


@pytest.mark.parametrize("budget", [None, 20])
def test_a_teachers_likeliest_tokens(tmp_path, teacher, budget):
    section = {"hf_checkpoint": str(teacher), "top_logprobs_num": 3, "max_tokens_per_gpu": budget}
    settings = settings_with(tmp_path, teacher=section)
    init = init_of(tmp_path, settings)
    order = teacher_order(tmp_path, settings, init)
    result = run_teacher(order, settings)
    assert result.content["teacher"] == init.content["teacher"]
    found = load_file(Path(order.attempt_dir) / SIGNALS_NAME)
    samples = trains.made_up_samples(0)
    expected = logprobs_of(teacher, samples)
    trained = torch.from_numpy(samples.loss_mask) != 0
    sampled = expected.gather(1, targets_of(samples)[:, None])[:, 0] * trained
    assert torch.allclose(found["teacher"], sampled, atol=1e-5)
    best = expected.topk(3).values
    assert torch.allclose(found["top_logprobs"][trained], best[trained], atol=1e-5)
    at_ids = expected.gather(1, found["top_ids"])
    assert torch.allclose(at_ids[trained], best[trained], atol=1e-5)


def test_another_vocabulary_is_refused(tmp_path, teacher):
    text = (teacher / "tokenizer.json").read_text()
    (teacher / "tokenizer.json").write_text(text.replace('"+"', '"-"'))
    settings = settings_with(tmp_path, teacher={"hf_checkpoint": str(teacher)})
    with pytest.raises(ModelError, match="vocabulary of the teacher model is not the policy's"):
        init_of(tmp_path, settings)


KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}


def reference_order(root, init, before, iteration, weights=None):
    policy = weights or init
    inputs = {
        "rollout": trains.make_rollout(
            root, {"version": iteration, "digest": policy.content["weights"]["digest"]}
        ),
        "weights": dataclasses.replace(policy, role="weights"),
        "reference": dataclasses.replace(before, role="reference"),
    }
    return trains.make_order(root, "reference", iteration, inputs, f"reference-{iteration}")


def as_policy(root, teacher_like: Path, version: int) -> Input:
    """A train commit whose weights are those in a folder."""
    folder = root / f"policy-{version}"
    (folder / "weights").mkdir(parents=True)
    for path in teacher_like.iterdir():
        (folder / "weights" / path.name).write_bytes(path.read_bytes())
    from slurm_rl.storage.durable import seal_files
    from slurm_rl.types import Result

    names = [f"weights/{path.name}" for path in teacher_like.iterdir()]
    weights = {"version": version, "digest": f"xxh3:{version}"}
    result = Result(files=seal_files(folder, names), content={"weights": weights})
    return trains.as_input("weights", version - 1, "train", folder, result)


def moved(folder, by):
    tensors = load_file(folder / "model.safetensors")
    from safetensors.torch import save_file

    other = {name: value + by for name, value in tensors.items()}
    save_file(other, folder / "model.safetensors", metadata={"format": "pt"})


def weights_in(folder):
    return load_file(Path(folder) / "model.safetensors")


@pytest.mark.parametrize("how", [{"ema": 0.75}, {"update_interval": 2}])
def test_a_reference_that_moves(tmp_path, how):
    """Iteration 0: the policy itself. Then by its rule, from files of the commit before."""
    settings = settings_with(tmp_path, reference=how, train=KL)
    init = init_of(tmp_path, settings)
    policies = {0: init}
    for version in (1, 2):
        source = tmp_path / f"source-{version}"
        source.mkdir()
        for path in Path(init.path, "weights").iterdir():
            (source / path.name).write_bytes(path.read_bytes())
        moved(source, 0.01 * version)
        policies[version] = as_policy(tmp_path, source, version)
    before, names = init, []
    for i in range(3):
        order = reference_order(tmp_path, init, before, i, policies[i])
        result = run_reference(order, settings)
        before = trains.as_input("reference", i, "reference", Path(order.attempt_dir), result)
        names.append(Path(order.attempt_dir))
    start = weights_in(Path(init.path) / "weights")
    for name, value in start.items():
        kept = [weights_in(folder / "reference")[name] for folder in names]
        assert torch.equal(kept[0], value)
        if "ema" in how:
            # 3/4 × 0 + 1/4 × 0.01, then 3/4 × that + 1/4 × 0.02.
            assert torch.allclose(kept[1] - value, torch.tensor(0.0025), atol=1e-6)
            assert torch.allclose(kept[2] - value, torch.tensor(0.006875), atol=1e-6)
        else:
            assert torch.equal(kept[1], value)
            assert torch.allclose(kept[2] - value, torch.tensor(0.02), atol=1e-6)
    samples = trains.made_up_samples(2)
    found = load_file(names[2] / SIGNALS_NAME)
    mask = torch.from_numpy(samples.loss_mask)
    for key, folder in (
        ("proximal", tmp_path / "policy-2" / "weights"),
        ("reference", names[2] / "reference"),
    ):
        expected = logprobs_of(folder, samples).gather(1, targets_of(samples)[:, None])[:, 0]
        assert torch.allclose(found[key], expected * mask, atol=1e-5)
    assert (found["proximal"] - found["reference"]).abs().max() > (1e-3 if "ema" in how else -1)


def test_samples_that_are_not_graded_yet_are_scored(tmp_path):
    """The score stage comes later, or its service is down: rewards are open."""
    settings = settings_with(tmp_path, reference={"stage": True}, train=KL)
    init = init_of(tmp_path, settings)
    order = reference_order(tmp_path, init, init, 0)
    open_rewards = dataclasses.replace(
        trains.made_up_samples(0), rewards=np.full(16, np.nan, np.float32)
    )
    order.inputs["rollout"] = trains.make_rollout(
        tmp_path, init.content["weights"], samples=open_rewards, name="open"
    )
    assert run_reference(order, settings).files


def test_an_average_in_bfloat16_moves(tmp_path):
    """Steps far below what bfloat16 can tell apart add up."""
    from slurm_rl.train.average import average_weights

    base = trains.tiny_settings(tmp_path, model={"dtype": "bfloat16"})
    init = init_of(tmp_path, base)
    folders = [Path(init.path) / "weights"]
    policy = tmp_path / "policy"
    policy.mkdir()
    for path in folders[0].iterdir():
        (policy / path.name).write_bytes(path.read_bytes())
    moved(policy, 1.0)
    for i in range(3):
        folders.append(tmp_path / f"average-{i}")
        average_weights(folders[-2], policy, folders[-1], decay=0.999)
    for name, start in weights_in(folders[0]).items():
        assert start.dtype == torch.bfloat16
        away = weights_in(folders[3])[name] - start.float()
        far = weights_in(policy)[name].float() - start.float()
        assert torch.allclose(away, far * (1 - 0.999**3), rtol=1e-3, atol=1e-6)


def test_signals_are_found_for_the_samples_that_are_left(tmp_path):
    settings = settings_with(tmp_path, reference={"stage": True}, train=KL)
    init = init_of(tmp_path, settings)
    order = reference_order(tmp_path, init, init, 0)
    result = run_reference(order, settings)
    made = trains.as_input("reference", 0, "reference", Path(order.attempt_dir), result)
    rollout = order.input("rollout")
    made.content["parents"] = {"rollout": rollout.digest}
    train = trains.train_order(tmp_path, init, "train", reference=made)
    from slurm_rl.rollout.samples import take_samples

    samples = trains.made_up_samples(0)
    whole = read_signals(train, samples)
    kept = [1, 2, 7, 15]
    part = read_signals(train, take_samples(samples, np.array(kept)))
    places = np.concatenate(
        [np.arange(*samples.response_slice(i).indices(10**6)[:2]) for i in kept]
    )
    assert torch.equal(part.need("proximal"), whole.need("proximal")[places])
    with pytest.raises(CorruptError, match="is not in it as it is"):
        read_signals(train, trains.made_up_samples(3))
