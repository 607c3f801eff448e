"""Time and peak memory of reading one run of 100,000 steps (300 MB of metrics).

    python -m benchmarks.long_run [STEPS]

Targets: `rlctl show` 3 s and 300 MB, `rlctl report` 10 s and 500 MB.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

from benchmarks.child import rlctl
from rlctl.runs.run_dir import RunDir

ACC = "val-core/gsm8k/acc/mean@1"
NAMES = ["timing_s/step", "critic/score/mean", *(f"actor/metric_number_{k}" for k in range(85))]


def append(run: RunDir, first: int, number: int) -> None:
    """Append rows of random numbers, with a validation every 50 steps."""
    generator = random.Random(first)
    with run.metrics.open("a") as file:
        for step in range(first, first + number):
            row: dict[str, float] = {"step": step} | {name: generator.random() for name in NAMES}
            if step % 50 == 0:
                row[ACC] = generator.random()
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Measure and print."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [RunDir.create(folder / "runs", "p", each, "ppo") for each in ("a", "b")]
        for run in runs:
            append(run, 0, number)
            run.finish("finished", 0)
        print(f"{number} steps, {runs[0].metrics.stat().st_size / 1e6:.0f} MB")
        for label, arguments in {
            "show": ["show", "a"],
            "report": ["report", "a"],
            "compare": ["compare", "a", "b"],
            "runs, first": ["runs"],
            "runs": ["runs"],
        }.items():
            print(f"{label:22}{rlctl(folder, *arguments)}")
        append(runs[0], number, 10)
        print(f"{'runs, 10 more steps':22}{rlctl(folder, 'runs')}")


if __name__ == "__main__":
    main()
