"""Soak case of `rlctl eval --tasks`: a local task in an environment with the wheel and lm-eval."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlctl.quickstart import NAME as MODEL
from tests.e2e import wheel
from tests.task_files import NAME, write_task


def evaluate_task(settings: Sequence[str], folder: Path) -> str | None:
    """Return None if four rows of the task are evaluated; `settings` are soak's own."""
    del settings
    place = folder / "lm-eval"
    place.mkdir()
    write_task(place)
    command = ["eval", MODEL, "--tasks", NAME, "--task-dir", place, "--limit", 4, "--json"]
    text = wheel.run(
        wheel.install(wheel.build(place), place, "lm-eval") / "rlctl", *command, cwd=place
    )
    [score] = json.loads(text)["results"]
    return None if score["num_samples"] == 4 and score["value"] > 0 else str(score)
