"""Results of a sweep: its trials ranked by value, and export of a trial as a recipe."""

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
from rlctl.plugins import load
from rlctl.recipes.compose import compose
from rlctl.recipes.layers import nested
from rlctl.recipes.validate import lookup
from rlctl.runs.run import Run
from rlctl.runs.store import RunStore
from rlctl.runs.student_t import t_quantile
from rlctl.sweeps.sweep_record import TABLE_FILE, Outcome, SweepDir
from rlctl.tracking.jsonl import METRICS_FILE, read_metrics
from rlctl.tracking.run_summary import figure, primary_metric

# Keys of a run's place and name, which are not part of the experiment.
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
    """Result of one trial.

    `value` is its objective (None without one): the mean of `n` seeds, whose standard error is
    `error` and whose 95 % interval (Student's t) is from `low` to `high`; None for one seed and
    without a value of each. `best` is the best validation value, `step` the last validated step,
    `runs` the run names, `reason` why a trial failed or was pruned, `curve` its values at all
    validations.
    """

    number: int
    overrides: Sequence[str]
    state: str
    value: float | None
    error: float | None
    best: float | None
    step: int | None
    runs: Sequence[str]
    reason: str = ""
    curve: Sequence[float] = ()
    n: int = 0
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, repr=False)
class SweepResult:
    """All trials, best first, those without a value last; importances by key, empty if unknown."""

    sweep: SweepDir
    trials: Sequence[TrialResult]
    importances: Mapping[str, float]

    def __repr__(self) -> str:
        name = self.sweep.record.name
        return f"<SweepResult {name}: {self.sweep.state}, {len(self.trials)} trials>"

    def _repr_html_(self) -> str:
        """Return a table and curves for notebooks."""
        return load("python_api", "html")(self)

    def as_json(self) -> dict[str, Any]:
        """Return the results as plain data."""
        return {
            "name": self.sweep.record.name,
            "state": self.sweep.state,
            "settings": self.sweep.record.settings,
            "trials": [dataclasses.asdict(trial) for trial in self.trials],
            "importances": self.importances,
        }


def results(sweep: SweepDir) -> SweepResult:
    """Return the results of all trials; raise NotFoundError if the sweep has no table of them."""
    table = sweep.read_table()
    if table is None:
        raise NotFoundError(
            f"the sweep {sweep.record.name} has no table of its trials",
            where=str(sweep.path / TABLE_FILE),
        )
    trials = [_result(sweep, outcome) for outcome in table.outcomes]

    def rank(trial: TrialResult) -> tuple[bool, float, int]:
        cost = trial.value
        if cost is None:
            cost = trial.best
        if cost is None:
            cost = math.inf
        elif sweep.record.settings["mode"] == "max":
            cost = -cost
        return trial.state != "finished", cost, trial.number

    return SweepResult(sweep, sorted(trials, key=rank), table.importances)


def best(sweep: SweepDir) -> TrialResult:
    """Return the finished trial with the best value; raise NotFoundError if none has finished."""
    ranked = results(sweep).trials
    if not ranked or ranked[0].state != "finished":
        raise NotFoundError(
            f"no trial of {sweep.record.name} has finished",
            hint=f"`rlctl show {sweep.record.name}` shows the state of each trial",
        )
    return ranked[0]


def export(sweep: SweepDir, trial: TrialResult, path: Path) -> None:
    """Write a trial as a self-contained recipe: the base plus all values of recipe and overrides.

    Raises ConflictError if the file exists, and ConfigError for the sweep of another user, which
    names the recipe, without trust in its folder.
    """
    from rlctl.sweeps.received import require_trust

    require_trust(sweep)
    if path.exists():
        raise ConflictError(
            f"the file {path} already exists", hint="choose another name, or remove the file"
        )
    composed = compose(sweep.record.recipe, [*sweep.record.fixed, *trial.overrides])
    values = {
        key: lookup(composed.recorded, key)
        for key, chain in composed.origins.items()
        if chain[-1].level > 1
        and not any(key == prefix or key.startswith(f"{prefix}.") for prefix in _NOT_EXPORTED)
    }
    value = ""
    if trial.value is not None:
        value = f", value {trial.value:.6g}"
    overrides = " ".join(trial.overrides)
    head = f"# Trial {trial.number} of the sweep {sweep.record.name}{value}: {overrides}\n"
    body = yaml.safe_dump(
        {"defaults": [sweep.record.base, "_self_"]} | nested(values),
        sort_keys=False,
        allow_unicode=True,
    )
    path.write_text(head + body, encoding="utf-8")


def overview(sweep: SweepDir) -> dict[str, Any]:
    """Return the fields of one line of `rlctl sweeps`."""
    record = sweep.record
    trials: Sequence[TrialResult] = ()
    if sweep.read_table() is not None:
        trials = results(sweep).trials
    counts = {
        state: sum(trial.state == state for trial in trials)
        for state in ("waiting", "running", "finished", "pruned", "failed", "stopped")
    }
    winner = next((trial for trial in trials if trial.state == "finished"), None)
    return {
        "name": record.name,
        "project": record.project,
        "state": sweep.state,
        "axes": list(record.axes),
        "trials": {state: count for state, count in counts.items() if count},
        "metric": record.settings["metric"],
        "best": winner and winner.value,
        "best_trial": winner and winner.number,
        "created": record.created,
    }


def search(sweep: SweepDir) -> dict[str, Any]:
    """Return a sweep as data for its report: searched keys, importances, and all trials.

    A trial has its number, its values by key as text, its state, and its value with n and interval.
    """
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
            **{name: getattr(trial, name) for name in ("state", "value", "n", "low", "high")},
        }
        for trial in sorted(found.trials, key=lambda trial: trial.number)
    ]
    return shared | {
        "axes": [text.partition("=")[0] for text in sweep.record.axes],
        "trials": trials,
    }


def runs_of(sweep: SweepDir) -> list[Run]:
    """Return the runs of all trials, sorted by name."""
    store = RunStore(sweep.path.parent.parent)
    names = [name for trial in results(sweep).trials for name in trial.runs]
    return [store.find(str(sweep.run_folder(name))) for name in sorted(names)]


def _result(sweep: SweepDir, outcome: Outcome) -> TrialResult:
    first = sweep.record.first_seed
    count = sweep.record.settings["seeds"]
    names = [sweep.run_name(outcome.trial.number, seed) for seed in range(first, first + count)]
    names = [name for name in names if sweep.run_folder(name).is_dir()]
    values = outcome.values
    last: list[float] = []
    if count > 1:
        last = [value for name in names if (value := _last_value(sweep, name)) is not None]
    choose = min
    if sweep.record.settings["mode"] == "max":
        choose = max
    value = None
    if outcome.state == "finished":
        value = outcome.value
    if value is None and values:
        value = values[max(values)]
    number = 0
    if value is not None:
        number = count
    error = low = high = None
    if value is not None and len(last) == count > 1:
        error = stdev(last) / math.sqrt(count)
        half = t_quantile(count - 1) * error
        low = value - half
        high = value + half
    return TrialResult(
        number=outcome.trial.number,
        overrides=outcome.trial.overrides,
        state=outcome.state,
        value=value,
        error=error,
        best=choose(values.values(), default=None),
        step=max(values, default=None),
        runs=names,
        reason=outcome.reason,
        curve=[values[step] for step in sorted(values)],
        n=number,
        low=low,
        high=high,
    )


def _last_value(sweep: SweepDir, name: str) -> float | None:
    """Return the last value of a run's objective metric."""
    rows = read_metrics(sweep.run_folder(name) / METRICS_FILE)
    metric = primary_metric(rows, sweep.record.settings["metric"])
    values = [value for row in rows if metric and (value := figure(row, (metric,))) is not None]
    if not values:
        return None
    return values[-1]
