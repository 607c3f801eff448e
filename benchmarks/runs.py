"""Time of `rlctl runs` with 10,000 runs. Target: 1 s.

    python -m benchmarks.runs [RUNS [ROUNDS]]

`first` is the first command of its kind: the runs have no `summary.json`, as those of versions that
wrote none. Half of the runs are lost: their process has gone. On a busy machine CPU time says more
than wall-clock time.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.child import Usage, rlctl
from rlctl.recipes.compose import compose
from rlctl.runs.run_dir import RunDir

METRIC = "val-core/gsm8k/acc/mean@1"
LR = "actor_rollout_ref.actor.optim.lr"


def make_runs(root: Path, number: int) -> None:
    """Create `number` runs of 20 steps in `root`, which differ in name, seed, lr and metrics."""
    template = RunDir.create(root, "p0", "template", "ppo")
    template.finish("finished", 0)
    record = json.loads((template.path / "run.json").read_text())
    given = ["trainer.experiment_name=NAME", "trainer.seed=4242", f"{LR}=0.4242"]
    config = yaml.safe_dump(compose("ppo", given).recorded, sort_keys=False)
    names = [f"actor/metric_{k}" for k in range(40)]
    for index in range(number - 1):
        folder = root / f"p{index % 10}" / f"run-{index:05d}"
        folder.mkdir(parents=True)
        created = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(1_700_000_000 + 60 * index))
        values = {"NAME": folder.name, "4242": str(index), "0.4242": f"{index / 1e9}"}
        text = re.sub("NAME|0.4242|4242", lambda match, new=values: new[match[0]], config)
        (folder / "config.yaml").write_text(text)
        (folder / "run.json").write_text(
            json.dumps(
                record
                | {"name": folder.name, "id": f"{index:08x}", "created": created}
                | {"config_sha256": hashlib.sha256(text.encode()).hexdigest()}
                | ({"state": "running"} if index % 2 else {})
            )
        )
        rows = [
            {"step": step, METRIC: (index * 7 % 1000 + step) / 1020} | dict.fromkeys(names, 0.5)
            for step in range(20)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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
        "rlctl runs --where KEY": ["runs", "--where", "trainer.seed == 17"],
        "rlctl show NAME": ["show", "run-00042"],
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        make_runs(root, number)
        rlctl(root.parent, "--version")
        first = {name: rlctl(root.parent, *arguments) for name, arguments in commands.items()}
        rounds_of = {
            name: [rlctl(root.parent, *arguments) for _ in range(rounds)]
            for name, arguments in commands.items()
        }
    print(f"{number} runs")
    for name in commands:
        print(f"{name:28} first {first[name]}")
        print(f"{name:28}       {_median(rounds_of[name])}")


def _median(rounds: list[Usage]) -> Usage:
    return sorted(rounds, key=lambda each: each.wall)[len(rounds) // 2]


if __name__ == "__main__":
    main()
