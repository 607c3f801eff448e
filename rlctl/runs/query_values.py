"""Values of query terms for many runs, and the selections and orders built on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlctl.runs.digests import CONFIG, METRICS
from rlctl.runs.index import Index
from rlctl.runs.query import Query, Term
from rlctl.runs.run import Run
from rlctl.suggest import did_you_mean

FIELDS: Mapping[str, Callable[[Run], Any]] = {
    "name": lambda run: run.name,
    "project": lambda run: run.project,
    "path": lambda run: str(run.path),
    "state": lambda run: run.state,
    "created": lambda run: run.created.isoformat(timespec="seconds"),
    "took": lambda run: run.seconds,
    "tags": lambda run: list(run.labels.tags),
    "note": lambda run: run.labels.note,
    **{
        name: lambda run, name=name: getattr(run.record, name, None)
        for name in ("id", "recipe", "ended", "exit_code", "total_steps", "attempts", "sweep")
    },
    "failure": lambda run: ((run.record and run.record.failure) or {}).get("message"),
    "host": lambda run: run.record.process.host if run.record else None,
}
SUMMARY_FIELDS = ("step", "metric", "first", "last", "best", "best_step", "seconds", "tokens")


def read_values(index: Index, runs: Sequence[Run], terms: Sequence[Term]) -> list[dict[Term, Any]]:
    """Return the value of every term for each run, None if absent; read only the files needed."""
    folders = {run.key: str(run.path) for run in runs}
    metrics = index.read(METRICS, folders) if any(map(_is_in_metrics, terms)) else {}
    others = [term for term in terms if not _is_in_metrics(term) and term.name not in FIELDS]
    settings = index.read(CONFIG, folders) if others else {}

    def value(run: Run, term: Term) -> Any:
        if term.is_metric:
            return term.value_in(metrics[run.key]["series"].get(term.name))
        if term.name in SUMMARY_FIELDS:
            return (metrics[run.key]["summary"] or {}).get(term.name)
        if term.name in FIELDS:
            return FIELDS[term.name](run)
        return settings[run.key].get(term.name)

    return [{term: value(run, term) for term in terms} for run in runs]


def _is_in_metrics(term: Term) -> bool:
    return term.is_metric or term.name in SUMMARY_FIELDS


def where(index: Index, runs: Sequence[Run], text: str) -> list[Run]:
    """Return the runs that match an expression, in order.

    Raises UsageError for an invalid expression or an unknown name.
    """
    query = Query.parse(text)
    rows = _known_values(index, runs, query, query.terms)
    return [run for run, row in zip(runs, rows, strict=True) if query.value(row)]


def ordered(index: Index, runs: Sequence[Run], text: str) -> list[Run]:
    """Sort the runs by a value, ascending, or descending with a leading `-`; missing ones last."""
    query = Query.parse(text.removeprefix("-"))
    term = query.term()
    rows = _known_values(index, runs, query, [term])
    known = [(row[term], run) for run, row in zip(runs, rows, strict=True) if row[term] is not None]
    numbers = all(isinstance(value, int | float) for value, _ in known)
    known.sort(key=lambda pair: pair[0] if numbers else str(pair[0]), reverse=text.startswith("-"))
    return [run for _, run in known] + [
        run for run, row in zip(runs, rows, strict=True) if row[term] is None
    ]


def columns(index: Index, runs: Sequence[Run], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the value of each of `texts` for every run."""
    queries = [Query.parse(text) for text in texts]
    terms = [query.term() for query in queries]
    for query, term in zip(queries, terms, strict=True):
        _known_values(index, runs, query, [term])
    rows = read_values(index, runs, terms)
    return [{text: row[term] for text, term in zip(texts, terms, strict=True)} for row in rows]


def _known_values(
    index: Index, runs: Sequence[Run], query: Query, terms: Sequence[Term]
) -> list[dict[Term, Any]]:
    """Return the values. Raises UsageError for a name that no run has."""
    rows = read_values(index, runs, terms)
    absent = [
        term
        for term in terms
        if runs
        and term.name not in (*FIELDS, *SUMMARY_FIELDS)
        and all(row[term] is None for row in rows)
    ]
    for term in absent:
        hint = _hint(index, runs, term)
        if hint is not None:
            raise query.unknown(term, hint)
    return rows


def _hint(index: Index, runs: Sequence[Run], term: Term) -> str | None:
    """Return a hint for an unknown name; None for a known one, whose value is null in all runs."""
    some = {run.key: str(run.path) for run in runs[:50]}
    if term.is_metric:
        names = {name for digest in index.read(METRICS, some).values() for name in digest["series"]}
    else:
        names = {name for digest in index.read(CONFIG, some).values() for name in digest} | {
            *FIELDS,
            *SUMMARY_FIELDS,
        }
    if term.name in names:
        return None
    return (
        did_you_mean(term.name, names)
        or "`rlctl show RUN --json` has all metrics, `rlctl config show -r RUN` all keys"
    )
