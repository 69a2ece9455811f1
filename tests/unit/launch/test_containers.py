from __future__ import annotations

import pytest

from slurm_rl.config.sections import Container
from slurm_rl.launch.containers import render_payload_command, render_payload_env

ARGV = ["python3", "-m", "slurm_rl.stages", "/runs/r/order.json"]
SECRET = {"TOKEN": "s3cret", "A": "1"}


def render(
    container: Container, launcher: str = "slurm", binds: list[str] | None = None
) -> list[str]:
    return render_payload_command(
        ARGV,
        container=container,
        env=SECRET,
        binds=binds or [],
        attempt_name="a0002-9f3c",
        launcher=launcher,  # type: ignore[arg-type]
    )


def test_without_a_container_the_command_is_as_it_was() -> None:
    assert render(Container()) == ARGV


def test_apptainer() -> None:
    container = Container(
        runtime="apptainer",
        image="/img/x.sif",
        bind=["/work", "/data:/d:ro"],
        args=["--nv", "--no-home"],
        writable=True,
    )
    assert render(container, "local", ["/runs/r", "/work"]) == [
        "apptainer", "exec",
        "--bind", "/runs/r", "--bind", "/work", "--bind", "/data:/d:ro",
        "--writable-tmpfs", "--nv", "--no-home", "/img/x.sif", *ARGV,
    ]  # fmt: skip


def test_pyxis_options_come_before_the_program_and_name_the_attempt() -> None:
    container = Container(
        runtime="pyxis",
        image="/img/x.sqsh",
        bind=["/work", "/data:/d"],
        args=["--no-container-mount-home"],
        writable=True,
    )
    assert render(container, binds=["/runs/r"]) == [
        "--container-image=/img/x.sqsh",
        "--container-name=slurm-rl-a0002-9f3c",
        "--container-mounts=/runs/r:/runs/r,/work:/work,/data:/d",
        "--container-env=A,TOKEN",
        "--container-writable",
        "--no-container-mount-home",
        *ARGV,
    ]


def test_two_attempts_have_two_containers() -> None:
    container = Container(runtime="pyxis", image="x")
    first, second = (
        render_payload_command(
            ARGV, container=container, env={}, attempt_name=name, launcher="slurm"
        )
        for name in ("a0001-aa", "a0002-bb")
    )
    assert first != second


@pytest.mark.parametrize("runtime", ["none", "apptainer", "pyxis"])
def test_no_value_of_the_environment_stands_in_a_command_line(runtime: str) -> None:
    container = Container(runtime=runtime, image=None if runtime == "none" else "x")  # type: ignore[arg-type]
    assert "s3cret" not in " ".join(render(container))


def test_apptainer_gets_its_environment_past_cleanenv() -> None:
    env = render_payload_env(Container(runtime="apptainer", image="x"), {"A": "1"})
    assert env == {"A": "1", "APPTAINERENV_A": "1"}
    assert render_payload_env(Container(), {"A": "1"}) == {"A": "1"}


def test_pyxis_needs_srun() -> None:
    with pytest.raises(ValueError, match="pyxis is a plugin of srun"):
        render(Container(runtime="pyxis", image="x"), "local")
