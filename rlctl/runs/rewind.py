"""Rewinding of a run to the step of a checkpoint, so that no step is recorded twice."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rlctl.files import by_step, write_bytes
from rlctl.runs.run_dir import CONFIG_FILE, RECORD_FILE, RunDir
from rlctl.tracking.json_lines import METRICS_FILE, json_object
from rlctl.tracking.summary import SUMMARY_FILE

log = logging.getLogger(__name__)

TAKEN_BACK = "taken_back"
# Folders with one `step_<number>.jsonl` per step.
_BY_STEP = ("generations", "generations_train", "rollouts")
_MAX_NAMED = 3  # broken lines in a message


@dataclass(frozen=True)
class Rewound:
    """Result of `rewind`: the number of removed metrics lines, and the steps whose row is lost."""

    num_removed: int
    lost: Sequence[int]


@dataclass(frozen=True)
class Reported:
    """First and last step with metrics that a run has reported, and spare rows.

    `first` None: the first one found; `last` None: the step that the run is rewound to. `spare`
    are rows of a checkpoint, which replace those that are missing.
    """

    first: int | None = None
    last: int | None = None
    spare: bytes = b""


_ALL = Reported()


def rewind(run: RunDir, step: int | None, reported: Reported = _ALL) -> Rewound:
    """Remove metrics and samples of all steps after `step` (None: of all steps).

    Steps between those of `reported` that have no row are reported as lost.
    They are moved to `taken_back/` in the folder of the current attempt. So are broken lines; those
    in the place of an earlier step are reported as a warning. An incomplete last line, left by a
    killed process, is dropped.
    """
    last = step
    if last is None:
        last = -1
    _remove_unfinished(run.path)
    folder = run.attempt / TAKEN_BACK
    last_row = reported.last
    if last_row is None:
        last_row = last
    lines = _Lines.split(run.metrics, last_row)
    for part in _BY_STEP:
        for number, file in by_step(run.path / part, ".jsonl").items():
            if number > last:
                (folder / part).mkdir(parents=True, exist_ok=True)
                shutil.move(file, folder / part / file.name)
    if lines.taken:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / run.metrics.name, b"".join(lines.taken))
    first = reported.first
    if first is None:
        first = min(lines.steps, default=last_row + 1)
    lines.restore(reported.spare, first, last_row)
    if run.metrics.exists() or lines.kept:
        write_bytes(run.metrics, b"".join(lines.kept))
    lost = sorted(set(range(first, last_row + 1)) - lines.steps)
    if lines.broken or lost:
        log.warning("%s", _damage(run.metrics, lines, lost))
    return Rewound(len(lines.taken), lost)


def _remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of a driver that was killed while it wrote."""
    driven = [RECORD_FILE, CONFIG_FILE, "origins.json", METRICS_FILE, SUMMARY_FILE]
    names = [f".{name}.*.tmp" for name in driven] + [f"{part}/.step_*.tmp" for part in _BY_STEP]
    for name in names:
        for file in folder.glob(name):
            file.unlink(missing_ok=True)


def _damage(metrics: Path, lines: _Lines, lost: Sequence[int]) -> str:
    """Return a message that names broken lines and the steps whose rows are lost."""
    parts = [f"removed a broken line at {metrics}:{number}" for number in lines.broken[:_MAX_NAMED]]
    if len(lines.broken) > _MAX_NAMED:
        parts.append(f"and {len(lines.broken) - _MAX_NAMED} more")
    if lost:
        parts.append(f"the metrics of these steps are lost: {_ranges(lost)}")
    elif lines.broken and lines.broken[0] == 1 and lines.steps:
        parts.append(f"metrics before step {min(lines.steps)} are lost")
    return ", ".join(parts)


def _ranges(steps: Sequence[int]) -> str:
    """Return sorted numbers as text, long sequences as their ends: 1, 2, 5 to 90."""
    groups: list[list[int]] = []
    for step in steps:
        if groups and step == groups[-1][-1] + 1:
            groups[-1].append(step)
        else:
            groups.append([step])
    texts: list[str] = []
    for group in groups:
        if len(group) > _MAX_NAMED:
            texts.append(f"{group[0]} to {group[-1]}")
        else:
            texts += map(str, group)
    return ", ".join(texts)


def _step_of(line: bytes) -> int | None:
    """Return the step of a line of metrics, None for a broken one."""
    step = (json_object(line) or {}).get("step")
    if not isinstance(step, int):
        return None
    return step


@dataclass
class _Lines:
    """Lines of `metrics.jsonl` up to a step and after it, the steps kept, broken line numbers."""

    kept: list[bytes] = field(default_factory=list)
    taken: list[bytes] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)
    broken: list[int] = field(default_factory=list)

    def restore(self, spare: bytes, first: int, last: int) -> None:
        """Insert the `spare` rows of steps between `first` and `last` that are missing."""
        for line in spare.splitlines(keepends=True):
            step = _step_of(line)
            if step is not None and first <= step <= last and step not in self.steps:
                before = [number for number in map(_step_of, self.kept) if (number or 0) < step]
                self.kept.insert(len(before), line)
                self.steps.add(step)

    @classmethod
    def split(cls, metrics: Path, last: int) -> Self:
        """Split the complete lines of a file, which may be missing."""
        found = cls()
        if not metrics.exists():
            return found
        *lines, _incomplete = metrics.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            step = _step_of(line)
            if step is None:
                found.broken.append(number)
            if step is not None and step <= last:
                found.kept.append(line + b"\n")
                found.steps.add(step)
            else:
                found.taken.append(line + b"\n")
        return found
