"""The values of terms (`rlctl.runs.query`) for many runs at once, and what is made of them: selections and orders."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlctl.runs.digests import CONFIG, METRICS
from rlctl.runs.query import Query, Term

if TYPE_CHECKING:
    from rlctl.runs.store import Run, RunStore

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
        for name in ("id", "recipe", "ended", "exit_code", "total_steps", "attempts")
    },
    "host": lambda run: run.record.process.host if run.record else None,
}
HEADLINE = ("step", "metric", "first", "last", "best", "best_step", "seconds", "tokens")


def read_values(
    store: RunStore, runs: Sequence[Run], terms: Sequence[Term]
) -> list[dict[Term, Any]]:
    """For each run the value of every term, None for what it does not have. Files that no term asks for are not read."""
    rows: list[dict[Term, Any]] = [{} for _ in runs]
    folders = {run.key: str(run.path) for run in runs}
    metrics = [term for term in terms if term.is_metric]
    headline = [term for term in terms if term.name in HEADLINE]
    settings = [
        term
        for term in terms
        if not term.is_metric and term.name not in HEADLINE and term.name not in FIELDS
    ]
    for part, wanted, keys in (
        (METRICS, metrics, [("courses", term.name) for term in metrics]),
        (METRICS, headline, [("headline", term.name) for term in headline]),
        (CONFIG, settings, [(term.name,) for term in settings]),
    ):
        found = store.index.read(part, folders, keys) if keys else {}
        for row, run in zip(rows, runs, strict=True):
            for term, value in zip(wanted, found.get(run.key, ()), strict=False):
                row[term] = term.of_course(value) if term.is_metric else value
    for term in terms:
        if term.name in FIELDS:
            for row, run in zip(rows, runs, strict=True):
                row[term] = FIELDS[term.name](run)
    return rows


def where(store: RunStore, runs: Sequence[Run], text: str) -> list[Run]:
    """The runs that an expression is true of, in their order. Errors: UsageError for one that cannot be read or names nothing there is."""
    query = Query.parse(text)
    rows = _known(store, runs, query, query.terms)
    return [run for run, row in zip(runs, rows, strict=True) if query.value(row)]


def ordered(store: RunStore, runs: Sequence[Run], text: str) -> list[Run]:
    """The runs by a value, least first, greatest first with a `-` before it; those without it come last."""
    query = Query.parse(text.removeprefix("-"))
    term = query.term()
    rows = _known(store, runs, query, [term])
    known = [(row[term], run) for run, row in zip(runs, rows, strict=True) if row[term] is not None]
    numbers = all(isinstance(value, int | float) for value, _ in known)
    known.sort(key=lambda pair: pair[0] if numbers else str(pair[0]), reverse=text.startswith("-"))
    return [run for _, run in known] + [
        run for run, row in zip(runs, rows, strict=True) if row[term] is None
    ]


def columns(store: RunStore, runs: Sequence[Run], texts: Sequence[str]) -> list[dict[str, Any]]:
    """For each run the value of every one of `texts`."""
    queries = [Query.parse(text) for text in texts]
    terms = [query.term() for query in queries]
    for query, term in zip(queries, terms, strict=True):
        _known(store, runs, query, [term])
    rows = read_values(store, runs, terms)
    return [{text: row[term] for text, term in zip(texts, terms, strict=True)} for row in rows]


def _known(
    store: RunStore, runs: Sequence[Run], query: Query, terms: Sequence[Term]
) -> list[dict[Term, Any]]:
    """The values; a name that is no field and that not one of the runs has is a mistake, and said."""
    rows = read_values(store, runs, terms)
    absent = [
        term
        for term in terms
        if runs and term.name not in (*FIELDS, *HEADLINE) and all(row[term] is None for row in rows)
    ]
    for term in absent:
        near = _near(store, runs, term)
        if near is not None:
            raise query.unknown(term, near)
    return rows


def _near(store: RunStore, runs: Sequence[Run], term: Term) -> str | None:
    """What may have been meant; None where the name is right (a key whose value is null everywhere)."""
    some = {run.key: str(run.path) for run in runs[:50]}
    if term.is_metric:
        names = {
            name
            for digest in store.index.read(METRICS, some).values()
            for name in digest["courses"]
        }
    else:
        names = {name for digest in store.index.read(CONFIG, some).values() for name in digest} | {
            *FIELDS,
            *HEADLINE,
        }
    if term.name in names:
        return None
    near = [name for name in sorted(names) if name.endswith(f".{term.name}")][:3]
    near = near or difflib.get_close_matches(term.name, sorted(names), n=3, cutoff=0.6)
    return (
        f"did you mean {' or '.join(near)}?"
        if near
        else "`rlctl show RUN --json` has all metrics, `rlctl config show RUN` all keys"
    )
