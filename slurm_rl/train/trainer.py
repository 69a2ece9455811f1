"""A trainer: a model with its optimizer, from one checkpoint to the next.

    Trainer.build(...)           ranks meet, model and optimizer are made
      .load_weights(folder)      iteration 0: from Hugging Face files
      .load_checkpoint(folder)   later: from the previous iteration's checkpoint
      .step(work)                one iteration of training; of a critic `values`, then `step_critic`
      .save(attempt_dir)         checkpoint/ and weights/, with their digests
      .close()

It trains a role: the policy (`train`) or the `critic`, each by its own section of the settings.
`step` and `save` may follow each other as often as one likes without a load in between: the
bytes are the same as if each iteration had been a process of its own. For that the trainer
has its own random state, threads and determinism flags, in place only while it works.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slurm_rl.config.roles import fuses_kernels, num_ranks, role_megatron, updating_roles
from slurm_rl.config.schema import Settings
from slurm_rl.config.train_schema import Critic
from slurm_rl.errors import CorruptError
from slurm_rl.models.geometry import Geometry, read_geometry
from slurm_rl.seeds import derive_seed
from slurm_rl.train import checkpoint, distributed, experts, rng, routing
from slurm_rl.train.batch import MicroBatch, Samples, check_samples
from slurm_rl.train.chunks import model_chunks
from slurm_rl.train.distributed import World
from slurm_rl.train.export import export_weights, read_companions
from slurm_rl.train.forward import Engine, policy_logprobs
from slurm_rl.train.host_memory import gathered_bytes
from slurm_rl.train.loading import load_weights
from slurm_rl.train.meter import rate
from slurm_rl.train.model import build_model, model_config, wrap_model
from slurm_rl.train.optimizer import build_optimizer, build_scheduler, current_lr
from slurm_rl.train.options import MegatronOptions, split_megatron
from slurm_rl.train.others import other_logprobs
from slurm_rl.train.partial import Partial, StepState, delete_partials, read_state, save_state
from slurm_rl.train.probe import measure_probe
from slurm_rl.train.saving import WEIGHTS_DIR, seal_role, write_checkpoint
from slurm_rl.train.scopes import (
    deterministic_scope,
    explaining_a_full_disk,
    megatron_scope,
    prepare_determinism,
)
from slurm_rl.train.step import (
    Task,
    Work,
    plan_passes,
    steps_per_epoch,
    train_critic,
    train_policy,
    whole_rollout,
)
from slurm_rl.train.values import critic_values
from slurm_rl.train.weighting import counts_tokens
from slurm_rl.train.weights import WeightsLayout, read_layout
from slurm_rl.types import FileEntry


class Trainer:
    """See the module. Every rank of the job has one, and all call the same methods."""

    def __init__(
        self,
        *,
        settings: Settings,
        kind: str,
        world: World,
        geometry: Geometry,
        options: MegatronOptions,
        layout: WeightsLayout,
        companions: dict[str, bytes],
    ) -> None:
        """Made by `build`. `model` is this rank's part, zeros until something is loaded."""
        self.settings = settings
        self.kind = kind
        self.role = updating_roles(settings)[kind]
        self.world = world
        self.geometry = geometry
        self.options = options
        self.progress = checkpoint.Progress()
        #: What the checkpoint that was loaded says; the settings may ask for another one now.
        self.loaded_lr = 0.0
        self.weights_digest = ""
        self._resumed: StepState | None = None
        self._layout = layout
        self._companions = companions
        self._config = model_config(geometry, options, deterministic=settings.deterministic)
        self._rng = rng.seeded_state(derive_seed(settings.seed, kind))
        self.model = build_model(geometry, self._config)
        if kind == "train" and settings.rollout.use_rollout_routing_replay:
            routing.install(self.model)
        wrapped = wrap_model(self.model, options)
        optimizer = build_optimizer(wrapped, options)
        self._engine = Engine(
            model=wrapped,
            optimizer=optimizer,
            scheduler=build_scheduler(optimizer, self.role, options),
            vocab_size=geometry.vocab_size,
            temperature=settings.rollout.rollout_temperature,
            per_token=counts_tokens(self.role),
        )

    @classmethod
    def build(
        cls, settings: Settings, *, attempt_dir: Path, weights_dir: Path, kind: str = "train"
    ) -> Trainer:
        """Meet the other ranks and make the model that `weights_dir/config.json` describes.

        kind: the role, `train` or `critic`.

        Raises ConfigError (layout, ranks, schedule) or ModelError (family, files).
        """
        geometry, layout = read_geometry(weights_dir), read_layout(weights_dir)
        fused = fuses_kernels(settings, kind)
        options = split_megatron(role_megatron(settings, kind), fused=fused)
        world = distributed.read_world(os.environ, expected=num_ranks(settings, kind))
        if settings.deterministic:
            prepare_determinism()
        with megatron_scope():
            distributed.join(
                world, attempt_dir=attempt_dir, settings=settings, layout=options.layout
            )
            try:
                return cls(
                    settings=settings,
                    kind=kind,
                    world=world,
                    geometry=geometry,
                    options=options,
                    layout=layout,
                    companions=read_companions(weights_dir),
                )
            except BaseException:
                if world.size == 1:
                    distributed.leave()
                raise

    @property
    def lr(self) -> float:
        """The learning rate of the next optimizer step."""
        return current_lr(self._engine.optimizer)

    @property
    def save_need(self) -> int:
        """Bytes of this node's memory that a save takes at most (`host_memory.py`)."""
        return gathered_bytes(self.model, num_ranks=self.world.size, num_nodes=self.world.num_nodes)

    @property
    def schedule_step(self) -> int:
        """Optimizer steps that the schedule has counted."""
        return int(self._engine.scheduler.num_steps)

    def load_weights(self, folder: Path) -> None:
        """Start at iteration 0 from a Hugging Face directory of this geometry."""
        with megatron_scope():
            load_weights(self.model, geometry=self.geometry, folder=folder, layout=self._layout)
            self._engine.optimizer.reload_model_params()

    def load_checkpoint(self, folder: Path) -> None:
        """Continue from `folder` (a `checkpoint/`); CorruptError if its counters disagree."""
        with megatron_scope():
            found = checkpoint.load(
                folder,
                model=self.model,
                optimizer=self._engine.optimizer,
                scheduler=self._engine.scheduler,
            )
        self.progress = found.progress
        self.loaded_lr = self.lr if found.is_same_schedule else found.lr
        self._engine.optimizer_steps = self.progress.optimizer_steps
        if found.rng is not None:
            self._rng = found.rng
        if self.schedule_step != self.progress.optimizer_steps:
            raise CorruptError(
                f"{folder}: the schedule is at step {self.schedule_step}, the optimizer at "
                f"{self.progress.optimizer_steps}"
            )

    def load_partial(self, found: Partial | None) -> bool:
        """Continue in the middle of an iteration; False, with nothing changed, if any rank finds
        its share damaged, or there is none."""
        state = None if found is None else read_state(found, rank=self.world.rank)
        with megatron_scope():
            whole = [state is not None] * self.world.size
            dist.all_gather_object(whole, state is not None)
        if found is None or not all(whole):
            return False
        self.load_checkpoint(found.checkpoint)
        self._resumed = state
        return True

    def logprobs(self, microbatches: list[MicroBatch]) -> list[torch.Tensor]:
        """Log-probabilities float32[N] under the current policy; on the last pipeline rank."""
        with self._at_work():
            return policy_logprobs(self._engine, microbatches)

    def step(
        self,
        work: Work,
        *,
        reference_dir: Path | None = None,
        first_gap: float | None = None,
    ) -> dict[str, float]:
        """One iteration of training the policy; returns metrics (see `step.py`).

        reference_dir: Hugging Face weights that the KL is measured against, None if the loss has
        no such term, or if a stage has computed the log-probs. first_gap: the mean gap
        of engine and trainer in the run's first iteration (`gap.py`). Raises DataError for
        samples that do not fit the model, and NumericsError before a step that must not be taken;
        then the trainer is of no use.
        """
        self._check(work.samples)
        before = self._engine.optimizer_steps
        reference = reference_dir and partial(
            other_logprobs,
            reference_dir,
            engine=self._engine,
            options=self.options,
        )
        with self._at_work():
            metrics = train_policy(
                self._engine,
                self._task(work),
                train=self.settings.train,
                teacher=self.settings.teacher,
                reference=reference or None,
                first_gap=first_gap,
            )
        self._move_on(work.samples)
        return metrics | self._performance(work.samples, "actor_train", since=before)

    def values(self, samples: Samples) -> torch.Tensor:
        """A critic's values of the response tokens, float32[R] on every rank; 0 where masked."""
        self._check(samples)
        with self._at_work():
            passes = plan_passes(self._engine, samples, role=self.role)
            with self._engine.meter.phase("values"):
                budget = self.role.log_probs_max_tokens_per_gpu
                values = critic_values(self._engine, passes, max_tokens=budget)
            return whole_rollout(samples, passes, values)

    def step_critic(self, work: Work, returns_R: torch.Tensor) -> dict[str, float]:
        """One iteration of training the critic towards `returns_R`; as `step`."""
        assert isinstance(self.role, Critic)
        before = self._engine.optimizer_steps
        with self._at_work():
            metrics = train_critic(
                self._engine, self._task(work), critic=self.role, returns_R=returns_R
            )
        self._move_on(work.samples)
        return metrics | self._performance(work.samples, "critic_train", since=before)

    def stand_at(self, iteration: int) -> None:
        """Go on with `iteration`: a checkpoint that was carried forward is of an earlier one."""
        self.progress = dataclasses.replace(self.progress, iteration=iteration)

    def take_state(self) -> StepState | None:
        """What a partial save that was loaded holds, as long as no step was taken."""
        return self._resumed

    def _check(self, samples: Samples) -> None:
        geometry = self.geometry
        check_samples(samples, vocab_size=geometry.vocab_size, max_positions=geometry.max_positions)
        if routing.replay_of(self.model).is_on:
            routing.check_routed(samples.routed_experts, geometry)

    def _task(self, work: Work) -> Task:
        resumed, self._resumed = self._resumed, None
        return Task(
            work,
            seed=derive_seed(self.settings.seed, self.kind, self.progress.iteration),
            resumed=resumed,
            after_step=partial(self._keep, work.attempt_dir, work.made_from),
        )

    def _performance(self, samples: Samples, phase: str, *, since: int) -> dict[str, float]:
        """Times of the iteration's phases, and what the rate of its updates is worth.

        since: optimizer steps before them; those of an earlier attempt are not this one's.
        """
        times = self._engine.meter.take()
        return times | rate(
            self._config,
            samples,
            phase=phase,
            seconds=times[f"perf/{phase}_time"],
            vocab_size=self.geometry.vocab_size,
            epochs=(self._engine.optimizer_steps - since) / steps_per_epoch(self.role, samples),
        )

    def _move_on(self, samples: Samples) -> None:
        self.progress = checkpoint.Progress(
            iteration=self.progress.iteration + 1,
            optimizer_steps=self._engine.optimizer_steps,
            num_samples_trained=self.progress.num_samples_trained + len(samples.rewards),
        )

    def probe(self) -> dict[str, Any]:
        """Log-probabilities of a fixed text now (`probe.py`); every rank calls it."""
        with self._at_work():
            return measure_probe(self._engine, max_positions=self.geometry.max_positions)

    def save(self, attempt_dir: Path) -> list[FileEntry]:
        """Write `checkpoint/` and `weights/` into `attempt_dir`; every rank calls it.

        Returns all ranks' files with their digests on rank 0, nothing on the others. On
        return everything is fsynced; a crash midway leaves files that nothing names yet.
        Raises SpaceError if the file system is full.
        """
        with explaining_a_full_disk(attempt_dir):
            with self._at_work():
                self._write_checkpoint(attempt_dir)
            self.export(attempt_dir / WEIGHTS_DIR)
            with megatron_scope():
                entries = seal_role(attempt_dir, rank=self.world.rank, num_ranks=self.world.size)
        if self.world.rank == 0:
            delete_partials(attempt_dir)
        return entries

    def _write_checkpoint(self, folder: Path) -> None:
        """`folder/checkpoint`, with the random state as it is now: called while at work."""
        self._gather_parameters()
        write_checkpoint(
            folder,
            model=self.model,
            engine=self._engine,
            progress=self.progress,
            rank=self.world.rank,
        )

    def _keep(
        self, attempt_dir: Path | None, made_from: str, state: StepState, num_steps: int
    ) -> None:
        """After an optimizer step: save what is done, if it is time to and more is to be done."""
        every = self.role.save_steps
        due = every is not None and state.num_steps % every == 0
        if attempt_dir is None or not due or state.num_steps == num_steps:
            return
        steps = self._engine.optimizer_steps
        self.progress = dataclasses.replace(self.progress, optimizer_steps=steps)
        with explaining_a_full_disk(attempt_dir):
            self._write_checkpoint(attempt_dir / f"partial-{state.num_steps:04d}")
            world = {"rank": self.world.rank, "num_ranks": self.world.size}
            save_state(attempt_dir, state, made_from=made_from, **world)

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face directory; every rank calls it (`export.py`)."""
        with megatron_scope():
            self._gather_parameters()
            export_weights(
                folder,
                model=self.model,
                geometry=self.geometry,
                layout=self._layout,
                companions=self._companions,
            )

    def close(self) -> None:
        """Wait for the other ranks and part; the trainer cannot be used afterwards."""
        with megatron_scope():
            dist.barrier()
            # Circles through autograd's own nodes, which no collector sees: with them the model
            # would stay for the life of the process, and the threads of all its groups.
            for chunk in model_chunks(self._engine.model):
                chunk.grad_accs.clear()
                experts.forget_pass(chunk)
            self._config.grad_scale_func = None
            distributed.leave()

    def _gather_parameters(self) -> None:
        # With this overlap Megatron leaves the last update to the next forward pass.
        if self._engine.model.ddp_config.overlap_param_gather:
            self._engine.model.start_param_sync(force_sync=True)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """The trainer's own random state and, in deterministic mode, threads and kernels."""
        with megatron_scope(), contextlib.ExitStack() as undo:
            outside = rng.capture()
            rng.restore(self._rng)
            if self.settings.deterministic:
                undo.enter_context(deterministic_scope())
            try:
                yield
            finally:
                self._rng = rng.capture()
                rng.restore(outside)
