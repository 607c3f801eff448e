"""Share of each phase of a step for the quickstart's recipes, as a plot.

    python -m benchmarks.phases [RECIPE ...] [--steps 10] [--plot FILE.svg]

Each recipe trains with `--inline`; medians of the steps after the first three.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from html import escape
from pathlib import Path

from benchmarks.child import metric_rows, rlctl
from benchmarks.line_chart import COLORS
from benchmarks.table import Row, show

WARM_UP = 3
TIMING = "timing_s/"
PHASES = (
    *("gen", "reward", "old_log_prob", "ref", "values", "adv"),
    *("update_critic", "update_actor", "update_weights"),
)
WIDTH, BAR, LEFT, TOP = 640, 28, 70, 34  # pixels


def seconds(recipe: str, steps: int, folder: Path) -> dict[str, float]:
    """Train and return the median seconds of each phase, and of the `step`."""
    settings = (
        f"trainer.total_training_steps={WARM_UP + steps}",
        *("trainer.test_freq=-1", "trainer.save_freq=-1"),
    )
    rlctl(folder, "train", recipe, "--inline", "--name", recipe, *settings)
    rows = metric_rows(folder / "runs" / "quickstart" / recipe)
    rows = [row for row in rows if row["step"] > WARM_UP and f"{TIMING}step" in row]
    return {
        name: statistics.median(row.get(TIMING + name, 0.0) for row in rows)
        for name in (*PHASES, "step")
    }


def write_plot(path: Path, found: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a bar per recipe, divided into the phases of its step."""
    parts: list[str] = []
    for row, (recipe, times) in enumerate(found.items()):
        x, y = float(LEFT), TOP + row * (BAR + 14)
        parts.append(f'<text x="{LEFT - 8}" y="{y + 18}" text-anchor="end">{escape(recipe)}</text>')
        for number, name in enumerate(PHASES):
            share = times[name] / times["step"]
            width = share * (WIDTH - LEFT)
            hint = f"{name}: {times[name]:.2f} s, {share:.0%}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" '
                f'fill="{COLORS[number % len(COLORS)]}"><title>{hint}</title></rect>'
            )
            if share > 0.06:
                parts.append(f'<text x="{x + 4:.1f}" y="{y + 18}" fill="white">{share:.0%}</text>')
            x += width
    bottom = TOP + len(found) * (BAR + 14) + 6
    shown = [name for name in PHASES if any(times[name] > 0 for times in found.values())]
    for place, name in enumerate(shown):
        x, y = LEFT + place % 5 * 112, bottom + place // 5 * 20
        color = COLORS[PHASES.index(name) % len(COLORS)]
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{color}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 10}">{name}</text>')
    height = bottom + 44
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n'
        f'<text x="{LEFT}" y="20" font-weight="bold">Share of a step by phase</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n",
        encoding="utf-8",
    )


def main() -> None:
    """Measure, print a table, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", default=["ppo", "grpo"], metavar="RECIPE")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlctl-phases-") as folder:
        found = {each: seconds(each, given.steps, Path(folder)) for each in given.recipes}
    rows: list[Row] = [{"recipe": recipe} | dict(times) for recipe, times in found.items()]
    show("seconds of a step by phase", rows, as_json=False)
    if given.plot:
        write_plot(given.plot, found)


if __name__ == "__main__":
    main()
