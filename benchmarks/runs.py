"""Time of `rlctl runs` with 10,000 runs, in seconds and relative to `rlctl --version`. Target: 1 s.

    python -m benchmarks.runs [RUNS [ROUNDS]]

`first` is the first listing, which builds the index. Commands alternate, so that a busy machine
slows all of them.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from rlctl.recipes.compose import compose
from rlctl.runs.run_dir import RunDir

METRIC = "val-core/gsm8k/acc/mean@1"


def make_runs(root: Path, number: int) -> None:
    """Create `number` finished runs of 20 steps in `root`, which differ in name and metrics."""
    template = RunDir.create(root, "p0", "template", "ppo")
    template.finish("finished", 0)
    record = json.loads((template.path / "run.json").read_text())
    config = yaml.safe_dump(compose("ppo").container)
    names = [f"actor/metric_{k}" for k in range(40)]
    for index in range(number - 1):
        folder = root / f"p{index % 10}" / f"run-{index:05d}"
        folder.mkdir(parents=True)
        created = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(1_700_000_000 + 60 * index))
        (folder / "run.json").write_text(
            json.dumps(record | {"name": folder.name, "id": f"{index:08x}", "created": created})
        )
        (folder / "config.yaml").write_text(config)
        rows = [
            {"step": step, METRIC: (index * 7 % 1000 + step) / 1020} | dict.fromkeys(names, 0.5)
            for step in range(20)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def seconds(root: Path, *arguments: str) -> float:
    """Return the wall-clock time of an rlctl command run beside `root`."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "rlctl", *arguments]
    subprocess.run(command, check=True, capture_output=True, cwd=root.parent)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    number, rounds = (
        (int(sys.argv[1]) if len(sys.argv) > 1 else 10_000),
        (int(sys.argv[2]) if len(sys.argv) > 2 else 5),
    )
    commands = {
        "rlctl runs": ["runs"],
        "rlctl runs --where METRIC": [
            "runs",
            "--where",
            f"best({METRIC}) > 0.95",
            "--sort",
            f"-best({METRIC})",
        ],
        "rlctl runs --where KEY": ["runs", "--where", "trainer.seed == 1"],
        "rlctl show NAME": ["show", "run-00042"],
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        make_runs(root, number)
        seconds(root, "--version")
        first = {name: seconds(root, *arguments) for name, arguments in commands.items()}
        rows = [
            {"": seconds(root, "--version")}
            | {name: seconds(root, *args) for name, args in commands.items()}
            for _ in range(rounds)
        ]
    bare = statistics.median(row[""] for row in rows)
    print(f"{number} runs; bare start {bare:.2f} s")
    for name in commands:
        usual = statistics.median(row[name] for row in rows)
        print(f"{name:28} {usual:6.2f} s  ratio {usual / bare:5.1f}   first {first[name]:6.2f} s")


if __name__ == "__main__":
    main()
