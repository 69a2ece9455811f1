from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm_rl.config.load import load_config, load_settings
from slurm_rl.config.schema import Settings
from slurm_rl.config.shaping import settings_digest
from slurm_rl.errors import ConfigError

Write = Callable[..., Path]
Load = Callable[..., Settings]
Complaints = Callable[..., list[str]]
Changed = Callable[..., dict[str, Any]]
CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.name)
def test_every_shipped_config_loads(file: Path) -> None:
    if file.name.startswith("site-"):
        users = [
            other
            for other in CONFIGS.glob("*.yaml")
            if f"\nsite: ./{file.name}\n" in other.read_text()
        ]
        assert users, "a site file that no shipped config names is not tested"
        assert all(load_config(user).site_path == file for user in users)
    else:
        assert load_settings(file).run.name


def test_the_cluster_config_is_realistic() -> None:
    settings = load_settings(CONFIGS / "cluster-qwen3-4b.yaml")
    assert settings.train.slurm.nodes == 2
    assert settings.train.slurm.gpus_per_node == 8
    assert settings.train.megatron["lr"] == 1e-6
    assert settings.container.runtime == "pyxis"
    assert str(settings.run_dir) == "/lustre/rl/runs/q3-4b-gsm8k"


def test_precedence_is_defaults_site_file_set(write: Write, changed: Changed) -> None:
    write("max_array_tasks: 10\nchain: {window: 5, lease_s: 90}\nenv: {A: 1, B: 1}\n", "site.yaml")
    data = changed(chain={"window": 6}, env={"B": 2}, site="./site.yaml")
    loaded = load_config(write(data), ["chain.window=7", "env.C=3"])
    chain = loaded.settings.chain
    assert (chain.window, chain.lease_s, chain.heartbeat_s) == (7, 90, 5.0)
    assert loaded.settings.max_array_tasks == 10
    assert loaded.settings.env == {"A": 1, "B": 2, "C": 3}
    assert "max_array_tasks: 10" in loaded.site_text


def test_the_text_is_kept_as_it_was_written(write: Write, changed: Changed) -> None:
    text = "# why\n" + write(changed()).read_text()
    assert load_config(write(text)).text == text


def test_set_takes_yaml_and_may_make_sections(load: Load) -> None:
    settings = load(
        "train.megatron.lr=1e-5", "rollout.slurm.time=04:00:00", "setup=[a, b]", "seed=7"
    )
    assert settings.train.megatron["lr"] == 1e-5
    assert settings.rollout.slurm.time == "04:00:00"
    assert (settings.setup, settings.seed) == (["a", "b"], 7)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.shrads=3", "--set rollout.shrads=3: rollout.shrads is not a setting; did you mean rollout.shards?"),
        ("seed=x", '--set seed=x: seed = "x" must be a whole number; change it'),
        ("seed.x=1", '--set seed.x=1: seed = {"x": 1} must be a whole number; change it'),
        ("seed", "--set seed: is not name=value; write --set rollout.shards=4"),
        ("=3", "--set =3: is not name=value; write --set rollout.shards=4"),
        ("seed=[", "--set seed=[:1:2: not readable as YAML:"),
    ],
)  # fmt: skip
def test_a_wrong_set_is_named_as_it_was_typed(load: Load, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert str(caught.value).startswith(message)


def test_relative_paths_are_relative_to_the_file_that_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: Changed
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "cwd").mkdir()
    site = tmp_path / "shared" / "site.yaml"
    site.write_text("env_file: secrets.env\ncontainer: {runtime: apptainer, image: ./x.sif}\n")
    data = changed(
        site="shared/site.yaml",
        hf_checkpoint="models/m",
        code=["./mine"],
        rollout__prompt_data="../p.jsonl",
        run__dir="runs",
    )
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(data))
    monkeypatch.chdir(tmp_path / "cwd")
    settings = load_settings("../a.yaml", ["sbatch_template=job.sh"])
    assert settings.hf_checkpoint == f"{tmp_path}/models/m"
    assert settings.code == [f"{tmp_path}/mine"]
    assert settings.rollout.prompt_data == f"{tmp_path.parent}/p.jsonl"
    assert settings.env_file == f"{tmp_path}/shared/secrets.env"
    assert settings.container.image == f"{tmp_path}/shared/x.sif"
    assert settings.run.dir == f"{tmp_path}/cwd/runs"
    assert settings.sbatch_template == f"{tmp_path}/cwd/job.sh"


@pytest.mark.parametrize("nothing", ["{}", "null", ""])
def test_entries_by_name_are_taken_out_by_set(load: Load, nothing: str) -> None:
    values = {"eval": {"a": {"prompt_data": "/d/a.jsonl"}}, "env": {"X": "1"}}
    assert list(load(**values).eval) == ["a"]
    settings = load(f"eval={nothing}", **values)
    assert (settings.eval, settings.env) == ({}, {"X": "1"})
    assert load(f"env={nothing}", **values).env == {}
    again = load(f"eval={nothing}", "eval.b.prompt_data=/d/b.jsonl", **values)
    assert list(again.eval) == ["b"]


def test_null_in_a_file_is_no_entries_and_no_section(write: Write, changed: Changed) -> None:
    data = changed()
    data |= {"eval": None, "services": None, "rollout": {**data["rollout"], "sglang": None}}
    settings = load_settings(write(data))
    assert (settings.eval, settings.services, settings.rollout.sglang) == ({}, {}, {})
    with pytest.raises(ConfigError, match="chain = null must be a section"):
        load_settings(write({**data, "chain": None}))


def test_an_empty_section_in_the_runs_file_takes_nothing_from_the_sites(
    write: Write, changed: Changed
) -> None:
    write({"env": {"X": "1"}, "slurm": {"partition": "p"}}, "site.yaml")
    path = write(changed(site="site.yaml", env={}, slurm={}))
    settings = load_settings(path)
    assert (settings.env, settings.slurm.partition) == ({"X": "1"}, "p")
    settings = load_settings(path, ["env={}", "slurm={}"])
    assert (settings.env, settings.slurm.partition) == ({}, None)


def test_variables_are_expanded_in_paths_and_nowhere_else(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("HOME", "/home/me")
    settings = load(
        run__dir="$SCRATCH/runs",
        hf_checkpoint="~/m",
        container={"runtime": "apptainer", "image": "docker://a/b", "bind": ["${SCRATCH}:/s"]},
        setup=["cd $SCRATCH"],
        env={"X": "$SCRATCH"},
    )
    assert settings.run.dir == "/scratch/me/runs"
    assert settings.hf_checkpoint == "/home/me/m"
    assert settings.container.bind == ["/scratch/me:/s"]
    assert settings.container.image == "docker://a/b"
    assert settings.setup == ["cd $SCRATCH"]
    assert settings.env == {"X": "$SCRATCH"}


def test_an_unset_variable_is_named(complaints: Complaints) -> None:
    assert complaints(hf_checkpoint="$NOWHERE_AT_ALL/m") == [
        'hf_checkpoint = "$NOWHERE_AT_ALL/m" uses $NOWHERE_AT_ALL, which is not set;'
        " export NOWHERE_AT_ALL or write the path out"
    ]


A = {"name": "a", "path": "/d/a.jsonl"}
B = {"prompt_data": "/d/b.jsonl"}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"rollout__shrads": 2}, "rollout.shrads is not a setting; did you mean rollout.shards?"),
        ({"rollout__global_batch_size": 2}, "rollout.global_batch_size is not a setting; did you mean train.global_batch_size?"),
        ({"train__lr": 1e-6}, "train.lr is not a setting; did you mean train.megatron.lr?"),
        ({"train__tensor_model_parallel_size": 2}, "train.tensor_model_parallel_size is not a setting; did you mean train.megatron.tensor_model_parallel_size?"),
        ({"rollout__tp_size": 2}, "rollout.tp_size is not a setting; did you mean rollout.sglang.tp_size?"),
        ({"chian": {}}, "chian is not a setting; did you mean chain?"),
        ({"run__zzzzzz": 1}, "run.zzzzzz is not a setting; run takes name, dir"),
        ({"seed": "3"}, 'seed = "3" must be a whole number; take the quotes off: 3'),
        ({"seed": True}, "seed = true must be a whole number; change it"),
        ({"seed": 1.5}, "seed = 1.5 must be a whole number; change it"),
        ({"deterministic": "yes"}, 'deterministic = "yes" must be true or false; write true or false'),
        ({"deterministic": 1}, "deterministic = 1 must be true or false; write true or false"),
        ({"chain__lease_s": True}, "chain.lease_s = true must be a number; change it"),
        ({"chain__lease_s": "60"}, 'chain.lease_s = "60" must be a number; take the quotes off: 60'),
        ({"slurm__time": 30}, 'slurm.time = 30 must be text; put it in quotes: "30"'),
        ({"slurm__gpus_per_node": 1.5}, "slurm.gpus_per_node = 1.5 must be a whole number or text;"),
        ({"env__X": [1]}, "env.X = [1] must be text or a whole number or a number; change it"),
        ({"rollout__shards": 0}, "rollout.shards = 0 must be above 0; raise it"),
        ({"rollout__rollout_top_p": 1.5}, "rollout.rollout_top_p = 1.5 must be at most 1; lower it"),
        ({"launcher": "slrum"}, 'launcher = "slrum" must be one of slurm, local; did you mean slurm?'),
        ({"run__name": "a b"}, 'run.name = "a b" must be letters, digits, - and _, at most 40, the first a letter or digit; change it'),
        ({"code": "mine"}, 'code = "mine" must be a list; write [mine]'),
        ({"rollout__time": "1"}, "rollout.time is not a setting; did you mean rollout.slurm.time?"),
        ({"setup": [1]}, 'setup[0] = 1 must be text; put it in quotes: "1"'),
        ({"chain": 3}, "chain = 3 must be a section (key: value); change it"),
        ({"rollout__prompt_data": None}, "rollout.prompt_data is missing; add it"),
        ({"train__megatron": [1]}, "train.megatron = [1] must be a mapping (key: value); change it"),
        # In a mixture, and where the user named the place, the place is the user's.
        ({"rollout__prompt_data": [A, A | {"wieght": 2}]}, "rollout.prompt_data[1].wieght is not a setting; did you mean rollout.prompt_data[1].weight?"),
        ({"rollout__prompt_data": [A | {"weight": -1}]}, "rollout.prompt_data[0].weight = -1 must be above 0; raise it"),
        ({"rollout__prompt_data": [A | {"prompt_data": "x"}]}, "rollout.prompt_data[0].prompt_data is not a setting; did you mean rollout.prompt_data[0].path?"),
        ({"rollout__prompt_data": [A | {"task": "x"}]}, "rollout.prompt_data[0].task is not a setting; rollout.prompt_data[0] takes metadata_key, options, tool_key, label_key and 15 more: docs/configuration.md"),
        ({"rollout__prompt_data": [{"path": "/x.jsonl"}]}, "rollout.prompt_data[0].name is missing; add it"),
        ({"rollout__prompt_data": [A, "/x.jsonl"]}, 'rollout.prompt_data[1] = "/x.jsonl" must be a section (key: value); write name: …, path: …'),
        ({"rollout__prompt_data": {"str": "/x.jsonl"}}, 'rollout.prompt_data = {"str": "/x.jsonl"} must be text or a list; make it the item of a list: begin it with -'),
        ({"rollout__prompt_data": 3}, 'rollout.prompt_data = 3 must be text or a list; put it in quotes: "3"'),
        ({"eval__a": B | {"inteval": 2}}, "eval.a.inteval is not a setting; did you mean eval.a.interval?"),
        ({"eval__a": B | {"path": "x"}}, "eval.a.path is not a setting; did you mean eval.a.prompt_data?"),
        ({"eval__a": B | {"rollout_batch_size": 2}}, "eval.a.rollout_batch_size is not a setting; did you mean rollout.rollout_batch_size?"),
        ({"eval__a": B | {"container": {"immage": "x"}}}, "eval.a.container.immage is not a setting; did you mean eval.a.container.image?"),
        ({"eval__a": B | {"rollout_stop": [3]}}, 'eval.a.rollout_stop[0] = 3 must be text; put it in quotes: "3"'),
        ({"eval": {"a b": B}}, 'eval.a b = "a b" must be letters, digits,'),
        ({"services__rm": {"url": "http://a", "retry": 3}}, "services.rm.retry is not a setting; did you mean services.rm.retries?"),
        ({"services__rm": {"url": "http://a", "zzz": 3}}, "services.rm.zzz is not a setting; services.rm takes url, url_file, health,"),
        ({"rollout__rewards": [{"rm_tpe": "f1"}]}, "rollout.rewards[0].rm_tpe is not a setting; did you mean rollout.rewards[0].rm_type?"),
    ],
)  # fmt: skip
def test_what_one_value_gets_wrong_is_said_in_one_line(
    complaints: Complaints, values: dict[str, object], line: str
) -> None:
    (found,) = complaints(**values)
    assert found.startswith(line)
    for leaked in ("pydantic", "http", "Input should", "validation"):
        assert leaked not in found


def test_a_null_value_is_said_to_be_empty(write: Write, changed: Changed) -> None:
    text = write(changed()).read_text().replace("num_rollout: 3", "num_rollout:")
    with pytest.raises(ConfigError, match=r"num_rollout = null must be a whole number; give it a"):
        load_config(write(text))


def test_every_problem_gets_its_own_line_with_the_line_in_the_file(write: Write) -> None:
    file = write("seed: x\nchain:\n  window: 0\n  pakc: stage\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    lines = str(caught.value).split("\n")
    assert f'{file}:1: seed = "x" must be a whole number; change it' in lines
    assert f"{file}:3: chain.window = 0 must be above 0; raise it" in lines
    assert f"{file}:4: chain.pakc is not a setting; did you mean chain.pack?" in lines
    assert f"{file}: train is missing; add it" in lines
    assert len(lines) == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; write one with `slurm-rl init`"),
        ("# nothing\n", "is empty; write one with `slurm-rl init`"),
        ("- a\n", "must be a mapping (key: value); see configs/"),
        ("just text", "must be a mapping (key: value); see configs/"),
    ],
)
def test_a_file_that_is_no_config(write: Write, text: str, message: str) -> None:
    file = write(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value) == f"{file}: {message}"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; check the path, or write one"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigError, match="byte 3 is not UTF-8; save the file as UTF-8"):
        load_config(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("rollout: {shards: 2}\n", "site.yaml:1: rollout belongs to a run, not to a site; move it to the run's file"),
        ("a: 1\nslrum: {}\n", "site.yaml:2: slrum is not a setting of a site file; did you mean slurm?"),
        ("slurm: {account: 3}\n", 'site.yaml:1: slurm.account = 3 must be text; put it in quotes: "3"'),
        ("env_file: $NOT_SET_HERE/x\n", "site.yaml:1: env_file ="),
    ],
)  # fmt: skip
def test_errors_of_a_site_file_name_it(
    write: Write, site: str, message: str, changed: Changed
) -> None:
    write(site, "site.yaml")
    with pytest.raises(ConfigError) as caught:
        load_config(write(changed(site="site.yaml")))
    assert message in str(caught.value)


def test_a_site_that_is_not_there(write: Write, changed: Changed) -> None:
    with pytest.raises(ConfigError, match=r"gone.yaml: there is no such file; check `site` of"):
        load_config(write(changed(site="gone.yaml")))


def test_set_may_name_another_site(write: Write, tmp_path: Path, changed: Changed) -> None:
    write("max_array_tasks: 10\n", "one.yaml")
    write("max_array_tasks: 20\n", "two.yaml")
    loaded = load_config(write(changed(site="one.yaml")), [f"site={tmp_path}/two.yaml"])
    assert loaded.settings.max_array_tasks == 20


def test_settings_survive_json(load: Load) -> None:
    settings = load(slurm={"signal_s": 60, "hint": "nomultithread"}, env={"A": 1, "B": 1.5})
    again = Settings.model_validate_json(settings.model_dump_json())
    assert again == settings
    assert settings_digest(again) == settings_digest(settings)


def test_reading_a_config_is_quick_and_imports_nothing_heavy() -> None:
    """Quick beside what it is made of: a limit in seconds would be one of this machine's load."""
    code = (
        "import time; began = time.process_time()\n"
        "import pydantic, yaml; pydantic.BaseModel\n"
        "parts = time.process_time() - began\n"
        "import slurm_rl.config.load, sys\n"
        "took = time.process_time() - began\n"
        "heavy = {'torch', 'megatron', 'transformers', 'sglang', 'submitit', 'numpy', 'rich'}\n"
        "print(took / parts, *sorted(heavy & set(sys.modules)))"
    )
    ratios = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        ratio, *heavy = done.stdout.split()
        assert heavy == []
        ratios.append(float(ratio))
    assert min(ratios) < 4.0
