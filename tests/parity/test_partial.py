"""A train stage that is killed between two optimizer steps goes on there, to the same bytes."""

import dataclasses
import json
from pathlib import Path

import pytest
import trains

from slurm_rl.stages.train import open_trainer, run_train, train_iteration
from slurm_rl.train import cpu

with cpu.megatron_imports():
    from slurm_rl.train import step as step_module
    from slurm_rl.train.partial import find_partial

TRAIN = {"global_batch_size": 4, "save_steps": 1, "use_kl_loss": True, "kl_loss_coef": 0.1}


class Killed(BaseException):
    """The process is gone."""


def order_of(root, init, name, *, earlier=()):
    order = trains.train_order(root, init, name, reference=init)
    return dataclasses.replace(order, earlier_attempts=[str(path) for path in earlier])


@pytest.fixture
def count_steps(monkeypatch):
    """Optimizer steps that were really taken, and a way to die before one of them."""
    taken, die_before = [], []
    real = step_module.run_microbatches

    def run(model, microbatches, loss, *, forward_only=False):
        if not forward_only:
            if die_before and len(taken) == die_before[0]:
                raise Killed
            taken.append(len(microbatches))
        return real(model, microbatches, loss, forward_only=forward_only)

    monkeypatch.setattr(step_module, "run_microbatches", run)
    return taken, die_before


def killed_after(root, settings, init, name, count_steps, *, steps, earlier=()):
    """The attempt directory of a stage that was killed before a step."""
    taken, die_before = count_steps
    taken.clear()
    die_before[:] = [steps]
    order = order_of(root, init, name, earlier=earlier)
    with pytest.raises(Killed):
        run_train(order, settings)
    die_before.clear()
    return Path(order.attempt_dir)


def test_killed_between_steps_it_ends_with_the_same_bytes(tmp_path, made_models, count_steps):
    settings = trains.tiny_settings(tmp_path, train=TRAIN)
    init = made_models(settings)
    whole = run_train(order_of(tmp_path, init, "whole"), settings)
    taken, _ = count_steps
    assert len(taken) == 4
    first = killed_after(tmp_path, settings, init, "first", count_steps, steps=2)
    assert [path.name for path in first.glob("partial-*.json")] == ["partial-0002.json"]
    second = killed_after(tmp_path, settings, init, "second", count_steps, steps=1, earlier=[first])
    assert [path.name for path in second.glob("partial-*.json")] == ["partial-0003.json"]
    taken.clear()
    resumed = run_train(order_of(tmp_path, init, "third", earlier=[first, second]), settings)
    assert len(taken) == 1, "only the last of four steps was left to do"
    assert (resumed.files, resumed.content) == (whole.files, whole.content)
    assert trains.facts(resumed) == trains.facts(whole)
    assert not list((tmp_path / "third").glob("partial-*")), "nothing of it is left"


def test_without_save_steps_and_of_other_inputs_it_starts_again(tmp_path, made_models, count_steps):
    settings = trains.tiny_settings(tmp_path, train=TRAIN)
    init = made_models(settings)
    taken, _ = count_steps
    first = killed_after(tmp_path, settings, init, "first", count_steps, steps=3)
    for changes in ({"save_steps": None}, {"eps_clip": 0.1}):
        other = trains.tiny_settings(tmp_path, train=TRAIN | changes)
        taken.clear()
        run_train(order_of(tmp_path, init, f"other-{next(iter(changes))}", earlier=[first]), other)
        assert len(taken) == 4
    moved = dataclasses.replace(init, digest="another")
    taken.clear()
    run_train(order_of(tmp_path, moved, "moved", earlier=[first]), settings)
    assert len(taken) == 4


@pytest.mark.parametrize("damage", ["a byte", "the end", "its json", "gone"])
def test_a_damaged_partial_save_is_left_alone(tmp_path, made_models, count_steps, damage):
    settings = trains.tiny_settings(tmp_path, train=TRAIN)
    init = made_models(settings)
    whole = run_train(order_of(tmp_path, init, "whole"), settings)
    first = killed_after(tmp_path, settings, init, "first", count_steps, steps=2)
    victim = first / "partial-0002" / "checkpoint" / "__0_0.distcp"
    data = bytearray(victim.read_bytes())
    if damage == "a byte":
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    elif damage == "the end":
        victim.write_bytes(data[:-1])
    elif damage == "its json":
        (first / "partial-0002.json").write_text("{}")
    else:
        victim.unlink()
    taken, _ = count_steps
    taken.clear()
    again = run_train(order_of(tmp_path, init, "again", earlier=[first]), settings)
    assert len(taken) == 4
    assert again.files == whole.files


def test_the_newest_whole_one_that_fits_is_found(tmp_path):
    def leave(attempt, steps, **changes):
        folder = tmp_path / attempt / f"partial-{steps:04d}"
        (folder / "checkpoint").mkdir(parents=True)
        (folder / "rank-0.pt").write_bytes(b"1234")
        facts = {
            "folder": str(folder),
            "made_from": "x",
            "num_ranks": 1,
            "reports": [{}] * steps,
            "files": [{"path": "rank-0.pt", "size_bytes": 4, "digest": "d"}],
        }
        folder.with_suffix(".json").write_text(json.dumps(facts | changes))

    leave("a", 3)
    leave("b", 1)
    leave("c", 7, made_from="y")
    leave("d", 8, num_ranks=2)
    leave("e", 9, files=[{"path": "rank-0.pt", "size_bytes": 5, "digest": "d"}])
    attempts = [str(tmp_path / name) for name in "abcdef"]
    found = find_partial(attempts, made_from="x", num_ranks=1)
    assert found is not None and found.folder.endswith("a/partial-0003")
    assert find_partial(attempts[1:2], made_from="x", num_ranks=1).folder.endswith("b/partial-0001")
    assert find_partial(attempts, made_from="z", num_ranks=1) is None


def test_a_trainer_that_stays_open_makes_no_use_of_it(tmp_path, made_models):
    """The oracle of the equality tests saves in between too, and goes on as if it had not."""
    settings = trains.tiny_settings(tmp_path, train=TRAIN)
    plain = trains.tiny_settings(tmp_path, train=TRAIN | {"save_steps": None})
    init = made_models(settings)
    results = []
    for name, which in (("a", settings), ("b", plain)):
        order = order_of(tmp_path, init, name)
        trainer = open_trainer(order, which)
        results.append(train_iteration(trainer, order))
        trainer.close()
    assert results[0].files == results[1].files


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data", "pipeline"])
def test_two_ranks_that_are_killed_go_on_together(tmp_path, made_models, layout):
    megatron = {"pipeline_model_parallel_size": 2} if layout == "pipeline" else {}
    settings = trains.tiny_settings(
        tmp_path, train=TRAIN | {"num_ranks": 2, "micro_batch_size": 2}, megatron=megatron
    )
    init = made_models(settings)

    def train(name, **facts):
        return trains.train_in_ranks(
            tmp_path, settings, init, num=2, name=name, reference=init, **facts
        )

    ((_, whole),) = train("whole")
    train("first", die_before=3)
    first = tmp_path / "first-0"
    assert [path.name for path in first.glob("partial-*.json")] == ["partial-0003.json"]
    assert (first / "partial-0003" / "before.safetensors").is_file()
    ((_, resumed),) = train("second", earlier=(str(first),))
    assert (resumed.files, resumed.content) == (whole.files, whole.content)
    log = "\n".join(path.read_text() for path in (tmp_path / "second-0").glob("*.log"))
    assert not (tmp_path / "second-0" / "partial-0001.json").exists(), log
