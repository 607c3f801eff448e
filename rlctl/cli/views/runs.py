"""Terminal views of runs."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlctl.cli.console import stdout, table
from rlctl.cli.stderr import notice, warn
from rlctl.errors import UsageError
from rlctl.monitoring.run_summary import RunSummary
from rlctl.monitoring.text import ago, duration, percent_or_number, size
from rlctl.runs.listing import RunPage, RunQuery
from rlctl.runs.run import Run
from rlctl.runs.store import RunStore
from rlctl.terminal import visible

COLOURS = {
    "starting": "cyan",
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "lost": "red",
    "broken": "red",
    "stopped": "yellow",
}
WATCH_S = 2.0
SHOWN_METRICS = (
    "critic/score/mean",
    "critic/rewards/mean",
    "actor/ppo_kl",
    "actor/reward_kl_penalty",
    "actor/kl_loss",
    "actor/entropy",
    "actor/pg_clipfrac",
    "actor/grad_norm",
    "critic/vf_loss",
    "critic/vf_explained_var",
    "train/loss",
    "response_length/mean",
    "response_length/clip_ratio",
    "perf/throughput",
    "timing_s/step",
    "agent/turns/mean",
    "agent/tool_tokens_share",
)


def print_runs(page: RunPage, root: Path) -> None:
    """Print the table of `rlctl runs`; report hidden and unreadable runs on stderr."""
    if not page.runs:
        notice(
            "no run matches"
            if page.total
            else f"no runs in {root.resolve()}; `rlctl train ppo` makes one"
        )
        return
    stdout().print(_runs_table(page))
    if page.hidden:
        notice(f"{page.hidden} more; --all shows them")
    for run in page.runs:
        if problem := run.problem or run.metrics.problem:
            warn(f"{run.key}: {problem}")


def watch_runs(query: RunQuery, store: RunStore, as_json: bool) -> None:
    """Show the table and refresh it until Ctrl-C. Raises UsageError without a terminal."""
    if as_json or not stdout().is_terminal:
        raise UsageError("--watch needs a terminal", hint="list the runs once without it")
    with Live(console=stdout(), auto_refresh=False, transient=True) as live:
        while True:
            page = query.page(store.runs())
            live.update(_runs_table(page) if page.runs else Text("no runs yet"), refresh=True)
            time.sleep(WATCH_S)


def _runs_table(page: RunPage) -> Table:
    several = len({run.project for run in page.runs}) > 1
    default = ["state", "created", "took", "step", "validation"] if page.default_columns else []
    rows = [
        [
            run.key if several else run.name,
            *(_default_cells(run) if default else []),
            *(_cell(key, value) for key, value in cells.items()),
        ]
        for run, cells in zip(page.runs, page.columns, strict=True)
    ]
    extra = list(page.columns[0])
    numeric = [
        key
        for key in extra
        if all(isinstance(cells[key], int | float | None) for cells in page.columns)
    ]
    return table(["run", *default, *extra], rows, right=["took", "step", *numeric])


def _cell(key: str, value: object) -> str | Text:
    if key == "state":
        return Text(str(value), style=COLOURS[str(value)])
    if value is None or value == []:
        return "-"
    if key == "size" and isinstance(value, int):
        return size(value)
    if isinstance(value, list):  # tags
        return visible(", ".join(map(str, value)))
    return (
        percent_or_number(key, value) if "/" in key and isinstance(value, float) else short(value)
    )


def _default_cells(run: Run) -> list[str | Text]:
    summary = run.metrics.figures or RunSummary()
    total = run.record.total_steps if run.record else None
    steps = "-" if summary.step is None else str(summary.step)
    return [
        Text(_state(run), style=COLOURS[run.state]),
        ago((datetime.now(UTC) - run.created).total_seconds()),
        duration(run.seconds) if run.seconds is not None else "-",
        f"{steps}/{total}" if total else steps,
        validation(summary),
    ]


def _state(run: Run) -> str:
    """Return the state, of a failed run with the code of its error."""
    failure = run.record.failure if run.record is not None else None
    return f"{run.state} {failure['code']}" if failure is not None else run.state


def validation(summary: RunSummary) -> str:
    """Return the first and the last value of the main validation metric."""
    first, last = (
        percent_or_number(summary.metric, value) for value in (summary.first, summary.last)
    )
    return f"{first} → {last}" if summary.metric else "-"


def short(value: object) -> str:
    """Format a setting's value in at most 40 characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else text[:39] + "…"
