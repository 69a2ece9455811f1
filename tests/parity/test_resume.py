"""A chain of trainers, each from the disk, and one that never stops: the same bytes."""

import dataclasses
import random
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import trains

from slurm_rl.errors import CorruptError, StorageError
from slurm_rl.rollout.samples import TENSORS_NAME
from slurm_rl.stages.train import run_train, train_iteration
from slurm_rl.types import FileEntry

CASES = {
    "llama, tied": {"family": "llama", "tied": True},
    "qwen2, bfloat16": {"family": "qwen2", "model": {"dtype": "bfloat16"}},
    "qwen3, KL, schedule": {
        "family": "qwen3",
        "train": {
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "lr_decay_iters": 10,
            "lr_warmup_iters": 1,
        },
        "megatron": {
            "lr": 1e-3,
            "lr_decay_style": "cosine",
            "weight_decay": 0.1,
            "overlap_grad_reduce": True,
        },
    },
}


def one_process(root, settings, init, open_trainers, *, num):
    """Iterations by one trainer that stays open; orders and results."""
    trainer, before, done = None, init, []
    for i in range(num):
        order = trains.train_order(root, before, f"one-{i}", reference=init)
        trainer = trainer or open_trainers(order, settings)
        done.append((order, train_iteration(trainer, order)))
        before = trains.trained(*done[-1])
    return done


def chain(root, settings, init, *, num):
    """Iterations by a new trainer each."""
    before, done = init, []
    for i in range(num):
        order = trains.train_order(root, before, f"attempt-{i}-of-another-name", reference=init)
        done.append((order, run_train(order, settings)))
        before = trains.trained(*done[-1])
    return done


@pytest.mark.parametrize("case", CASES)
def test_a_chain_gives_the_bytes_of_one_process(tmp_path, made_models, open_trainers, case):
    settings = trains.tiny_settings(tmp_path, **CASES[case])
    init = made_models(settings)
    one = one_process(tmp_path, settings, init, open_trainers, num=3)
    open_trainers.close()
    many = chain(tmp_path, settings, init, num=3)
    for (_, a), (_, b) in zip(one, many, strict=True):
        assert [entry for entry in a.files if entry not in b.files] == []
        assert trains.facts(a) == trains.facts(b)
    # And they did train, each time.
    digests = {result.content["weights"]["digest"] for _, result in one}
    assert len(digests | {init.content["weights"]["digest"]}) == 4
    assert [r.content["optimizer_steps"] for _, r in one] == [2, 4, 6]
    assert [r.content["num_samples_trained"] for _, r in one] == [16, 32, 48]


@pytest.mark.slow
def test_a_process_of_its_own_gives_the_bytes_too(tmp_path, made_models, open_trainers):
    settings = trains.tiny_settings(tmp_path)
    init = made_models(settings)
    one = one_process(tmp_path, settings, init, open_trainers, num=2)
    before = trains.trained(*one[0])
    ((_, result),) = trains.train_in_ranks(tmp_path, settings, before, num=1, name="process")
    assert result.files == one[1][1].files
    assert result.content == one[1][1].content


def test_a_dropped_optimizer_state_is_seen(tmp_path, made_models, open_trainers):
    """The comparison above can fail: without Adam's moments the next step is another."""
    settings = trains.tiny_settings(tmp_path)
    init = made_models(settings)
    one = one_process(tmp_path, settings, init, open_trainers, num=2)
    order = trains.train_order(tmp_path, trains.trained(*one[0]), "forgetful")
    trainer = open_trainers(order, settings)
    for inner in trainer._engine.optimizer.chained_optimizers:
        for state in inner.optimizer.state.values():
            state["exp_avg"].zero_()
    result = train_iteration(trainer, order)
    assert result.content["weights"] != one[1][1].content["weights"]


def test_other_users_of_the_process_do_not_matter(tmp_path, made_models, open_trainers):
    """An engine in the same process draws numbers and sets threads; the trainer has its own."""
    settings = trains.tiny_settings(tmp_path)
    init = made_models(settings)
    expected = one_process(tmp_path, settings, init, open_trainers, num=2)
    open_trainers.close()
    order = trains.train_order(tmp_path, init, "disturbed-0")
    trainer = open_trainers(order, settings)
    torch.manual_seed(99)
    torch.set_num_threads(2)
    before = torch.get_rng_state()
    seen = set()
    trainer.model.register_forward_hook(
        lambda *_: seen.add((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
    )
    first = train_iteration(trainer, order)
    assert seen == {(1, True)}
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()
    torch.randn(5)
    order = trains.train_order(tmp_path, trains.trained(order, first), "disturbed-1")
    second = train_iteration(trainer, order)
    torch.set_num_threads(1)
    assert (first.files, second.files) == (expected[0][1].files, expected[1][1].files)


def test_random_numbers_go_on_where_the_checkpoint_left_them(tmp_path, made_models, open_trainers):
    settings = trains.tiny_settings(tmp_path)
    init = made_models(settings)

    def draw(*_):
        torch.rand(1), np.random.rand(), random.gauss(0, 1)

    def train(trainer, before, name):
        order = trains.train_order(tmp_path, before, name)
        trainer = trainer or open_trainers(order, settings)
        if not trainer.model._forward_hooks:
            trainer.model.register_forward_hook(draw)
        return trainer, trains.trained(order, train_iteration(trainer, order))

    trainer, first = train(None, init, "a")
    _, second = train(trainer, first, "b")
    _, resumed = train(None, first, "c")
    assert resumed.content == second.content
    # Otherwise nothing was drawn, and nothing shown.
    undrawn = one_process(tmp_path, settings, init, open_trainers, num=1)[0][1]
    assert undrawn.content["weights"] == first.content["weights"]
    assert undrawn.files != [FileEntry(**entry) for entry in first.content["files"]]


@pytest.fixture
def trained_once(tmp_path, made_models):
    settings = trains.tiny_settings(tmp_path)
    init = made_models(settings)
    order = trains.train_order(tmp_path, init, "first")
    return tmp_path, settings, init, trains.trained(order, run_train(order, settings))


def changed(before, **content):
    return dataclasses.replace(before, content=before.content | content)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"optimizer_steps": 3}, "optimizer_steps is 2, but 3 was committed"),
        ({"schedule_step": 1}, "schedule_step is 2, but 1 was committed"),
        ({"lr": 0.5}, "lr is 0.001, but 0.5 was committed"),
        ({"num_samples_trained": 15}, "num_samples_trained is 16, but 15"),
    ],
)
def test_a_checkpoint_that_is_not_its_commits_is_refused(trained_once, content, said):
    root, settings, _, before = trained_once
    order = trains.train_order(root, changed(before, **content), "second")
    with pytest.raises(CorruptError, match=said):
        run_train(order, settings)


def test_broken_continuity_is_refused_with_both_numbers(trained_once):
    root, settings, init, before = trained_once
    good = trains.train_order(root, before, "second")
    rollout = good.inputs["rollout"]
    cursor = rollout.content["cursor"]

    def refused(said, **inputs):
        order = dataclasses.replace(good, inputs=good.inputs | inputs)
        with pytest.raises(CorruptError, match=said):
            run_train(order, settings)

    other = rollout.content["weights"] | {"digest": "xxh3:0"}
    refused("rollout's weights digest is xxh3:0", rollout=changed(rollout, weights=other))
    old = trains.train_order(root, init, "again").inputs["rollout"]
    refused("rollout's iteration is 0, not 1", rollout=old)
    refused(
        "the checkpoint's version is 0, not 1",
        checkpoint=dataclasses.replace(init, role="checkpoint"),
    )
    stuck = changed(rollout, cursor=cursor | {"visits": 4})
    refused("cursor went from visit 4 to 4", rollout=stuck)
    back = changed(rollout, cursor=cursor | {"visits": 3})
    refused("cursor went from visit 4 to 3", rollout=back)
    swapped = changed(rollout, cursor=cursor | {"data_fingerprint": "new"})
    refused("data set changed from same to new", rollout=swapped)
    stale = trains.make_rollout(
        root,
        rollout.content["weights"],
        samples=trains.made_up_samples(0),
        name="stale",
    )
    refused(r"weights versions \[0\], not 1", rollout=stale)


def test_damage_is_found_while_loading(trained_once):
    root, settings, _, before = trained_once
    order = trains.train_order(root, before, "second")
    names = [name for name in before.files if not name.endswith("weights/model.safetensors")]
    for number, name in enumerate([*names, TENSORS_NAME]):
        role = "rollout" if name == TENSORS_NAME else "checkpoint"
        path = Path(order.inputs[role].files[name])
        kept = path.with_name("kept")
        shutil.copy(path, kept)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        damaged = dataclasses.replace(order, attempt_dir=str(root / f"damaged-{number}"))
        Path(damaged.attempt_dir).mkdir()
        with pytest.raises(CorruptError, match=f"{path.name}: digest"):
            run_train(damaged, settings)
        path.write_bytes(data[:-1])
        with pytest.raises(CorruptError, match=f"{path.name}: .* bytes, but"):
            run_train(damaged, settings)
        kept.rename(path)
    run_train(order, settings)


@pytest.mark.parametrize(
    ("megatron", "lr"),
    [
        ({"lr": 2e-3}, 2e-3),
        ({"lr": 2e-3, "lr_decay_style": "constant", "weight_decay": 0.3}, 2e-3),
    ],
)
def test_a_rate_that_was_changed_holds_from_the_next_step(trained_once, megatron, lr):
    """The checkpoint's own rate, which the commit names, is still checked."""
    root, settings, _, before = trained_once
    other = trains.tiny_settings(root, megatron=megatron)
    order = trains.train_order(root, before, "second")
    result = run_train(order, other)
    assert result.metrics["train/lr"] == pytest.approx(lr)
    assert result.content["schedule_step"] == 2 * before.content["schedule_step"]
    same = run_train(trains.train_order(root, before, "third"), settings)
    assert result.files != same.files
    wrong = trains.train_order(root, changed(before, lr=0.5), "fourth")
    with pytest.raises(CorruptError, match=r"lr is 0.001, but 0.5 was committed"):
        run_train(wrong, other)


def test_betas_that_were_changed_take_effect(trained_once):
    """A checkpoint brings the optimizer's state, and not what the settings were."""
    root, settings, _, before = trained_once
    same = run_train(trains.train_order(root, before, "second"), settings)
    other = trains.tiny_settings(root, megatron={"adam_beta1": 0.5})
    result = run_train(trains.train_order(root, before, "third"), other)
    assert result.metrics["train/lr"] == same.metrics["train/lr"]
    assert result.files != same.files


def test_a_checkpoint_that_cannot_be_written_is_one_line(tmp_path, made_models):
    """torch's own error for it is no Exception, and would pass every handler."""
    settings = trains.tiny_settings(tmp_path)
    order = trains.train_order(tmp_path, made_models(settings), "a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(
            StorageError, match=r"a/checkpoint: cannot be written: .*Error"
        ) as error:
            run_train(order, settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "a" / "result.json").exists()
