"""Checkpoints of a run: their sizes, which of them to keep, and removal of the others."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlctl.errors import ConflictError, ResourceError, UsageError
from rlctl.files import by_step
from rlctl.runs.events import read_events
from rlctl.runs.folders_elsewhere import is_foreign
from rlctl.runs.run import ACTIVE, Run
from rlctl.runs.run_dir import RunDir
from rlctl.tracking.run_summary import RunSummary, lower_is_better

BEST = "best"
LAST = "last"
NONE = "none"
_EVENT = "pruned"  # in events.jsonl, with `steps`
_MANIFEST = "manifest.json"  # a complete checkpoint has it


@dataclass(frozen=True)
class Keep:
    """Checkpoints to keep: the best by the validation metric, the `newest` ones, and `steps`."""

    best: bool
    newest: int
    steps: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Keep:
        """Read `best,last,last:3,40`. Raises UsageError for anything else."""
        words = [word.strip() for word in text.split(",")]
        newest = 0
        steps: set[int] = set()
        for word in words:
            name, _, number = word.partition(":")
            if word.isdecimal():
                steps.add(int(word))
            elif name == LAST and (not number or number.isdecimal()):
                newest = max(newest, int(number or 1))
            elif word != BEST and words != [NONE]:
                raise UsageError(
                    f"{word!r} names no checkpoints",
                    where="--keep",
                    hint="best, last, last:N (the N newest), step numbers, or none",
                )
        return cls(BEST in words, newest, frozenset(steps))


@dataclass(frozen=True)
class Pruning:
    """Plan for a run: bytes of the checkpoints to remove, by step, and the steps that stay.

    `guarded` are steps that stay though `Keep` does not name them, with the reason.
    """

    run: Run
    remove: dict[int, int]
    keep: list[int]
    guarded: dict[int, str]


def checkpoint_sizes(folder: Path) -> dict[int, int]:
    """Return the bytes of each checkpoint of the run in `folder`, by step."""
    found = by_step(folder / "checkpoints")
    return {step: num_bytes(path) for step, path in found.items() if path.is_dir()}


def num_bytes(*folders: Path) -> int:
    """Return the size of all files in folders; a link counts as itself."""
    return sum(
        file.lstat().st_size
        for folder in folders
        for file in folder.rglob("*")
        if file.is_symlink() or file.is_file()
    )


def pruned_steps(folder: Path) -> list[int]:
    """Return the steps whose checkpoints were removed from the run in `folder`, sorted."""
    try:
        events = [event for event in read_events(folder) if event["kind"] == _EVENT]
    except OSError:
        return []
    removed = {step for event in events for step in event.get("steps", ())}
    return sorted(removed - by_step(folder / "checkpoints").keys())


def plan(run: Run, keep: Keep, runs: Iterable[Run], force: bool) -> Pruning:
    """Return what pruning `run` removes; `runs` are all runs, which may start from its checkpoints.

    Without `force`, an unfinished run keeps what it would resume from, and a run that was forked
    and has not saved yet keeps its start. An active run keeps its latest checkpoint in any case.
    Raises UsageError for a step without a checkpoint.
    """
    sizes = checkpoint_sizes(run.path)
    if missing := sorted(keep.steps - sizes.keys()):
        raise UsageError(
            f"{run.name} has no checkpoint of step {', '.join(map(str, missing))}",
            where="--keep",
            hint=f"steps with a checkpoint: {', '.join(map(str, sizes)) or 'none'}",
        )
    complete = [
        step for step, path in by_step(run.path / "checkpoints").items() if _is_complete(path)
    ]
    wanted = set(keep.steps)
    if keep.newest:
        wanted.update(complete[-keep.newest :])
    if keep.best and (best := best_step(run, complete)) is not None:
        wanted.add(best)
    guarded: dict[int, str] = {}
    latest = complete[-1:]
    if run.state in ACTIVE or (run.state != "finished" and not force):
        guarded |= dict.fromkeys(latest, f"the run is {run.state}, and resumes from it")
    if not force:
        guarded |= _starts(run, runs)
    guarded = {step: reason for step, reason in guarded.items() if step not in wanted}
    stays = wanted | guarded.keys()
    remove = {step: size for step, size in sizes.items() if step not in stays}
    return Pruning(run, remove, sorted(step for step in sizes if step in stays), guarded)


def best_step(run: Run, steps: Sequence[int]) -> int | None:
    """Return the step with the best value of `trainer.keep_best.metric`, or of the validation.

    None without a value at any of `steps`; of equal ones the first.
    """
    metric = run.setting("trainer.keep_best.metric")
    if metric is not None:
        smallest = run.setting("trainer.keep_best.mode") == "min"
    else:
        metric = (run.metrics.figures or RunSummary()).metric
        smallest = metric is not None and lower_is_better(metric)
    values = {int(row["step"]): row.get(metric or "") for row in run.history()}
    known = {step: value for step in steps if (value := values.get(step)) is not None}
    finite = {step: value for step, value in known.items() if math.isfinite(value)}
    if smallest:
        return min(finite, key=finite.__getitem__, default=None)
    return max(finite, key=finite.__getitem__, default=None)


def prune(pruning: Pruning) -> None:
    """Remove the checkpoints of a plan, and note it in the run's events. Raises ResourceError.

    Each is renamed first, so that a partly deleted one is never listed.
    """
    if not pruning.remove:
        return
    folder = pruning.run.path / "checkpoints"
    record = pruning.run.record
    if folder.is_symlink() and (
        record is None or is_foreign(pruning.run.path, record, "checkpoints")
    ):
        raise ConflictError(
            f"the checkpoints of {pruning.run.name} may be another run's, of which this is a copy",
            where=str(folder.resolve()),
            hint="prune that run; resuming this one gives it other checkpoints",
        )
    try:
        if record is not None:
            RunDir(pruning.run.path).event(_EVENT, steps=list(pruning.remove))
        for step, path in by_step(folder).items():
            if step in pruning.remove:
                aside = path.with_name(f".{path.name}.partial")
                path.rename(aside)
                shutil.rmtree(aside)
    except OSError as error:
        raise ResourceError(
            f"checkpoints of {pruning.run.name} cannot be removed: {error}", where=str(folder)
        ) from error


def _is_complete(checkpoint: Path) -> bool:
    return (checkpoint / _MANIFEST).is_file()


def _starts(run: Run, runs: Iterable[Run]) -> dict[int, str]:
    """Return the steps from which forks that have not saved yet start, with the reason."""
    paths = {path.resolve(): step for step, path in by_step(run.path / "checkpoints").items()}
    found: dict[int, str] = {}
    for other in runs:
        if other.record is None or other.record.parent is None:
            continue
        step = paths.get(Path(other.record.parent["path"]).resolve())
        if step is not None and not by_step(other.path / "checkpoints"):
            found[step] = f"{other.name} was forked from it and has no checkpoint yet"
    return found
