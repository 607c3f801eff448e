"""Query for a listing of runs, and the resulting page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.runs.details import overview
from rlctl.runs.query_values import FIELDS, columns, ordered, where
from rlctl.runs.run import Run
from rlctl.runs.store import RunStore


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

    def page(self, store: RunStore, offset: int = 0, every: Sequence[Run] | None = None) -> RunPage:
        """Return the matching runs from `offset` on, of `every` or all of the store.

        Raises UsageError for an invalid expression or unknown name.
        """
        every = store.runs() if every is None else every
        found = where(store.index, every, self.where) if self.where is not None else every
        found = [run for run in found if self.state in (None, run.state)]
        found = ordered(store.index, found, self.sort) if self.sort is not None else found
        if self.group is not None:
            value = FIELDS[self.group]
            places = {name: place for place, name in enumerate(dict.fromkeys(map(value, found)))}
            found = sorted(found, key=lambda run: places[value(run)])
        end = None if self.number is None else offset + self.number
        shown = found[offset:end]
        store.preload(shown)
        keys = [
            key.strip() for key in (self.cols or "").removeprefix("+").split(",") if key.strip()
        ]
        default = self.cols is None or self.cols.startswith("+")
        return RunPage(
            shown,
            columns(store.index, shown, keys),
            default,
            max(0, len(found) - offset - len(shown)),
            len(every),
        )
