"""Errors of names of runs: one that is taken, and a selector that names no run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from rlctl.errors import ConflictError, NotFoundError, Problem
from rlctl.runs.run import Run
from rlctl.suggest import closest, did_you_mean


def taken(path: Path) -> ConflictError:
    """Return the error for a name that is taken, with a free one as its hint."""
    hint = f"the name {free_name(path)} is free"
    return ConflictError(f"a run named {path.name!r} already exists", where=str(path), hint=hint)


def free_name(path: Path) -> str:
    """Return the name of a folder that does not exist: that of `path`, or with a number."""
    numbered = (f"{path.name}-{number}" for number in itertools.count(2))
    names = itertools.chain([path.name], numbered)
    return next(name for name in names if not (path.parent / name).exists())


def unknown(selector: str, runs: Sequence[Run], root: Path) -> NotFoundError:
    """Return the error of a selector that names none of the `runs` below `root`."""
    where = str(root.resolve())
    if not runs:
        hint = "`rlctl train ppo` makes one; --root DIR or RLCTL_RUNS looks elsewhere"
        return NotFoundError("there are no runs", where=where, hint=hint)
    names = {run.name for run in runs}
    hint = did_you_mean(selector, names) or "`rlctl runs` lists them"
    near = closest(selector, names)
    kind, _, given = selector.partition(":")
    special = {
        "@failed": "no run has failed",
        "@best": f"no run has a metric {given!r}",
        "@tag": f"no run has the tag {given!r}",
    }
    fix = None
    if near:
        fix = (selector, near)
    message = special.get(kind, f"no run is named {selector!r}")
    return NotFoundError(Problem(message, where, hint, fix))
