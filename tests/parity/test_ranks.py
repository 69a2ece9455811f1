"""One rank and two: the same losses, norms and weights, whatever the layout (gloo)."""

from pathlib import Path

import pytest
import torch
import trains
from safetensors.torch import load_file

from slurm_rl.stages.train import run_train

LAYOUTS = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "interleaved": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
}
#: Layouts that are tried on packed samples, against padded ones of one rank; and with more layers.
PACKED = {"context": 20, "interleaved": 40}
LAYERS = {"interleaved": 4}
#: Adam turns a tiny difference of a tiny gradient into one of the size of the rate.
RATE = 1e-3
#: What must agree between layouts, with its tolerance.
COMPARED = {
    "train/loss": 1e-5,
    "train/pg_loss": 1e-5,
    "train/kl_loss": 1e-5,
    "train/entropy_loss": 1e-5,
    "train/train_rollout_logprob_abs_diff": 1e-5,
    "train/train_rollout_logprob_abs_diff_max": 1e-5,
    # A bin of its histogram is 0.6 % wide.
    "train/train_rollout_logprob_abs_diff_p99": 6e-3,
    "train/grad_norm": 1e-4,
}


def layout_settings(root, layout, *, ranks):
    """Settings of `layout` on two ranks; on one rank those that it is compared with."""
    # Tied embeddings: under pipelines two ranks hold them, in a bucket of their own. Qwen2:
    # biases whose sizes leave padding between the buckets. Qwen3: norms of queries and keys,
    # whose gradients tensor ranks must sum.
    train = {"num_ranks": ranks, "use_kl_loss": True, "kl_loss_coef": 0.1}
    if ranks > 1 and layout in PACKED:
        train |= {
            "max_tokens_per_gpu": PACKED[layout],
            "log_probs_max_tokens_per_gpu": 2 * PACKED[layout],
        }
    return trains.tiny_settings(
        root,
        family="qwen2" if "pipeline_model_parallel_size" in LAYOUTS[layout] else "qwen3",
        tied=True,
        model={"num_hidden_layers": LAYERS.get(layout, 2)},
        train=train,
        megatron=LAYOUTS[layout] if ranks > 1 else {},
    )


def assert_agree(found, expected):
    assert found.metrics["train/first_ratio_diff_max"] < 1e-4
    for name, tolerance in COMPARED.items():
        wanted = pytest.approx(expected.metrics[name], rel=tolerance, abs=tolerance)
        assert found.metrics[name] == wanted, name


def weights(order):
    return load_file(Path(order.attempt_dir) / "weights" / "model.safetensors")


def largest_difference(a, b):
    assert set(a) == set(b)
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, made_models):
    """`one_rank(layout)`: the model that it is tried on, and two iterations by one rank."""
    known = {}

    def train(layout):
        root = tmp_path_factory.mktemp(layout)
        settings = layout_settings(root, layout, ranks=1)
        key = settings.init_model.model_dump_json()
        if key not in known:
            init, done = made_models(settings), []
            before = init
            for i in range(2):
                order = trains.train_order(root, before, f"a-{i}", reference=init)
                done.append((order, run_train(order, settings)))
                before = trains.trained(*done[-1])
            known[key] = init, done
        return known[key]

    return train


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_and_resume_as_one_does(tmp_path, one_rank, layout):
    init, ((_, first), (order, second)) = one_rank(layout)
    settings = layout_settings(tmp_path, layout, ranks=2)
    stayed = trains.train_in_ranks(
        tmp_path, settings, init, num=2, name="stayed", iterations=2, reference=init
    )
    assert_agree(stayed[0][1], first)
    assert_agree(stayed[1][1], second)
    for done in stayed:
        trains.assert_probe(*done)
    assert largest_difference(weights(stayed[1][0]), weights(order)) < RATE

    before = trains.trained(*stayed[0])
    ((_, resumed),) = trains.train_in_ranks(
        tmp_path, settings, before, num=2, name="resumed", reference=init
    )
    assert [entry for entry in resumed.files if entry not in stayed[1][1].files] == []
    assert resumed.content == stayed[1][1].content


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "pipeline", "interleaved"])
def test_a_checkpoint_of_one_rank_goes_on_in_another_layout(tmp_path, one_rank, layout):
    init, (first, (order, second)) = one_rank(layout)
    settings = layout_settings(tmp_path, layout, ranks=2)
    ((moved, result),) = trains.train_in_ranks(
        tmp_path, settings, trains.trained(*first), num=2, name="moved", reference=init
    )
    assert_agree(result, second)
    assert largest_difference(weights(moved), weights(order)) < RATE
    # And back again to one rank.
    alone = layout_settings(tmp_path, layout, ranks=1)
    back = trains.train_order(tmp_path, trains.trained(moved, result), "back", reference=init)
    assert torch.isfinite(torch.tensor(run_train(back, alone).metrics["train/loss"]))


@pytest.mark.slow
@pytest.mark.parametrize("num", [13, 9])
def test_a_last_step_that_is_smaller_is_the_same_on_two_ranks(tmp_path, made_models, num):
    """Steps of 8: of 13 samples the last has 5, uneven over two ranks; of 9 it has one, and a rank
    has none."""
    found = []
    for ranks in (1, 2):
        root = tmp_path / str(ranks)
        root.mkdir()
        settings = trains.tiny_settings(
            root, tied=True, train={"num_ranks": ranks}, megatron={"overlap_grad_reduce": True}
        )
        init = made_models(settings)
        samples = trains.made_up_samples(0, num=num)
        trains.make_rollout(root, init.content["weights"], samples=samples)
        found += trains.train_in_ranks(root, settings, init, num=ranks, name="odd")
    (one, first), (two, second) = found
    names = [name for name in COMPARED if name in first.metrics]
    assert len(names) > 4
    for name in names:
        wanted = pytest.approx(first.metrics[name], rel=COMPARED[name], abs=COMPARED[name])
        assert second.metrics[name] == wanted, name
    assert largest_difference(weights(one), weights(two)) < RATE
    for result in (first, second):
        assert result.content["optimizer_steps"] == result.content["schedule_step"] == 2
        assert result.content["num_samples_trained"] == num


@pytest.mark.slow
def test_one_rank_of_two_is_an_error_never_a_world_of_one(tmp_path, one_rank):
    init, _ = one_rank("data")
    settings = layout_settings(tmp_path, "data", ranks=2)
    with pytest.raises(AssertionError, match="WORLD_SIZE = 1, but the configuration makes 2"):
        trains.train_in_ranks(tmp_path, settings, init, num=1, name="alone", reference=init)
