"""Suggestions for misspelt names and unparsable overrides."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence


def nearest(name: str, known: Collection[str], limit: int = 3) -> list[str]:
    """Return up to `limit` known names similar to `name`, the most similar first.

    Handles three mistakes in dotted keys: a typo (`trainer.total_epoch`), missing parents
    (`optim.lr`, `lr`) and a leaf in the wrong section (`actor.lr`). A candidate costs as much as
    its cheapest explanation; candidates above a limit are left out.
    """
    most = max(1.5, len(name) / 4)
    for ceiling in (
        min(3.0, most),
        most,
    ):  # most typos are small; distant names are slow to compare
        ranked = sorted(
            (cost, candidate)
            for candidate in known
            if (cost := _cost(name, candidate, ceiling)) <= ceiling
        )
        if ranked and (ranked[0][0] + 1 <= ceiling or ceiling == most):
            return [candidate for cost, candidate in ranked if cost <= ranked[0][0] + 1][:limit]
    return []


def did_you_mean(name: str, known: Collection[str]) -> str | None:
    """Return `did you mean A or B?`, or None if no known name is similar."""
    return question(nearest(name, known))


def question(names: Sequence[str]) -> str | None:
    """Return `did you mean A or B?`, or None without names."""
    return f"did you mean {' or '.join(names)}?" if names else None


def closest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is the most similar to `name`, or None if none is."""
    return next(iter(nearest(name, known, limit=1)), None)


def _cost(name: str, candidate: str, ceiling: float) -> float:
    whole = distance(name, candidate, ceiling)
    depth = name.count(".") + 1
    tail = ".".join(candidate.split(".")[-depth:])
    as_tail = distance(name, tail, ceiling) + 0.5 if tail != candidate else whole
    same_leaf = "." in name and name.rpartition(".")[2] == candidate.rpartition(".")[2]
    misplaced = 1.2 + 0.02 * distance(name, candidate) if same_leaf else float("inf")
    return min(whole, as_tail, misplaced)


def distance(a: str, b: str, ceiling: float = float("inf")) -> float:
    """Return the optimal string alignment distance: insert, delete, replace, swap of neighbours.

    May return infinity for a distance above `ceiling`.
    """
    same = _prefix_length(a, b)
    a, b = a[same:], b[same:]
    same = _prefix_length(a[::-1], b[::-1])
    a, b = a[: len(a) - same], b[: len(b) - same]
    if abs(len(a) - len(b)) > ceiling:
        return float("inf")
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, last, row = row, before, [i]
        for j, y in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
        if min(row) > ceiling and min(before) > ceiling:
            return float("inf")
    return row[-1]


def _prefix_length(a: str, b: str) -> int:
    """Return the length of the common prefix."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def override_fix(
    where: str | None, key: str | None = None, value: str | None = None
) -> tuple[str, str] | None:
    """Return the change of the override at `where` to another key or value.

    `where` is the place of a problem; None for one in a file, and for an override that sets a
    section, whose key stays.
    """
    word = (where or "").removeprefix("override ")
    given, equals, old = word.partition("=")
    if word == where or not equals or (key is not None and old.startswith("{")):
        return None
    return word, f"{key or given}={old if value is None else value}"


def parsable(key: str, value: str) -> tuple[str, str]:
    """Return how to repair an override that Hydra cannot parse, and the repaired override."""
    for opening, closing in ("[]", "{}"):
        missing = value.count(opening) - value.count(closing)
        if value.startswith(opening) and missing > 0:
            return "close", f"{key}={value}{closing * missing}"
    return "quote", hydra_text(key, value)


def quoted(key: str, value: str) -> str:
    """Quote an override twice: for Hydra (inner quotes) and for the shell (outer quotes)."""
    return shlex.quote(hydra_text(key, value))


def hydra_text(key: str, value: str) -> str:
    """Return the override of `key` by the text `value`, quoted for Hydra."""
    inner = re.sub(r'(\\*)("|\Z)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), value)
    return f'{key}="{inner}"'
