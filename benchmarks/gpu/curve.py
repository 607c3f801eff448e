"""Rung of learning: the curve of the quickstart, trained on the device."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import rlctl
from benchmarks.child import metric_rows
from benchmarks.gpu.recorder import Recorder, Settings

STEPS, TEST_FREQ = 20, 5
_NEEDED_S = 45.0


def measure(settings: Settings, recorder: Recorder) -> None:
    """Train both recipes of the quickstart; their validation accuracy is a row each."""
    with tempfile.TemporaryDirectory() as folder:
        for recipe in ("grpo", "ppo"):
            if settings.tiny or recorder.enough(recipe, _NEEDED_S):
                with recorder.attempt(recipe):
                    _train(recipe, settings, recorder, folder)


def _train(recipe: str, settings: Settings, recorder: Recorder, folder: str) -> None:
    steps = 2 if settings.tiny else STEPS
    overrides = [
        f"trainer.device={settings.device}",
        f"trainer.run_dir={folder}",
        f"trainer.experiment_name={recipe}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={min(steps, TEST_FREQ)}",
        "trainer.save_freq=-1",
        "actor_rollout_ref.rollout.name=hf",
        *(["data.train_batch_size=16", "data.val_max_samples=32"] if settings.tiny else []),
        *(["actor_rollout_ref.actor.ppo_mini_batch_size=8"] if settings.tiny else []),
        *(["trainer.critic_warmup=1"] if recipe == "ppo" else []),
        *(["critic.ppo_mini_batch_size=8"] if settings.tiny and recipe == "ppo" else []),
    ]
    begin = time.perf_counter()
    run = rlctl.train(recipe, overrides, inline=True)
    took = time.perf_counter() - begin
    rows = metric_rows(Path(run.path))
    accuracy = {
        f"step {row['step']}": 100 * value
        for row in rows
        for key, value in row.items()
        if key.startswith("val-core/")
    }
    timed = sorted(row["timing_s/step"] for row in rows if "timing_s/step" in row)
    recorder.row(
        "curve", recipe=recipe, **accuracy, median_step_s=timed[len(timed) // 2], run_s=took
    )
