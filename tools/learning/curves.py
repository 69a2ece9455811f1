"""What is known of the runs, as a JSON file; and the page and the plot that are made of it.

Nothing here runs anything.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learning.algorithms import ALGORITHMS, NAMES, SEEDS, TARGET, Algorithm

#: The tool's part of the page lies between these.
BEGIN, END = "<!-- made by tools/learning_curves.py --plot -->", "<!-- made by hand again -->"


@dataclass(frozen=True, slots=True)
class Curve:
    """What is known of one run: the settings that it was made with, the mean reward of each of its
    rollouts, the first from before any update, and the CPU time that it took."""

    settings: list[str]
    rewards: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    made_on: str = ""

    def updates(self) -> int | None:
        """Updates after which the mean reward was at the target; None if it never was."""
        return next((i for i, reward in enumerate(self.rewards) if reward >= TARGET), None)

    def is_over(self, algorithm: Algorithm) -> bool:
        """Whether the run is of these settings, and reached the target or the budget's end."""
        is_whole = self.updates() is not None or len(self.rewards) > algorithm.budget
        return is_whole and self.settings == algorithm.recorded()


#: Name of the algorithm -> seed -> what is known of that run.
Curves = dict[str, dict[int, Curve]]


def parse_curves(text: str) -> Curves:
    """Curves as `render_curves` writes them."""
    return {
        name: {int(seed): Curve(**curve) for seed, curve in seeds.items()}
        for name, seeds in json.loads(text).items()
    }


def render_curves(curves: Curves) -> str:
    """JSON, algorithms in the table's order; those that it does not have any more are left out."""
    kept = {name: curves[name] for name in NAMES if name in curves}
    document = {
        name: {str(seed): dataclasses.asdict(seeds[seed]) for seed in sorted(seeds)}
        for name, seeds in kept.items()
    }
    # A list of numbers is one line.
    text = json.dumps(document, indent=1)
    return re.sub(r"\[[^\[\]]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def missing_runs(curves: Curves, names: Sequence[str] = NAMES) -> list[tuple[Algorithm, int]]:
    """The runs that are still to be made: not begun, killed, or of other settings."""
    return [
        (algorithm, seed)
        for algorithm in ALGORITHMS
        if algorithm.name in names
        for seed in SEEDS
        if not curves.get(algorithm.name, {}).get(seed, Curve([])).is_over(algorithm)
    ]


def read_curves(path: Path) -> Curves:
    """What is known; nothing where there is no file yet."""
    return parse_curves(path.read_text()) if path.exists() else {}


def render_table(curves: Curves) -> str:
    """A row an algorithm, with the updates of each seed; then what all of it took, and on what."""
    rows = ["| | settings | budget | updates to target |", "|---|---|---|---|"]
    for algorithm in ALGORITHMS:
        seeds = curves.get(algorithm.name, {})
        found = [seeds[seed].updates() if seed in seeds else None for seed in SEEDS]
        updates = ", ".join("–" if number is None else str(number) for number in found)
        settings = "<br>".join(f"`{item}`" for item in algorithm.settings) or "–"
        rows.append(f"| {algorithm.name} | {settings} | {algorithm.budget} | {updates} |")
    known = [curve for seeds in curves.values() for curve in seeds.values()]
    minutes = sum(curve.cpu_s for curve in known) / 60
    machines = "; ".join(sorted({curve.made_on for curve in known}))
    return "\n".join([*rows, "", f"{len(known)} runs, {minutes:.0f} min of CPU time: {machines}."])


def with_table(page: str, table: str) -> str:
    """The page with what stands between its two marks replaced."""
    before, mark, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert mark and end, f"the page lacks the marks {BEGIN} and {END}"
    return f"{before}{mark}\n{table}\n{end}{after}"


def draw_curves(curves: Curves, path: Path) -> None:
    """One panel an algorithm: seeds thin, their mean thick as far as all of them go. The same
    curves give the same bytes, with one version of matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    style = {"svg.hashsalt": "learning", "font.size": 8, "axes.spines.top": False}
    with matplotlib.rc_context(style | {"axes.spines.right": False}):
        num_rows = -(-len(ALGORITHMS) // 4)
        figure, axes = pyplot.subplots(
            num_rows, 4, figsize=(10, 2 * num_rows), sharex=True, sharey=True, squeeze=False
        )
        for panel, algorithm in itertools.zip_longest(axes.flat, ALGORITHMS):
            if algorithm is None:
                panel.set_visible(False)
            else:
                _draw_panel(panel, algorithm, curves.get(algorithm.name, {}))
        figure.supxlabel("updates")
        figure.supylabel("mean reward of the rollout")
        figure.tight_layout()
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)


def _draw_panel(panel: Any, algorithm: Algorithm, seeds: dict[int, Curve]) -> None:
    """Told apart without colour: by width, and the seeds by their dashes."""
    for (_, curve), dashes in zip(sorted(seeds.items()), ("-", "--", ":"), strict=False):
        panel.plot(curve.rewards, dashes, color="0.45", linewidth=0.8)
    together = list(zip(*(curve.rewards for curve in seeds.values()), strict=False))
    panel.plot([sum(at) / len(at) for at in together], color="black", linewidth=2)
    panel.axhline(TARGET, color="0.6", linewidth=0.6)
    panel.axvline(algorithm.budget, color="0.6", linewidth=0.6)
    panel.set_title(algorithm.name)
    panel.set_ylim(0, 1)
