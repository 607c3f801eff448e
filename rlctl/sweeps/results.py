"""What came of a sweep: its trials ranked, the winner as a recipe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Any

import yaml

from rlctl.errors import ConflictError, NotFoundError
from rlctl.monitoring.run_summary import figure, judged_by
from rlctl.recipes import schema
from rlctl.recipes.axes import split_axes
from rlctl.recipes.compose import compose
from rlctl.recipes.layers import nested
from rlctl.recipes.validate import lookup
from rlctl.runs.store import Run, RunStore
from rlctl.sweeps.record import SweepDir
from rlctl.sweeps.study import Outcome, Study
from rlctl.tracking.jsonl import METRICS_FILE, read_metrics

# What belongs to a run's place and name and not to the experiment.
_NOT_EXPORTED = (
    "sweep",
    "ray_kwargs",
    "trainer.experiment_name",
    "trainer.num_threads",
    "trainer.logger",
    "trainer.run_dir",
)


@dataclass(frozen=True)
class TrialResult:
    """One trial: the `value` it is judged by (None while it has none) with the standard error over its seeds (None for one seed), the
    best value on the way, how far it came, and its runs."""

    number: int
    overrides: Sequence[str]
    state: str
    value: float | None
    error: float | None
    best: float | None
    step: int | None
    runs: Sequence[str]


@dataclass(frozen=True)
class SweepResult:
    """All trials, best first; what ended without a value comes last. `importances` is by key, empty while unknown."""

    sweep: SweepDir
    trials: Sequence[TrialResult]
    importances: Mapping[str, float]


def open_study(sweep: SweepDir) -> Study:
    """The study of a sweep as it lies on the disk."""
    if not sweep.storage.exists():
        raise NotFoundError(f"the sweep {sweep.record.name} has no study", where=str(sweep.storage))
    _, axes = split_axes(sweep.record.axes, sweep.record.recipe)
    return Study(
        sweep.storage,
        axes,
        schema.Sweep.model_validate(sweep.record.settings),
        sweep.record.total_steps,
    )


def results(sweep: SweepDir) -> SweepResult:
    """How all trials stand. Raises NotFoundError when the sweep has no study."""
    study = open_study(sweep)
    sign = -1.0 if sweep.record.settings["mode"] == "max" else 1.0
    trials = [_result(sweep, outcome) for outcome in study.outcomes()]

    def rank(trial: TrialResult) -> tuple[bool, float, int]:
        value = trial.value if trial.value is not None else trial.best
        return trial.state != "finished", math.inf if value is None else sign * value, trial.number

    return SweepResult(sweep, sorted(trials, key=rank), study.importances())


def best(sweep: SweepDir) -> TrialResult:
    """The finished trial with the best value. Raises NotFoundError when none has finished."""
    ranked = results(sweep).trials
    if not ranked or ranked[0].state != "finished":
        raise NotFoundError(
            f"no trial of {sweep.record.name} has finished",
            hint=f"`rlctl show {sweep.record.name}` shows how they stand",
        )
    return ranked[0]


def export(sweep: SweepDir, trial: TrialResult, path: Path) -> None:
    """Write a trial as a recipe that stands on its own: the base, and every value that its recipe and overrides set.

    Raises ConflictError when the file is there already.
    """
    if path.exists():
        raise ConflictError(f"{path} exists already", hint="another name, or remove it first")
    composed = compose(sweep.record.recipe, [*sweep.record.fixed, *trial.overrides])
    values = {
        key: lookup(composed.container, key)
        for key, chain in composed.origins.items()
        if chain[-1].level > 1
        and not any(key == each or key.startswith(f"{each}.") for each in _NOT_EXPORTED)
    }
    format_resources = "" if trial.value is None else f", value {trial.value:.6g}"
    head = f"# Trial {trial.number} of the sweep {sweep.record.name}{format_resources}: {' '.join(trial.overrides)}\n"
    body = yaml.safe_dump(
        {"defaults": [sweep.record.base, "_self_"]} | nested(values),
        sort_keys=False,
        allow_unicode=True,
    )
    path.write_text(head + body, encoding="utf-8")


def overview(sweep: SweepDir) -> dict[str, Any]:
    """One line of `rlctl sweeps`."""
    record = sweep.record
    there = results(sweep) if sweep.storage.exists() else None
    trials = there.trials if there else []
    counts = {
        state: sum(trial.state == state for trial in trials)
        for state in ("waiting", "running", "finished", "pruned", "failed")
    }
    winner = next((trial for trial in trials if trial.state == "finished"), None)
    return {
        "name": record.name,
        "project": record.project,
        "state": sweep.state,
        "axes": list(record.axes),
        "trials": {state: count for state, count in counts.items() if count},
        "metric": record.settings["metric"],
        "best": winner.value if winner else None,
        "best_trial": winner.number if winner else None,
        "created": record.created,
    }


def plain(value: Any) -> Any:
    """A result as plain data for JSON."""
    if isinstance(value, SweepResult):
        shown = {
            "name": value.sweep.record.name,
            "state": value.sweep.state,
            "settings": value.sweep.record.settings,
        }
        return shown | {
            "trials": [plain(trial) for trial in value.trials],
            "importances": value.importances,
        }
    return dataclasses.asdict(value)


def search(sweep: SweepDir) -> dict[str, Any]:
    """A sweep as its report draws it: the keys searched, and of every trial its number, values by key (as text), state and value."""
    found = results(sweep)
    settings = sweep.record.settings
    shared = {
        "name": sweep.record.name,
        "metric": settings["metric"] or "the runs' first validation metric",
        "mode": settings["mode"],
        "importances": dict(found.importances),
    }
    trials = [
        {
            "number": trial.number,
            "params": {
                key: value for key, _, value in (text.partition("=") for text in trial.overrides)
            },
            "state": trial.state,
            "value": trial.value,
        }
        for trial in sorted(found.trials, key=lambda trial: trial.number)
    ]
    return shared | {
        "axes": [text.partition("=")[0] for text in sweep.record.axes],
        "trials": trials,
    }


def runs_of(sweep: SweepDir) -> list[Run]:
    """The runs of all trials, by name."""
    store = RunStore(sweep.path.parent.parent)
    there = [name for trial in results(sweep).trials for name in trial.runs]
    return [store.find(str(sweep.run_folder(name))) for name in sorted(there)]


def _result(sweep: SweepDir, outcome: Outcome) -> TrialResult:
    first, count = sweep.record.first_seed, sweep.record.settings["seeds"]
    names = [sweep.run_name(outcome.trial.number, seed) for seed in range(first, first + count)]
    names = [name for name in names if sweep.run_folder(name).is_dir()]
    values = outcome.values
    last = (
        [value for name in names if (value := _last(sweep, name)) is not None] if count > 1 else []
    )
    choose = max if sweep.record.settings["mode"] == "max" else min
    return TrialResult(
        number=outcome.trial.number,
        overrides=outcome.trial.overrides,
        state=outcome.state,
        value=outcome.value
        if outcome.state == "finished"
        else (values[max(values)] if values else None),
        error=stdev(last) / math.sqrt(len(last)) if len(last) > 1 else None,
        best=choose(values.values()) if values else None,
        step=max(values) if values else None,
        runs=names,
    )


def _last(sweep: SweepDir, name: str) -> float | None:
    """The last value of one run by which its trial is judged."""
    rows = read_metrics(sweep.run_folder(name) / METRICS_FILE)
    metric = judged_by(rows, sweep.record.settings["metric"])
    values = [value for row in rows if metric and (value := figure(row, (metric,))) is not None]
    return values[-1] if values else None
