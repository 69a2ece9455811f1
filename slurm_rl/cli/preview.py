"""plan: what a configuration would do, without doing it."""

from __future__ import annotations

import itertools
from pathlib import Path

from slurm_rl.chain.advance import render_link, render_tick
from slurm_rl.chain.graph import Graph, Link, build_graph
from slurm_rl.chain.observe import link_folder
from slurm_rl.chain.plan import plan
from slurm_rl.chain.scheduler import LinkRequest
from slurm_rl.chain.slots import link_slots
from slurm_rl.chain.view import LinkView, SlotView, Submit, SubmitTick, View
from slurm_rl.cli.terminal import format_bytes, say
from slurm_rl.config.derive import stage_slurm
from slurm_rl.config.load import load_settings
from slurm_rl.config.model_size import count_parameters
from slurm_rl.config.roles import num_ranks
from slurm_rl.config.schema import Settings
from slurm_rl.launch.build import make_spec
from slurm_rl.storage.control import Control
from slurm_rl.storage.intents import Intent
from slurm_rl.storage.rundir import RunDir
from slurm_rl.types import StageRef

#: A token as in a job's name, for texts that are never submitted.
_TOKEN = "0123456789ab"


def show_plan(config: Path, overrides: list[str], num_iterations: int) -> None:
    """Print graph, first submissions, job texts, and the estimates."""
    settings = load_settings(config, overrides)
    graph = build_graph(settings)
    say(f"run {settings.run_dir}: {settings.num_rollout} iterations, launcher {settings.launcher}")
    _show_graph(graph, min(num_iterations, settings.num_rollout))
    _show_first_jobs(settings, graph)
    _show_estimates(settings)


def _show_graph(graph: Graph, num_iterations: int) -> None:
    say("\ngraph (stage <- parents):")
    for iteration in range(num_iterations):
        for node in graph.stages(iteration):
            parents = graph.parents(StageRef(iteration, node.kind))
            shown = ", ".join(f"{role}: {ref}" for role, ref in parents.items()) or "nothing"
            shards = f" x {node.num_shards} shards" if node.num_shards > 1 else ""
            if node.pools:
                pools = ", ".join(f"{len(part)} {name}" for name, part in node.pools)
                shards += f" ({pools})"
            say(f"  i{iteration:04d}.{node.kind}{shards} <- {shown}")
    for rule in graph.evals:
        every = f"version {rule.interval}, {2 * rule.interval}, …, " if rule.interval else ""
        first = "version 0, " if rule.before else ""
        say(f"  {rule.kind}: {first}{every}the last version ({graph.num_iterations})")


def _show_first_jobs(settings: Settings, graph: Graph) -> None:
    spec, run = make_spec(settings, _TOKEN[:6]), RunDir(settings.run_dir)
    links: list[LinkView] = []
    for _, of_stage in itertools.islice(graph.stages_from(0), spec.window):
        links += (_untouched(graph, link) for link in of_stage)
    planned = plan(spec, View(Control(), tuple(links), queue=()))
    say("\nfirst jobs:")
    for action in planned.actions:
        if isinstance(action, SubmitTick):
            say(f"  {settings.run.name}.tick.<token>  begins in {action.begin_s:.0f} s")
        elif isinstance(action, Submit):
            parents = [str(at) for at in action.after if isinstance(at, Link)]
            after = f"  after {', '.join(parents)}" if parents else ""
            say(f"  {action.link.job_name(settings.run.name, '<token>')}{after}")
    if settings.launcher == "slurm":
        for view in {view.link.label: view for view in reversed(links)}.values():
            intent = Intent(1, _TOKEN, 0.0, shards=view.missing_shards)
            folder = link_folder(run, Control(), view.link)
            _show_text(settings, render_link(run, spec, view.link, intent, folder))
        for rule in graph.evals:
            link, intent = Link(graph.num_iterations, (rule.kind,)), Intent(1, _TOKEN, 0.0)
            folder = link_folder(run, Control(), link)
            _show_text(settings, render_link(run, spec, link, intent, folder))
        if spec.ticks:
            _show_text(settings, render_tick(run, spec, _TOKEN, begin_s=spec.tick_s))


def _untouched(graph: Graph, link: Link) -> LinkView:
    slots = [SlotView(str(s.stage), s.shard) for s in link_slots(graph, Control(), link)]
    return LinkView(link, (), tuple(slots), waits_for=graph.link_parents(link))


def _show_text(settings: Settings, request: LinkRequest) -> None:
    from slurm_rl.launch.slurm import render_job

    label = request.name.split(".")[-2]
    say(f"\n--- job text of {label} (token {_TOKEN} stands for a fresh one)")
    say(render_job(settings, request))


def _show_estimates(settings: Settings) -> None:
    """Bytes an iteration writes and host memory a node needs, with how they were got."""
    num_parameters = count_parameters(settings)
    if num_parameters is None:
        say("\nestimates: the model is not readable from here; run `slurm-rl validate`")
        return
    is_bf16 = bool(settings.train.megatron.get("bf16"))
    weight_bytes = 2 if is_bf16 else 4
    state_bytes = 14 if is_bf16 else 16
    rollout = settings.rollout
    num_samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    # token ids and log-probs, 4 bytes each, a mask, and the text twice over as JSON
    samples = num_samples * (rollout.rollout_max_response_len * 17 + 2048)
    checkpoint, weights = num_parameters * state_bytes, num_parameters * weight_bytes
    nodes = int(stage_slurm(settings, "train").get("nodes", 1))
    say(f"\nestimates for {num_parameters:,} parameters, {num_ranks(settings)} train rank(s):")
    say(f"  checkpoint  {format_bytes(checkpoint)} ({state_bytes} bytes a parameter)")
    say(f"  weights     {format_bytes(weights)} ({weight_bytes} bytes a parameter)")
    say(f"  samples     at most {format_bytes(samples)} ({num_samples} samples)")
    total = checkpoint + weights + samples
    say(
        f"  written in one iteration {format_bytes(total)}; in the run "
        f"{format_bytes(total * settings.num_rollout)}"
    )
    # A save holds this node's part of the state; the export gathers the weights on one node.
    say(f"  host memory of a train node, for a save: {format_bytes(checkpoint / nodes + weights)}")
