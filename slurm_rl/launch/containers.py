"""How a stage's program is started in its container. Pure: renders, starts nothing.

The supervisor stays on the host; only the program goes inside, so an image needs no Slurm.
Rules for the environment:

- Values never stand in the command line, where `ps` would show them: they go through the
  environment of the process that starts the container (`render_payload_env`).
- none: the program gets that environment as it is.
- apptainer: it takes the host's environment over; a copy under `APPTAINERENV_` survives
  `--cleanenv` and wins over what the image sets.
- pyxis: it takes the environment over, but the image's own values win, save for the names
  given by `--container-env`. Names are no secret.

A container's name carries the attempt: after a requeue pyxis would find, and use, the file
system that the first run left behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from slurm_rl.config.sections import Container

Launcher = Literal["slurm", "local"]


def render_payload_command(
    argv: Sequence[str],
    *,
    container: Container,
    env: Mapping[str, str],
    attempt_name: str,
    launcher: Launcher,
    binds: Sequence[str] = (),
) -> list[str]:
    """The command that runs `argv` in `container`.

    Under Slurm it is what follows `srun` and its own options: with pyxis it begins with more
    options of srun. binds: host paths that the program needs at the same place inside, or
    `src:dst`; `container.bind` is added. env: names that must reach the program.
    Raises ValueError for pyxis without srun; the configuration refuses that earlier.
    """
    if container.runtime == "none":
        return list(argv)
    if container.runtime == "apptainer":
        return [*_render_apptainer(container, binds=binds), *argv]
    if launcher != "slurm":
        raise ValueError("pyxis is a plugin of srun: it needs the Slurm launcher")
    return [*_render_pyxis(container, env=env, binds=binds, attempt_name=attempt_name), *argv]


def render_payload_env(container: Container, env: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of the process that starts the payload."""
    if container.runtime != "apptainer":
        return dict(env)
    return {**env, **{f"APPTAINERENV_{name}": value for name, value in env.items()}}


def container_name(attempt_name: str) -> str:
    """The name of an attempt's container: `slurm-rl-a0002-9f3c1d`."""
    return f"slurm-rl-{attempt_name}"


def _render_apptainer(container: Container, *, binds: Sequence[str]) -> list[str]:
    command = ["apptainer", "exec"]
    for bind in _unique([*binds, *container.bind]):
        command += ["--bind", bind]
    if container.writable:
        command.append("--writable-tmpfs")
    return [*command, *container.args, _image(container)]


def _render_pyxis(
    container: Container, *, env: Mapping[str, str], binds: Sequence[str], attempt_name: str
) -> list[str]:
    options = [
        f"--container-image={_image(container)}",
        f"--container-name={container_name(attempt_name)}",
    ]
    mounts = [bind if ":" in bind else f"{bind}:{bind}" for bind in [*binds, *container.bind]]
    if mounts:
        options.append(f"--container-mounts={','.join(_unique(mounts))}")
    if env:
        options.append(f"--container-env={','.join(sorted(env))}")
    if container.writable:
        options.append("--container-writable")
    return [*options, *container.args]


def _image(container: Container) -> str:
    assert container.image is not None, "the configuration refuses a runtime without an image"
    return container.image


def _unique(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))
