"""Selectors of runs: names and their beginnings, ids, folders, and `@last` and the like."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.errors import UsageError
from rlctl.runs.links import refuse_links
from rlctl.runs.listing import value_of
from rlctl.runs.name_errors import unknown
from rlctl.runs.query import Query
from rlctl.runs.run import Run, is_run, read_run
from rlctl.tracking.run_summary import lower_is_better

if TYPE_CHECKING:
    from rlctl.runs.store import RunStore


def find(store: RunStore, selector: str) -> Run:
    """Return the run that `selector` names; see `RunStore.find`."""
    return refuse_links(_named(store, selector))


def _named(store: RunStore, selector: str) -> Run:
    if not selector.strip():
        raise UsageError(
            "the name of the run is empty",
            hint="give a name or its beginning, @last or @failed; `rlctl runs` lists them",
        )
    if is_run(Path(selector)):
        return read_run(Path(selector))
    runs = sorted(store.runs(), key=lambda run: run.created, reverse=True)
    if selector.startswith("@"):
        return _newest(store, selector, runs)
    matches = [run for run in runs if selector in _names(run)] or [
        run for run in runs if any(name.startswith(selector) for name in _names(run))
    ]
    if len(matches) > 1:
        candidates = [run.key for run in matches[:8]]
        if len(matches) > 8:
            candidates.append("…")
        hint = f"one of: {', '.join(candidates)}"
        raise UsageError(f"{selector!r} names {len(matches)} runs", hint=hint)
    if not matches:
        raise unknown(selector, runs, store.root)
    return matches[0]


def _newest(store: RunStore, selector: str, runs: Sequence[Run]) -> Run:
    kind, _, given = selector.partition(":")
    if kind == "@best" and given:
        found = _best(given, runs)
    elif kind == "@tag" and given:
        found = next((run for run in runs if given in run.labels.tags), None)
    elif selector in ("@last", "@failed"):
        found = next(
            (run for run in runs if selector == "@last" or run.state in ("failed", "lost")),
            None,
        )
    else:
        raise UsageError(
            f"unknown selector {selector!r}",
            hint="use @last, @failed, @best:METRIC, @tag:TAG, or the beginning of a name",
        )
    if found is None:
        raise unknown(selector, runs, store.root)
    return found


def _best(metric: str, runs: Sequence[Run]) -> Run | None:
    """Return the run with the best value of a metric or aspect; ties go to the newest."""
    if "(" not in metric:
        metric = f"best({metric})"
    term = Query(metric).term()
    values = [(value_of(run, term), run) for run in runs]
    found = [(value, run) for value, run in values if value is not None]
    if not found:
        return None
    choose = min if lower_is_better(term.name) else max
    return choose(found, key=itemgetter(0))[1]


def _names(run: Run) -> tuple[str, ...]:
    if run.record is None:
        return run.name, run.key
    return run.name, run.key, run.record.id
