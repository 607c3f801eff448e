"""Soak cases of the data plane: eight ranks, with token fields in the store or in every message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.e2e.command import environment
from tests.e2e.killed_runs import learned

# Least bytes of token fields that stay with the workers: none of a run's, or all.
LEAST = {"inline": 2**62, "stored": 0}
COMMAND = """
import sys
from rlctl.runtime.cluster import group
group.INLINE_BYTES = int(sys.argv.pop(1))
from rlctl.__main__ import main
sys.exit(main())
"""
RANKS = [
    *("trainer.n_gpus_per_node=8", "trainer.total_training_steps=4", "trainer.save_freq=4"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=8", "ray_kwargs.ray_init.num_cpus=10"),
]


def train_both(recipe: str, settings: list[str], folder: Path) -> list[Path]:
    """Train both ways; return the runs."""
    runs = [folder / "runs" / "quickstart" / f"{recipe}-{kind}" for kind in LEAST]
    for run, least in zip(runs, LEAST.values(), strict=True):
        arguments = ["train", recipe, *settings, *RANKS, "--name", run.name]
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, str(least), *arguments],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert learned(run), f"{run} has no checkpoint"
    return runs
