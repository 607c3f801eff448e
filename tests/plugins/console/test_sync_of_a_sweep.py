"""`rlctl runs sync SWEEP`: all runs of a sweep."""

from __future__ import annotations

from pathlib import Path

import yaml

from rlctl.recipes.compose import compose
from tests.recorded import called
from tests.sweeps.test_selection import sweep


def test_sync_sends_all_runs_of_a_sweep(tmp_path: Path) -> None:
    here = tmp_path
    made = sweep(here / "runs", "lrs", "ffr", seeds=1)
    stored = yaml.safe_dump(compose("ppo").config.model_dump(mode="json"))
    for number in range(3):
        (here / "runs/p" / made.run_name(number, 1) / "config.yaml").write_text(stored)
    done = called("runs", "sync", "lrs", "-l", "tensorboard", cwd=here)
    sent = [line for line in done.stderr.splitlines() if "1 step sent" in line]
    assert len(sent) == 2, done.stderr
    assert done.returncode == 1
    assert f"{made.run_name(2, 1)}: the run {made.run_name(2, 1)} is running" in done.stderr
    assert len(list((here / "runs/p").glob("*/events.out*"))) == 2
    again = called("runs", "sync", "lrs", "-l", "tensorboard", "--json", cwd=here)
    assert again.returncode == 1
    assert "is running" in again.stdout + again.stderr
