"""Query for a listing of runs, and the resulting page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from rlctl.plugins import load, names
from rlctl.runs.run import Run
from rlctl.runs.settings import read_settings
from rlctl.suggest import did_you_mean
from rlctl.tracking.run_summary import RunSummary, lower_is_better
from rlctl.tracking.summary import SERIES

if TYPE_CHECKING:
    from rlctl.runs.query import Query, Term

FIELDS: Mapping[str, Callable[[Run], Any]] = {
    "name": lambda run: run.name,
    "project": lambda run: run.project,
    "path": lambda run: str(run.path),
    "state": lambda run: run.state,
    "created": lambda run: run.created.isoformat(timespec="seconds"),
    "took": lambda run: run.seconds,
    "size": lambda run: run.num_bytes,
    "tags": lambda run: list(run.labels.tags),
    "note": lambda run: run.labels.note,
    **{
        name: lambda run, name=name: getattr(run.record, name, None)
        for name in ("id", "recipe", "ended", "exit_code", "total_steps", "attempts", "sweep")
    },
    "failure": lambda run: ((run.record and run.record.failure) or {}).get("message"),
    "host": lambda run: run.record.process.host if run.record else None,
    **{
        name: lambda run, name=name: getattr(run.metrics.figures, name, None)
        for name in ("step", "metric", "first", "last", "best", "best_step", "seconds", "tokens")
    },
}
_OVERVIEW = (
    *("name", "project", "path", "state", "created", "id", "recipe", "ended", "exit_code"),
    *("total_steps", "tags", "note"),
)
_FEW = 50  # runs whose names are searched for a hint


def overview(run: Run) -> dict[str, Any]:
    """Return a run as one object of `rlctl runs --json`.

    Unreadable values are null, and `problem` gives the reason.
    """
    return {
        **{name: FIELDS[name](run) for name in _OVERVIEW},
        "failure": run.record.failure if run.record else None,
        **asdict(run.metrics.figures or RunSummary()),
        "problem": run.problem or run.metrics.problem,
    }


@dataclass(frozen=True)
class RunPage:
    """Page of a listing: runs and their extra columns, numbers of hidden runs and of all runs."""

    runs: Sequence[Run]
    columns: Sequence[Mapping[str, Any]]
    default_columns: bool
    hidden: int
    total: int

    def as_json(self) -> list[dict[str, Any]]:
        """Return each run's overview, with the extra columns under their names."""
        return [
            {**overview(run), **cells} for run, cells in zip(self.runs, self.columns, strict=True)
        ]


@dataclass(frozen=True)
class RunQuery:
    """Filters (`state`, `where`), order (`sort`), size (`number`) and columns (`cols`).

    With `group` (the name of one of `FIELDS`) the runs of a group follow one another, the group of
    the first run first.
    """

    state: str | None
    where: str | None
    sort: str | None
    cols: str | None
    number: int | None
    group: str | None = None

    def page(self, every: Sequence[Run], offset: int = 0) -> RunPage:
        """Return the matching ones of `every` run, from `offset` on.

        Raises UsageError for an invalid expression or unknown name.
        """
        found = every
        if self.where is not None:
            found = where(every, self.where)
        found = [run for run in found if self.state in (None, run.state)]
        if self.sort is not None:
            found = _ordered(found, self.sort)
        if self.group is not None:
            value = FIELDS[self.group]
            places = {name: place for place, name in enumerate(dict.fromkeys(map(value, found)))}
            found = sorted(found, key=lambda run: places[value(run)])
        shown = found[offset:][: self.number]
        keys = [
            key.strip() for key in (self.cols or "").removeprefix("+").split(",") if key.strip()
        ]
        default = self.cols is None or self.cols.startswith("+")
        hidden = max(0, len(found) - offset - len(shown))
        return RunPage(shown, _columns(shown, keys), default, hidden, len(every))


def value_of(run: Run, term: Term) -> Any:
    """Return the value of a term for a run, None if it has none; read only the file needed."""
    if term.is_metric:
        aspect = term.aspect
        if aspect == "best":
            aspect = "min" if lower_is_better(term.name) else "max"
        values = run.metrics.metrics.get(term.name)
        return values and values[SERIES.index(aspect)]
    if term.name in FIELDS:
        return FIELDS[term.name](run)
    if term.name in names("run_fields"):
        return load("run_fields", term.name)(run)
    return run.setting(term.name)


def where(runs: Sequence[Run], text: str) -> list[Run]:
    """Return the runs that match an expression, in order.

    Raises UsageError for an invalid expression or an unknown name.
    """
    from rlctl.runs.query import Query

    query = Query(text)
    check_names(query, runs)
    # Copies forget their metrics, which would fill the memory.
    return [run for run in runs if query.evaluate(partial(value_of, replace(run)))]


def _ordered(runs: Sequence[Run], text: str) -> list[Run]:
    """Sort the runs by a value, ascending, or descending with a leading `-`; missing ones last."""
    from rlctl.runs.query import Query

    query = Query(text.removeprefix("-"))
    term = query.term()
    check_names(query, runs)
    values = [(value_of(replace(run), term), run) for run in runs]
    known = [(value, run) for value, run in values if value is not None]
    if not all(isinstance(value, int | float) for value, _ in known):
        known = [(str(value), run) for value, run in known]
    known.sort(key=itemgetter(0), reverse=text.startswith("-"))
    return [run for _, run in known] + [run for value, run in values if value is None]


def _columns(runs: Sequence[Run], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the value of each of `texts` for every run."""
    if not texts:
        return [{} for _ in runs]
    from rlctl.runs.query import Query

    queries = {text: Query(text) for text in texts}
    terms = {text: query.term() for text, query in queries.items()}
    for query in queries.values():
        check_names(query, runs)
    return [{text: value_of(run, term) for text, term in terms.items()} for run in runs]


def check_names(query: Query, runs: Sequence[Run]) -> None:
    """Raise UsageError for a name that no run has; a known one may be null in all of them."""
    for term in query.terms:
        if term.name in FIELDS or not runs:
            continue
        if any(value_of(replace(run), term) is not None for run in runs):
            continue
        names = {name for run in runs[:_FEW] for name in _names(run, term.is_metric)}
        if term.name not in names:
            hint = did_you_mean(term.name, names) or (
                "`rlctl show RUN --json` has all metrics, `rlctl config show -r RUN` all keys"
            )
            raise query.unknown(term, hint)


def _names(run: Run, metrics: bool) -> set[str]:
    """Return the metrics of a run, or its fields and keys."""
    if metrics:
        return {*run.metrics.metrics}
    return {*FIELDS, *names("run_fields"), *read_settings(run.path)}
