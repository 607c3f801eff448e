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
from rlctl.runs.listing import RunPage, RunQuery
from rlctl.runs.run import Run
from rlctl.runs.store import RunStore
from rlctl.terminal import visible
from rlctl.text import duration, size
from rlctl.tracking.run_summary import RunSummary, percent_or_number

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


def ago(seconds: float) -> str:
    """Format an age in one unit: just now, 5 min ago, 3 h ago, 2 days ago."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (seconds >= length and unit != "days"):
            return f"{int(seconds // length)} {unit} ago"
    return "just now"


def print_runs(page: RunPage, root: Path) -> None:
    """Print the table of `rlctl runs`; report hidden and unreadable runs on stderr."""
    if not page.runs:
        if page.total:
            notice("no run matches")
        else:
            notice(f"no runs in {root.resolve()}; `rlctl train ppo` makes one")
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
            shown = Text("no runs yet")
            if page.runs:
                shown = _runs_table(page)
            live.update(shown, refresh=True)
            time.sleep(WATCH_S)


def _runs_table(page: RunPage) -> Table:
    several = len({run.project for run in page.runs}) > 1
    default: list[str] = []
    if page.default_columns:
        default = ["state", "created", "took", "step", "validation"]
    rows: list[list[str | Text]] = []
    for run, cells in zip(page.runs, page.columns, strict=True):
        row: list[str | Text] = [run.name]
        if several:
            row = [run.key]
        if default:
            row += _default_cells(run)
        rows.append([*row, *(_cell(key, value) for key, value in cells.items())])
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
    if "/" in key and isinstance(value, float):
        return percent_or_number(key, value)
    return short(value)


def _default_cells(run: Run) -> list[str | Text]:
    summary = run.metrics.figures or RunSummary()
    took = "-"
    if run.seconds is not None:
        took = duration(run.seconds)
    steps = "-"
    if summary.step is not None:
        steps = str(summary.step)
    if run.record and run.record.total_steps:
        steps += f"/{run.record.total_steps}"
    return [
        Text(_state(run), style=COLOURS[run.state]),
        ago((datetime.now(UTC) - run.created).total_seconds()),
        took,
        steps,
        validation(summary),
    ]


def _state(run: Run) -> str:
    """Return the state, of a failed run with the code of its error."""
    if run.record is None or run.record.failure is None:
        return run.state
    return f"{run.state} {run.record.failure['code']}"


def validation(summary: RunSummary) -> str:
    """Return the first and the last value of the main validation metric."""
    if not summary.metric:
        return "-"
    first, last = (
        percent_or_number(summary.metric, value) for value in (summary.first, summary.last)
    )
    return f"{first} → {last}"


def short(value: object) -> str:
    """Format a setting's value in at most 40 characters."""
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=str)
    if len(value) > 40:
        return value[:39] + "…"
    return value
