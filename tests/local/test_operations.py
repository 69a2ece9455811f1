"""What a person does to a run on the way: set, rewind, retry, adopt, explain."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from toy.commands import PROGRAM, ToyRun, wait_until
from toy.program import fail_stage

pytestmark = pytest.mark.timeout(120)


def say(run: ToyRun, *argv: str, code: int = 0) -> str:
    done = run.command(*argv)
    assert done.returncode == code, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def finish(run: ToyRun, command: str = "resume") -> None:
    say(run, command, str(run.root), "--wait")


def commit(run: ToyRun, place: str) -> dict[str, dict[str, object]]:
    loaded: dict[str, dict[str, object]] = json.loads(
        (run.root / "iterations" / place / "COMMIT").read_bytes()
    )
    return loaded


def test_a_rewind_makes_the_same_history_again_and_keeps_the_old(
    toy_run: ToyRun, undisturbed: dict[str, str]
) -> None:
    say(toy_run, "submit", str(toy_run.config), "--wait")
    told = say(toy_run, "rewind", str(toy_run.root), "--to", "1")
    assert "set aside, not erased" in told
    assert "paused" in say(toy_run, "explain", str(toy_run.root))
    finish(toy_run)
    digests = toy_run.digests()
    assert digests.items() >= undisturbed.items(), "what was set aside is still there"
    for stage in ("000001/rollout", "000002/train"):
        assert digests[f"{stage}.t1"] == undisturbed[f"{stage}.t0"]
    assert "000000/train.t1" not in digests
    say(toy_run, "verify", str(toy_run.root))
    assert "is not one of 0 to 2" in say(toy_run, "rewind", str(toy_run.root), "--to", "3", code=2)


def test_a_retry_of_a_committed_stage_begins_there(toy_run: ToyRun) -> None:
    say(toy_run, "submit", str(toy_run.config), "--wait")
    say(toy_run, "retry", str(toy_run.root), "-i", "1", "--stage", "train")
    finish(toy_run)
    assert {"000001/train.t1", "000002/rollout.t1"} <= toy_run.digests().keys()
    assert "000001/rollout.t1" not in toy_run.digests()
    told = say(toy_run, "retry", str(toy_run.root), "-i", "1", "--stage", "critic", code=2)
    assert "it has rollout, train" in told


def test_a_retry_of_a_failed_stage_gives_its_attempts_back(toy_run: ToyRun) -> None:
    toy_run.write(chain__max_attempts=2)
    say(toy_run, "submit", str(toy_run.config), code=0)
    fail_stage(toy_run.root, "train", 1, how="system", times=3)
    halted = toy_run.command("watch", str(toy_run.root))
    assert halted.returncode == 4, halted.stderr
    told = say(toy_run, "explain", str(toy_run.root))
    assert "halted" in told and "2 attempts ended without a commit" in told and "log" in told
    say(toy_run, "retry", str(toy_run.root), "-i", "1", "--stage", "train")
    finish(toy_run)


def test_settings_change_from_the_first_untouched_iteration_on(
    toy_run: ToyRun, undisturbed: dict[str, str]
) -> None:
    say(toy_run, "submit", str(toy_run.config), "--wait")
    root = str(toy_run.root)
    told = say(toy_run, "set", root, "num_rollout=4", "rollout.n_samples_per_prompt=3",
               "train.global_batch_size=6")  # fmt: skip
    assert "from i0003.rollout on" in told
    finish(toy_run)
    digests = toy_run.digests()
    assert digests.items() >= undisturbed.items(), "what was committed stays"
    before, after = commit(toy_run, "000002/rollout.t0"), commit(toy_run, "000003/rollout.t0")
    assert (before["content"]["num_samples"], after["content"]["num_samples"]) == (4, 6)
    assert before["content"]["settings"] != after["content"]["settings"]
    change = json.loads(next((toy_run.root / "control").glob("change-*")).read_bytes())
    assert (change["iteration"], change["stage"]) == (3, "rollout") and change["values"][
        "rollout.n_samples_per_prompt"
    ] == 3
    say(toy_run, "verify", root)
    assert "already" in say(toy_run, "set", root, "num_rollout=4", code=3)


def test_a_kl_loss_from_an_iteration_on_leaves_the_ones_before_as_they_are(
    toy_run: ToyRun, undisturbed: dict[str, str]
) -> None:
    """What was committed was made without a reference, and is no other history for that."""
    say(toy_run, "submit", str(toy_run.config), "--wait")
    root = str(toy_run.root)
    say(toy_run, "set", root, "num_rollout=4", "train.use_kl_loss=true", "train.kl_loss_coef=0.1")
    finish(toy_run)
    assert toy_run.digests().items() >= undisturbed.items()
    assert "reference" not in commit(toy_run, "000002/train.t0")["content"]["parents"]
    assert "reference" in commit(toy_run, "000003/train.t0")["content"]["parents"]
    assert "all as committed" in say(toy_run, "verify", root)


def test_a_section_that_was_not_set_can_be(toy_run: ToyRun) -> None:
    say(toy_run, "submit", str(toy_run.config))
    say(toy_run, "set", str(toy_run.root), "rollout.container.runtime=none")
    say(toy_run, "status", str(toy_run.root))
    finish(toy_run)


def test_a_run_that_is_made_longer_while_its_last_stage_works_goes_on(toy_run: ToyRun) -> None:
    hold = toy_run.folder / "hold"
    hold.write_text("5")  # all but the last stage may end
    watcher = toy_run.start("submit", str(toy_run.config), "--wait", TOY_HOLD=str(hold))
    last = toy_run.root / "iterations" / "000002" / "train.t0"
    wait_until((last / "claim.0001").exists, seconds=90)
    say(toy_run, "set", str(toy_run.root), "num_rollout=4")
    hold.write_text("99")
    out, err = watcher.communicate(timeout=100)
    assert watcher.returncode == 0, err
    assert "i0003.train" in out and "000003/train.t0" in toy_run.digests()


def halt_in_one_of_two_shards(toy_run: ToyRun) -> None:
    toy_run.write(rollout__shards=2)
    say(toy_run, "submit", str(toy_run.config))
    fail_stage(toy_run.root, "rollout", 1, how="user")
    halted = toy_run.command("watch", str(toy_run.root))
    assert halted.returncode == 4, halted.stderr
    shards = toy_run.root / "iterations" / "000001" / "rollout.t0"
    wait_until(lambda: len(list(shards.glob("shard-*/COMMIT"))) == 1)
    wait_until(lambda: not toy_run.running())


def test_mended_code_holds_for_the_shard_that_failed(toy_run: ToyRun, tmp_path: Path) -> None:
    halt_in_one_of_two_shards(toy_run)
    code = tmp_path / "mine"
    code.mkdir()
    (code / "reward.py").write_text("ONE = 1\n")
    told = say(toy_run, "set", str(toy_run.root), f"code={code}")
    assert "from i0001.rollout on" in told
    finish(toy_run)
    orders = toy_run.root.glob("iterations/000001/rollout.t0/shard-*/a*/order.json")
    with_code = [bool(json.loads(path.read_bytes())["code_dir"]) for path in orders]
    assert sorted(with_code) == [False, False, True], "two before, and the one that was mended"


def test_settings_change_for_no_half_of_a_stage(toy_run: ToyRun) -> None:
    halt_in_one_of_two_shards(toy_run)
    say(toy_run, "set", str(toy_run.root), "rollout.rollout_temperature=0.7")
    finish(toy_run)
    say(toy_run, "verify", str(toy_run.root))
    settings = [commit(toy_run, f"00000{i}/rollout.t0")["content"]["settings"] for i in range(3)]
    assert settings[0] == settings[1] != settings[2]


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("seed=3", "seed = 1234 is fixed when a run is made"),
        ("rollout.shards=2", "is fixed when a run is made"),
        ("chain.pack=iteration", "is fixed when a run is made"),
        ("num_rollout=2", "is less than 3"),
        ("rollout.n_sample_per_prompt=3", "n_samples_per_prompt"),
        ("chain.window=zero", "chain.window"),
        ("code=./nowhere", "is not a folder"),
        ("code=", "names no folder"),
        ("what", "is not name=value"),
    ],
)
def test_what_cannot_be_set_is_one_line(toy_run: ToyRun, assignment: str, said: str) -> None:
    say(toy_run, "submit", str(toy_run.config))
    told = say(toy_run, "set", str(toy_run.root), assignment, code=2)
    assert said in told and len(told.strip().splitlines()) == 1, told
    assert not list((toy_run.root / "control").glob("change-*"))


def test_code_that_holds_the_run_or_lacks_what_is_named_is_not_adopted(
    toy_run: ToyRun, tmp_path: Path
) -> None:
    say(toy_run, "submit", str(toy_run.config))
    told = say(toy_run, "set", str(toy_run.root), f"code={toy_run.root.parent}", code=2)
    assert "holds the run itself" in told and "name the folder of your package" in told
    code = tmp_path / "mine"
    code.mkdir()
    (code / "reward.py").write_text("def one(args, sample): return 1.0\n")
    named = ["rollout.rm_type=null", "rollout.custom_rm_path=mine.reward.won"]
    told = say(toy_run, "set", str(toy_run.root), f"code={code}", *named, code=2)
    assert "defines no won; did you mean mine.reward.one?" in told
    assert not list((toy_run.root / "control").glob("change-*"))
    named[1] = "rollout.custom_rm_path=mine.reward.one"
    say(toy_run, "set", str(toy_run.root), f"code={code}", *named)
    (code / "reward.py").write_text("def two(args, sample): return 2.0\n")
    told = say(toy_run, "set", str(toy_run.root), f"code={code}", code=2)
    assert "defines no one" in told
    # The run has what was adopted, whatever the folder holds meanwhile.
    say(toy_run, "set", str(toy_run.root), "rollout.rollout_temperature=0.7")
    told = say(toy_run, "set", str(toy_run.root), "rollout.custom_rm_path=mine.reward.two", code=2)
    assert "defines no two" in told


def test_code_is_adopted_and_an_edited_snapshot_halts(toy_run: ToyRun, tmp_path: Path) -> None:
    code = tmp_path / "mine"
    code.mkdir()
    (code / "reward.py").write_text("ONE = 1\n")
    say(toy_run, "submit", str(toy_run.config), "--wait")
    assert "the code" in say(toy_run, "set", str(toy_run.root), f"code={code}", "num_rollout=5")
    snapshot = next((toy_run.root / "code").glob("*/mine/reward.py"))
    snapshot.write_text("ONE = 2\n")
    done = toy_run.command("resume", str(toy_run.root), "--wait")
    assert done.returncode == 4 and "snapshot of your code was changed" in done.stderr, done.stderr
    (code / "reward.py").write_text("ONE = 3\n")
    say(toy_run, "set", str(toy_run.root), f"code={code}")
    finish(toy_run)
    orders = [
        json.loads(p.read_bytes()) for p in toy_run.root.glob("iterations/000003/*/a*/order.json")
    ]
    assert Path(orders[-1]["code_dir"], "mine", "reward.py").read_text() == "ONE = 3\n"


def test_a_budget_that_has_passed_halts_and_a_new_one_goes_on(toy_run: ToyRun) -> None:
    toy_run.write(chain__budget={"until": "2020-01-01T00:00"})
    told = say(toy_run, "submit", str(toy_run.config), code=4)
    assert "chain.budget.until = 2020-01-01T00:00 has passed" in told
    say(toy_run, "set", str(toy_run.root), "chain.budget.until=2099-01-01T00:00")
    finish(toy_run)


@pytest.fixture
def colleague() -> list[str]:
    """What runs a command as another user of group `daemon`."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("another user can be played by root alone")
    # May read what root may: this very Python may lie in root's home. Writing is what matters.
    may = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return ["setpriv", "--reuid=nobody", "--regid=daemon", "--clear-groups", *may]


def test_a_colleague_may_look_adopt_and_go_on(
    toy_run: ToyRun, undisturbed: dict[str, str], colleague: list[str]
) -> None:
    for folder in (toy_run.folder, *list(toy_run.folder.parents)[:3]):
        folder.chmod(0o755)
    toy_run.write()
    text = json.dumps({"name": "toy", "dir": str(toy_run.folder / "runs"), "group": "daemon"})
    say(toy_run, "submit", str(toy_run.config), "--set", f"run={text}")
    wait_until(lambda: (toy_run.root / "iterations/000000/init.t0/COMMIT").exists())
    say(toy_run, "cancel", str(toy_run.root))
    wait_until(lambda: not toy_run.running())

    def theirs(*argv: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if k != "HOME"}
        argv = (*colleague, PROGRAM, *argv)
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100)

    root = str(toy_run.root)
    assert theirs("status", root).returncode == 0
    refused = theirs("resume", root)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "belongs to root, and you are nobody" in refused.stderr and "adopt" in refused.stderr
    assert theirs("adopt", root).returncode == 0
    done = theirs("resume", root, "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    assert toy_run.digests() == undisturbed
    assert "belongs to nobody" in say(toy_run, "pause", root, code=2)


def test_explain_says_that_a_run_moves_and_what_it_lacks(toy_run: ToyRun) -> None:
    hold = toy_run.folder / "hold"
    hold.write_text("1")
    toy_run.command("submit", str(toy_run.config), TOY_HOLD=str(hold))
    told = say(toy_run, "explain", str(toy_run.root))
    assert "job" in told and ("running" in told or "waits for job" in told)
    say(toy_run, "cancel", str(toy_run.root))
    wait_until(lambda: not toy_run.running())
    (toy_run.root / "control" / "PAUSE").unlink()
    told = say(toy_run, "explain", str(toy_run.root))
    assert (
        f"no job of it is in the queue, so nothing moves it: slurm-rl resume {toy_run.root}" in told
    )
    finish(toy_run)
    assert "complete" in say(toy_run, "explain", str(toy_run.root))
