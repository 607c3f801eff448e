"""Table of `rlctl fit`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlctl.cli.console import stdout, table

if TYPE_CHECKING:
    from rlctl.runtime.planning.fit import Fit
    from rlctl.runtime.planning.trial import Trial

_GIB = 2**30


def show(fits: Sequence[Fit], chosen: Fit | None, usable: int, device: str, command: str) -> None:
    """Print a row per mesh, and the command with the overrides of the chosen one."""
    columns = ["devices", "nodes", "saving memory", "rows", "tokens", "peak", "fits"]
    rows = [
        (
            f"{each.mesh.devices}",
            f"{each.mesh.nodes}",
            each.savings if each.rows else "-",
            f"{each.rows:,}" if each.rows else "-",
            f"{each.tokens:,}" if each.rows else "-",
            f"{each.peak / _GIB:.1f} GiB" if each.peak else "-",
            "← cheapest" if each is chosen else "yes" if each.rows else each.reason or "no",
        )
        for each in fits
    ]
    stdout().print(table(columns, rows, right=columns[:2] + columns[3:6]))
    stdout().print(
        f"\nestimated, per device; {usable / _GIB:.1f} GiB of {device} are used, the rest is left "
        "for the framework",
        markup=False,
    )
    if chosen is not None:
        stdout().print(f"\n{command} \\\n  " + " \\\n  ".join(map(shlex.quote, chosen.overrides)))


def show_trial(trial: Trial, fit: Fit, memory: int) -> None:
    """Print the result of a trial beside the estimate."""
    assert trial.peak is not None, "the trial succeeded"
    stdout().print(
        f"\ntried: one step with micro-batches of {fit.rows:,} rows took {trial.seconds:.0f} s and "
        f"{trial.peak / _GIB:.2f} GiB at its peak, of {memory / _GIB:.1f} GiB "
        f"(estimated: {fit.peak / _GIB:.2f} GiB without the framework)",
        markup=False,
    )
