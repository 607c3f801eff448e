"""Suggestions for misspelt names and unparsable overrides."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from typing import Any


def nearest(name: str, known: Collection[str], limit: int = 3) -> list[str]:
    """Return up to `limit` known names similar to `name`, the most similar first.

    Handles three mistakes in dotted keys: a typo (`trainer.total_epoch`), missing parents
    (`optim.lr`, `lr`) and a leaf in the wrong section (`actor.lr`). A candidate costs as much as
    its cheapest explanation; candidates above a limit are left out.
    """
    ceiling = max(1.5, len(name) / 4)
    costs = ((_cost(name, candidate, ceiling), candidate) for candidate in known)
    ranked = sorted((cost, candidate) for cost, candidate in costs if cost <= ceiling)
    return [candidate for cost, candidate in ranked if cost <= ranked[0][0] + 1][:limit]


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
    """Return the cost of the cheapest explanation, or a number above `ceiling`."""
    from rapidfuzz.distance import OSA  # not needed without a mistake

    cutoff = math.floor(ceiling)
    whole = OSA.distance(name, candidate, score_cutoff=cutoff)
    depth = name.count(".") + 1
    tail = ".".join(candidate.split(".")[-depth:])
    costs: list[float] = [whole]
    if tail != candidate:
        costs.append(OSA.distance(name, tail, score_cutoff=cutoff) + 0.5)
    if "." in name and name.rpartition(".")[2] == candidate.rpartition(".")[2]:
        costs.append(1.2 + 0.02 * OSA.distance(name, candidate))
    return min(costs)


def override_fix(
    where: str | None, key: str | None = None, value: str | None = None
) -> tuple[str, str] | None:
    """Return the change of the override at `where` to another key or value, None without one.

    `where` is the place of a problem; None for one in a file, and for an override that sets a
    section, whose key stays.
    """
    if key is None and value is None:
        return None
    word = (where or "").removeprefix("override ")
    given, equals, old = word.partition("=")
    if word == where or not equals or (key is not None and old.startswith("{")):
        return None
    return word, f"{key or given}={old if value is None else value}"


def quoted(key: str, value: str) -> str:
    """Quote an override twice: for Hydra (inner quotes) and for the shell (outer quotes)."""
    return shlex.quote(hydra_text(key, value))


def overridden_keys(overrides: Iterable[str]) -> set[str]:
    """Return the keys that overrides set."""
    return {text.partition("=")[0].lstrip("+") for text in overrides if "=" in text}


def hydra_text(key: str, value: str) -> str:
    """Return the override of `key` by the text `value`, quoted for Hydra."""
    inner = re.sub(r'(\\*)("|\Z)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), value)
    return f'{key}="{inner}"'


def written(value: Any) -> str:
    """Return a value as an override writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
