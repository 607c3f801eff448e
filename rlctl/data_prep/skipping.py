"""Report of records that are left out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from rlctl.errors import Problem
from rlctl.text import plural

LOG = logging.getLogger(__name__)

_MAX_PLACES = 5  # that are named for a reason
_MAX_REASONS = 3


def report_skipped(skipped: Sequence[Problem], num_records: int) -> None:
    """Log how many of `num_records` are left out, why, and where the first of each kind are."""
    if not skipped:
        return
    places: dict[str, list[str]] = {}
    for problem in skipped:
        places.setdefault(problem.message, []).append(problem.where or "")
    reasons = [f"{message} ({_named(where)})" for message, where in places.items()]
    more = len(reasons) - _MAX_REASONS
    if more > 0:
        reasons = [*reasons[:_MAX_REASONS], f"and {plural(more, 'other reason')}"]
    LOG.warning(
        "leaving out %d of %s: %s",
        len(skipped),
        plural(num_records, "record"),
        "; ".join(reasons),
    )


def _named(places: Sequence[str]) -> str:
    """Return the first places: `a.csv:10, :25, :31 and 9 more`."""
    first, *others = places[:_MAX_PLACES]
    file = first.rpartition(":")[0]
    short = [str(Path(first))]
    for place in others:
        if file and place.startswith(f"{file}:"):
            place = place.removeprefix(file)
        short.append(place)
    text = ", ".join(short)
    hidden = len(places) - _MAX_PLACES
    if hidden > 0:
        text += f" and {hidden} more"
    return text
