"""A run with every kind of content, sent by one tracker; its files are read by tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlctl.tracking.alarms import Alarm
from rlctl.tracking.loggers import make_tracker
from rlctl.tracking.tracker import RunInfo, Sample
from tests.tracking.real import main

LR = "actor_rollout_ref.actor.optim.lr"
CONFIG = {
    "actor_rollout_ref": {"actor": {"optim": {"lr": 0.5, "betas": [0.9, 0.99]}}},
    "algorithm": {"adv_estimator": "grpo", "params": {}},
    "data": {"train_files": [{"path": "a.jsonl"}], "limit": None},
    "trainer": {"seed": 1, "total_epochs": 3},
}
# The recipe set the epochs, and the command line the learning rate.
ORIGINS = {
    LR: [(1e-6, 1), (0.5, 3)],
    "trainer.seed": [(1, 1), (1, 3)],
    "trainer.total_epochs": [(30, 1), (3, 2)],
    "algorithm.adv_estimator": [("grpo", 1)],
}
ALARM = Alarm("kl", 2, 0.7, 0.5, "the KL is 0.7", "lower the rate", over=False)
MESSAGE = "out of memory in the actor"


def samples(step: int) -> list[Sample]:
    """Return a right and a wrong response; the second one has another component."""
    right = Sample(
        "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n",
        f"It is | 5\nat step {step}",
        5,
        1.0,
        {"acc": 1.0, "format": 0.5},
        6,
        "stop",
        "sums",
        pred="5",
    )
    wrong = replace(right, response="# I do not know", score=0.25, components={"brevity": 0.25})
    return [right, replace(wrong, pred=None)]


def info(folder: Path, **fields: Any) -> RunInfo:
    """Return the facts of a run whose folder, below `folder`, has its origins."""
    run = folder / "runs" / "house" / "first"
    run.mkdir(parents=True, exist_ok=True)
    chains = {
        key: [{"value": value, "where": "x", "level": level} for value, level in chain]
        for key, chain in ORIGINS.items()
    }
    (run / "origins.json").write_text(json.dumps(chains))
    facts: dict[str, Any] = {
        "description": "a house",
        "tags": ("blue",),
        "recipe": "grpo",
        "sweep": "lrs",
        "commit": "c0ffee",
    }
    return RunInfo("abc123", "house", "first", run, 9, CONFIG, **(facts | fields))


def attempt(
    logger: str,
    run: RunInfo,
    steps: Sequence[int] = (1, 2),
    state: str = "failed",
    rows: Mapping[int, Mapping[str, float]] = {},
) -> str | None:
    """Send steps with samples, an alarm at step 2, and the end, unless `state` is ''."""
    tracker: Any = make_tracker(logger, {})
    with redirect_stdout(sys.stderr):  # as the run does; other calls must print nothing
        run_id = tracker.start(run)
    for step in steps:
        tracker.generations(step, samples(step))
        default = {
            "actor/lr": 0.1,
            "system/n0/cpu": 50.0,
            "val-core/sums/acc/mean@1": 1 / (step or 1),
        }
        tracker.log(step, rows.get(step, default))
        if step == ALARM.step and hasattr(tracker, "alarm"):
            tracker.alarm(ALARM)
    if state == "failed" and hasattr(tracker, "failure"):
        tracker.failure(MESSAGE)
    if state:
        with redirect_stdout(sys.stderr):
            tracker.finish(state)
    return run_id


def trackio_contents(folder: Path) -> dict[str, Any]:
    """Return what Trackio's database has of a run that was resumed from step 1."""
    from trackio.sqlite_storage import SQLiteStorage

    name = "val-core/sums/acc/mean@1"
    first = {step: {name: 1.0} for step in (1, 2, 3)} | {0: {name: 0.5}}
    run_id = attempt("trackio", info(folder), steps=(0, 1, 2, 3), state="finished", rows=first)
    second = {step: {name: 0.25, "system/n0/cpu": 50.0} for step in (2, 3)}
    resumed = info(folder, trackers={"trackio": run_id}, resume_step=1, attempt=2)
    attempt("trackio", resumed, steps=(2, 3), rows=second)
    rows = SQLiteStorage.get_logs("house", "first")
    scalars = [row for row in rows if name in row]
    return {
        "steps": {step: sum(row["step"] == step for row in scalars) for step in range(4)},
        "accuracies": [row[name] for row in sorted(scalars, key=lambda row: row["step"])],
        "system": SQLiteStorage.get_system_logs("house", "first"),
        "alerts": SQLiteStorage.get_alerts("house"),
        "config": SQLiteStorage.get_run_config("house", "first"),
        "tables": [row["val/generations"]["_value"] for row in rows if "val/generations" in row],
    }


if __name__ == "__main__":
    main(globals())
