"""Terminal view of a sweep that another process runs."""

from __future__ import annotations

import typer
from rich.live import Live
from rich.table import Table

from rlctl.cli.console import stdout
from rlctl.cli.stderr import notice
from rlctl.cli.views.sweep import trials_table
from rlctl.sweeps.sweep_record import SweepDir
from rlctl.sweeps.sweep_watcher import SweepWatcher
from rlctl.terminal import visible


def watch_sweep(sweep: SweepDir, trial: int | None) -> None:
    """Follow a sweep, or one of its trials, until it ends: a live table, or a line per step."""
    watcher = SweepWatcher(sweep, trial)
    if stdout().is_terminal:
        with Live(console=stdout(), refresh_per_second=2) as live:
            for seen in watcher.follow():
                if seen is None:
                    live.update(_table(watcher))
    else:
        for seen in watcher.follow():
            if seen is not None:
                run, alarm = seen
                typer.echo(visible(f"{run.run.name}: {run.line(alarm)}"))
    _print_end(watcher)


def _table(watcher: SweepWatcher) -> Table:
    runs = {number: list(known.values()) for number, known in watcher.runs.items() if known}
    progress = {
        number: min((run.panel.step or 0, run.panel.total_steps) for run in known)
        for number, known in runs.items()
    }
    mode = watcher.sweep.record.settings["mode"]
    return trials_table(watcher.outcomes, progress, runs.keys(), mode)


def _print_end(watcher: SweepWatcher) -> None:
    name = watcher.sweep.record.name
    ended = f"{name} is {watcher.sweep.state}"
    if watcher.trial is not None:
        states = ", ".join(outcome.state for outcome in watcher.outcomes)
        ended = f"trial {watcher.trial} of {name} is {states}"
    notice(f"{ended}; `rlctl show {name}` shows its trials")
