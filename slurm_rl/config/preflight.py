"""Looks at what the settings point to: is it there, and is it what it should be?

For `validate` and before a `submit`, on the login node. Reads a few small files and the
first prompts, and starts nothing. Reading the settings themselves needs none of this.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path as File

from slurm_rl.config.code_preflight import check_code, check_holds_run
from slurm_rl.config.data_preflight import check_data_files
from slurm_rl.config.derive import containers_of
from slurm_rl.config.model_preflight import check_model
from slurm_rl.config.problems import Path, Problem
from slurm_rl.config.schema import Settings
from slurm_rl.config.shape_preflight import check_shapes
from slurm_rl.config.stages import section_kinds, section_of
from slurm_rl.config.teacher_preflight import check_likeliest


def check_files(settings: Settings, *, code: Sequence[File] | None = None) -> list[Problem]:
    """What is missing or not as it should be on this machine.

    code: the folders that the user's code comes from, where those of the settings do not count.
    """
    folders = [File(text) for text in settings.code] if code is None else code
    return [
        *check_model(settings),
        *check_shapes(settings),
        *check_likeliest(settings),
        *check_data_files(settings),
        *_check_secrets(settings),
        *_check_folders(settings),
        *_check_programs(settings),
        *_check_images(settings),
        *(check_holds_run(folders, settings.run_dir) if code is None else ()),
        *check_code(settings, [folder for folder in folders if folder.is_dir()]),
    ]


def _check_secrets(settings: Settings) -> Iterator[Problem]:
    text = settings.env_file
    if text is None:
        return
    try:
        mode = stat.S_IMODE(os.stat(text).st_mode)
    except OSError as error:
        yield Problem(("env_file",), f"cannot be read ({error.strerror})", "mend the path", text)
        return
    if mode & 0o077:
        rule = f"may be read by others (mode {mode:04o})"
        yield Problem(("env_file",), rule, f"chmod 600 {text}", text)


def _check_folders(settings: Settings) -> Iterator[Problem]:
    for i, text in enumerate(settings.code):
        if not File(text).is_dir():
            yield Problem(("code", i), "is not a directory", "mend the path", text)
    if settings.sbatch_template is not None and not File(settings.sbatch_template).is_file():
        fix = "copy sbatch/job.sh there"
        yield Problem(("sbatch_template",), "is not a file", fix, settings.sbatch_template)
    archive = settings.retention.archive
    if archive is not None and not (File(archive).is_dir() and os.access(archive, os.W_OK)):
        rule = "is not a directory that you may write in"
        yield Problem(("retention", "archive"), rule, "make it", archive)
    folder = File(settings.run.dir)
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        rule = f"cannot be made: {folder} is not a directory that you may write in"
        yield Problem(("run", "dir"), rule, "choose another", settings.run.dir)


def _check_programs(settings: Settings) -> Iterator[Problem]:
    programs: list[tuple[Path, str | None]] = [
        (("host_python",), settings.host_python),
        (("rollout", "sglang_python"), settings.rollout.sglang_python),
        *(
            ((*section_of(kind), "python"), settings.stage(kind).python)
            for kind in section_kinds(settings)
        ),
    ]
    for path, text in programs:
        if text is not None and shutil.which(text) is None:
            yield Problem(path, "is not a program", "mend the path", text)


def _check_images(settings: Settings) -> Iterator[Problem]:
    for at, container in containers_of(settings):
        image = container.image
        if image is not None and image.startswith("/") and not File(image).exists():
            yield Problem((*at, "image"), "is not there", "mend the path", image)
