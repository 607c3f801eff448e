"""Time from Enter to the first line, the plan and the end of the first step, in units.

    python -m benchmarks.start [ROUNDS]

The unit is the import of a Llama model of transformers, measured before each command, so that a
busy machine slows both. A ratio is the median of the rounds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.results import record

UNIT = [sys.executable, "-c", "import transformers.models.llama.modeling_llama"]
RUN = "runs/quickstart/start"


@dataclass
class Command:
    """Command of rlctl, measured until it prints `until`, or until its end."""

    words: str
    target: float
    until: str | None = None
    ratios: list[float] = field(default_factory=list)


TRAIN = "train ppo trainer.total_training_steps=1"
COMMANDS = (
    Command("train ppo --dry-run", 0.2, "checking the configuration"),
    Command("train ppo --dry-run", 1.2),
    Command(f"{TRAIN} --inline --name start", 1.5, "step 1/1"),
    Command("resume start trainer.total_training_steps=2 --inline --fork again", 1.5, "step 2/2"),
    Command("eval start", 1.5),
    Command(TRAIN, 2.5, "step 1/1"),
    Command("resume start trainer.total_training_steps=2 --fork again", 2.5, "step 2/2"),
)


def seconds(command: list[str], folder: Path, until: str | None = None) -> float:
    """Run a command to its end; return the seconds until it prints `until` (None: until its end).

    Raises SystemExit if it fails or does not print the text.
    """
    started = time.perf_counter()
    shown: float | None = None
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if shown is None and until is not None and line.startswith(until):
            shown = time.perf_counter() - started
    if process.wait() or (until is not None and shown is None):
        raise SystemExit(f"{' '.join(command)} failed or printed no {until!r}:\n{''.join(lines)}")
    return time.perf_counter() - started if shown is None else shown


def measure(folder: Path) -> list[float]:
    """Add one ratio to each command; return the units in seconds."""
    units = []
    for each in COMMANDS:
        subprocess.run(["rm", "-rf", "runs/quickstart/again"], cwd=folder, check=True)
        if "--name start" in each.words:
            subprocess.run(["rm", "-rf", RUN], cwd=folder, check=True)
        units.append(seconds(UNIT, folder))
        command = [sys.executable, "-m", "rlctl", *each.words.split()]
        each.ratios.append(seconds(command, folder, each.until) / units[-1])
    return units


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name))  # writes bytecode, fills the page cache
        for each in COMMANDS:
            each.ratios.clear()
        units = [unit for _ in range(rounds) for unit in measure(Path(name))]
    print(f"unit: {statistics.median(units):.1f} s ({min(units):.1f} to {max(units):.1f})")
    print("| rlctl | until | units | least to most | target |\n|---|---|---|---|---|")
    for each in COMMANDS:
        ratios = sorted(each.ratios)
        record(f"{each.words}, until {each.until or 'its end'}", statistics.median(ratios), "lower")
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(
            f"| {each.words} | {each.until or 'its end'} | {statistics.median(ratios):.2f} "
            f"| {spread} | {each.target} |"
        )


if __name__ == "__main__":
    main()
