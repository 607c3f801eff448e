"""Accuracy of the quickstart by staleness of its rollouts, with and without a correction.

    python -m benchmarks.async_accuracy [CASE ...] [--seeds 1 2 3 4 5] [--steps 40] [--plot FILE]

A case is `K` or `K:ANCHOR`: `async_training.max_staleness` and the policy that the update is
compared with, `weights` (the default: recomputed, with importance weights), `loglinear`
(interpolated), `clip` (the engine's) or `none` (recomputed, without weights). A staleness above 1
has engines of their own. Each corrected case must have an accuracy of no less than one standard
deviation below that of the synchronous run (case 0), or the exit code is 1. The plot has mean and
extremes of the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import metric_rows, rlctl
from benchmarks.learning import validated
from benchmarks.line_chart import Line, write_line_chart

_CORRECTION = "algorithm.rollout_correction"
UNCORRECTED = "none"
ANCHORS = {
    "weights": (f"{_CORRECTION}.rollout_is=token",),
    "loglinear": (f"{_CORRECTION}.rollout_is=token", f"{_CORRECTION}.bypass_mode=loglinear"),
    "clip": (f"{_CORRECTION}.bypass_mode=true",),
    # A criterion that rejects nothing: no divergence k3 is as large, for the log-ratio is clamped.
    UNCORRECTED: (
        f"{_CORRECTION}.rollout_rs=token_k3",
        f"{_CORRECTION}.rollout_rs_threshold=1e9",
    ),
}
APART = (
    *("trainer.placement.rollout=engines", "trainer.placement.pools={main: 1, engines: 1}"),
    "async_training.schedule=eager",
)


@dataclass(frozen=True)
class Case:
    """Largest staleness and anchor."""

    staleness: int
    anchor: str

    @classmethod
    def parse(cls, text: str) -> Case:
        staleness, _, anchor = text.partition(":")
        anchor = anchor or "weights"
        if not staleness.isdigit() or anchor not in ANCHORS:
            raise argparse.ArgumentTypeError(
                f"{text!r} should be K or K:ANCHOR with an anchor of {', '.join(ANCHORS)}"
            )
        return cls(int(staleness), anchor)

    def __str__(self) -> str:
        return f"K = {self.staleness}, {self.anchor}" if self.staleness else "synchronous"

    def settings(self) -> tuple[str, ...]:
        """Return the arguments of a run."""
        if not self.staleness:
            return ("--inline",)
        where = APART if self.staleness > 1 else ("--inline",)
        return (
            *(*where, f"async_training.max_staleness={self.staleness}"),
            *ANCHORS[self.anchor],
        )


@dataclass(frozen=True)
class Run:
    """Accuracy in percent by step, and mean staleness in steps."""

    accuracy: dict[int, float]
    staleness: float

    @property
    def last(self) -> float:
        return list(self.accuracy.values())[-1]


def train(case: Case, seed: int, folder: Path, *settings: str) -> Run:
    """Train once and return the run."""
    name = f"k{case.staleness}-{case.anchor}-seed{seed}"
    seeds = (f"trainer.seed={seed}", f"data.seed={seed}", "trainer.num_threads=1")
    arguments = ("--name", name, *seeds, "trainer.save_freq=-1", *case.settings(), *settings)
    rlctl(folder, "train", "grpo", *arguments)
    rows = metric_rows(folder / "runs" / "quickstart" / name)
    ages = [row["async/staleness/mean"] for row in rows if "async/staleness/mean" in row]
    accuracy = validated(rows, "val-core/", "")
    return Run(
        {step: 100 * value for step, value in accuracy.items()},
        statistics.fmean(ages) if ages else 0.0,
    )


def spread(values: list[float]) -> tuple[float, float]:
    """Return mean and standard deviation; 0 of a single value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def main() -> int:
    """Train, print a table row per case, write the plot, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = [Case.parse(each) for each in ("0", "1", "4", "8", f"8:{UNCORRECTED}")]
    parser.add_argument("cases", nargs="*", type=Case.parse, default=cases, metavar="CASE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--test-freq", type=int, default=5)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--plot", type=Path, help="SVG file")
    given = parser.parse_args()
    settings = (
        *(f"trainer.total_training_steps={given.steps}", f"trainer.test_freq={given.test_freq}"),
        *given.settings,
    )
    found: dict[Case, list[Run]] = {}
    with tempfile.TemporaryDirectory(prefix="rlctl-async-") as scratch:
        for case in given.cases:
            runs = found[case] = []
            for seed in given.seeds:
                runs.append(train(case, seed, Path(scratch), *settings))
                curve = " ".join(f"{each:.1f}" for each in runs[-1].accuracy.values())
                print(f"{case}, seed {seed}: {curve}", flush=True)
    if given.plot:
        write_line_chart(
            given.plot,
            f"Quickstart with GRPO, {len(given.seeds)} seeds: mean and extremes",
            ("step", "accuracy in %"),
            {str(case): line(runs) for case, runs in found.items()},
            top=100.0,
        )
    return report(found)


def line(runs: list[Run]) -> Line:
    """Return lowest, mean and highest accuracy by step."""
    values = {step: [run.accuracy[step] for run in runs] for step in runs[0].accuracy}
    points = [(step, min(y), statistics.fmean(y), max(y)) for step, y in values.items()]
    return Line(points)


def report(found: dict[Case, list[Run]]) -> int:
    """Print accuracy by case; return 1 if a corrected case is worse than the synchronous run."""
    synchronous = [run.last for case, runs in found.items() if not case.staleness for run in runs]
    missed = False
    print("| | staleness | accuracy | lowest | difference | within one deviation |")
    print("|---|---|---|---|---|---|")
    for case, runs in found.items():
        mean, deviation = spread([run.last for run in runs])
        age = statistics.fmean(run.staleness for run in runs)
        row = f"{case} | {age:.2f} | {mean:.1f} ± {deviation:.1f} | {min(r.last for r in runs):.1f}"
        if case.staleness and synchronous:
            base, allowed = spread(synchronous)
            holds = mean >= base - allowed
            missed |= not holds and case.anchor != UNCORRECTED
            print(f"| {row} | {mean - base:+.1f} | {'yes' if holds else 'no'} |")
        else:
            print(f"| {row} | | |")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
