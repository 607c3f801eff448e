"""Rewinding of a run to the step of a checkpoint, so that no step is recorded twice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from rlctl.files import write_text
from rlctl.runs.run_dir import RunDir

TAKEN_BACK = "taken_back"
_BY_STEP = ("generations", "rollouts")  # folders with one `step_<number>.jsonl` per step


def rewind(run: RunDir, step: int | None) -> int:
    """Remove metrics and samples of all steps after `step` (None: of all steps).

    They are moved to `taken_back/` in the folder of the current attempt. An incomplete last line,
    left by a killed process, is dropped. Returns the number of metrics lines that were removed.
    """
    last = -1 if step is None else step
    folder = run.attempt / TAKEN_BACK
    kept, taken = _split(run.metrics, last)
    for part in _BY_STEP:
        for file in sorted((run.path / part).glob("step_*")):
            if file.suffix != ".jsonl":
                file.unlink()  # incomplete
            elif int(file.stem.removeprefix("step_")) > last:
                (folder / part).mkdir(parents=True, exist_ok=True)
                shutil.move(file, folder / part / file.name)
    if taken:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / run.metrics.name, "".join(taken))
    if run.metrics.exists():
        write_text(run.metrics, "".join(kept))
    return len(taken)


def _split(metrics: Path, last: int) -> tuple[Sequence[str], Sequence[str]]:
    """Return the complete lines up to step `last`, and those after it."""
    lines = (
        metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.exists() else []
    )
    kept: list[str] = []
    taken: list[str] = []
    for line in lines:
        if line.endswith("\n"):
            (kept if json.loads(line)["step"] <= last else taken).append(line)
    return kept, taken
