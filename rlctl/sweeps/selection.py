"""Selectors of `rlctl compare` and `rlctl watch`: runs, sweeps, and trials of sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlctl.errors import NotFoundError, RlctlError, UsageError
from rlctl.runs.run import Run
from rlctl.runs.store import RunStore
from rlctl.sweeps.results import TrialResult, best, results
from rlctl.sweeps.sweep_record import SweepDir, find_sweep, names_sweep


def whole_sweep(store: RunStore, selector: str) -> SweepDir | None:
    """Return the sweep that `selector` names, None if it names a run, a trial or nothing."""
    if not names_sweep(store.root, selector):
        return None
    return find_sweep(store.root, selector)


def find_watched(store: RunStore, selector: str) -> Run | tuple[SweepDir, int | None]:
    """Return the run that `selector` names, or the sweep and the number of a trial.

    The number is None for a whole sweep. A trial is `SWEEP-NUMBER` with a name or a name prefix of
    the sweep; a run of this name goes before it. Errors as of `RunStore.find`.
    """
    sweep = whole_sweep(store, selector)
    if sweep is not None:
        return sweep, None
    try:
        return store.find(selector)
    except (NotFoundError, UsageError):
        trial = _find_trial(store.root, selector)
        if trial is None:
            raise
        return trial


def find_compared(store: RunStore, selectors: Sequence[str]) -> list[Run]:
    """Return the runs that `selectors` name.

    A trial stands for its runs of all seeds, a sweep for its best trial, and a sweep with numbers
    after it for these trials. Errors as of `RunStore.find`, and NotFoundError for a trial that does
    not exist or has no run.
    """
    found: list[Run] = []
    numbered: SweepDir | None = None
    for position, selector in enumerate(selectors):
        if numbered is not None and selector.isdecimal():
            found += _runs(store, numbered, _trial(numbered, int(selector)))
            continue
        numbered = None
        chosen = find_watched(store, selector)
        if isinstance(chosen, Run):
            found.append(chosen)
            continue
        sweep, number = chosen
        if number is not None:
            found += _runs(store, sweep, _trial(sweep, number))
        elif "".join(selectors[position + 1 : position + 2]).isdecimal():
            numbered = sweep
        else:
            found += _runs(store, sweep, best(sweep))
    return found


def _find_trial(root: Path, selector: str) -> tuple[SweepDir, int] | None:
    """Return the trial that `SWEEP-NUMBER` names, None if there is none."""
    name, _, number = selector.rpartition("-")
    if not number.isdecimal():
        return None
    try:
        sweep = find_sweep(root, name)
        return sweep, _trial(sweep, int(number)).number
    except RlctlError:
        return None


def _trial(sweep: SweepDir, number: int) -> TrialResult:
    """Return a trial; raise NotFoundError if the sweep has none of this number."""
    trials = results(sweep).trials
    for trial in trials:
        if trial.number == number:
            return trial
    raise NotFoundError(
        f"the sweep {sweep.record.name} has no trial {number}",
        hint=f"its trials: {', '.join(str(known) for known in sorted(t.number for t in trials))}",
    )


def _runs(store: RunStore, sweep: SweepDir, trial: TrialResult) -> list[Run]:
    """Return the runs of a trial, one per seed; raise NotFoundError if none has started."""
    if not trial.runs:
        raise NotFoundError(
            f"trial {trial.number} of the sweep {sweep.record.name} has no run yet",
            hint=f"`rlctl show {sweep.record.name}` shows the state of each trial",
        )
    return [store.find(str(sweep.run_folder(name))) for name in trial.runs]
