"""Checks of a sweep's folder that others may have made: types of its records, links, and trust."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from rlctl.runs.ownership import own_folder
from rlctl.runs.trust import is_trusted, links_to_elsewhere, refuse
from rlctl.sweeps.sweep_record import SweepDir, SweepRecord, TrialTable
from rlctl.terminal import visible

_MAX_SEEDS = 10_000  # each is a folder to look for


class _Settings(BaseModel):
    """Settings of a sweep without which its results cannot be read."""

    mode: Literal["max", "min"]
    metric: str | None = None
    seeds: int = Field(ge=1, le=_MAX_SEEDS)


_RECORD, _TABLE, _SETTINGS = map(TypeAdapter, (SweepRecord, TrialTable, _Settings))


def checked_record(fields: Mapping[str, Any]) -> SweepRecord:
    """Return the record with these fields; raise ValueError for a wrong type or name."""
    record = _checked(_RECORD, fields)
    _checked(_SETTINGS, record.settings)
    if record.name != Path(record.name).name or record.name in ("", ".", ".."):
        raise ValueError(f"{record.name!r} is not a name of a folder")
    return record


def checked_table(fields: Mapping[str, Any]) -> TrialTable:
    """Return the table with these fields; raise ValueError for a wrong type."""
    table = _checked(_TABLE, fields)
    if any(outcome.trial.number < 0 for outcome in table.outcomes):
        raise ValueError("a trial has a negative number")
    return table


def require_trust(sweep: SweepDir) -> None:
    """Raise ConfigError for the sweep of another user without trust in its folder."""
    if own_folder(sweep.place, sweep.digest) is None and not is_trusted(sweep.path):
        record = sweep.record
        named = [f"recipe={record.recipe}", f"cwd={record.cwd}", *record.fixed, *record.axes]
        named += [f"the link {link}" for link in links_to_elsewhere(sweep.path)]
        refuse(f"the sweep {record.name!r}", list(map(visible, named)), sweep.path)


def _checked(kind: TypeAdapter[Any], value: Any) -> Any:
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
