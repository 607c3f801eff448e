"""Terminal views of runs."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlctl.cli.console import notice, print_table, stdout, table, warn
from rlctl.errors import UsageError
from rlctl.files import by_step
from rlctl.monitoring.run_summary import RunSummary
from rlctl.monitoring.text import ago, count, duration, percent_or_number, size, sparkline
from rlctl.recipes.search_path import place
from rlctl.runs.listing import RunPage, RunQuery
from rlctl.runs.record import RunRecord
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
SHOWN_PREFIXES = ("agent/outcome/", "agent/refused_calls/", "tool/")


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
        _validation(summary),
    ]


def _state(run: Run) -> str:
    """Return the state, of a failed run with the code of its error."""
    failure = run.record.failure if run.record is not None else None
    return f"{run.state} {failure['code']}" if failure is not None else run.state


def _validation(summary: RunSummary) -> str:
    first, last = (
        percent_or_number(summary.metric, value) for value in (summary.first, summary.last)
    )
    return f"{first} → {last}" if summary.metric else "-"


def print_run(run: Run) -> None:
    """Print the page of `rlctl show`."""
    from rlctl.runs import details
    from rlctl.runs.details import alarms, changed_settings
    from rlctl.tracking.destination import commands, line

    summary, problem = run.metrics.figures, run.metrics.problem
    stdout().print(Text.assemble((run.name, "bold"), "  ", (run.state, COLOURS[run.state])))
    for trouble in filter(None, (run.problem, problem)):
        warn(trouble)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name, value in [
        ("project", run.project),
        *(_facts(run.record) if run.record else []),
        *details.early_ends(run),
        *_figures(run, summary),
        *_files(run),
    ]:
        facts.add_row(name, Text(visible(value)))
    for name, destination in details.trackers(run).items():
        facts.add_row(name, Text(visible("; ".join([line(destination), *commands(destination)]))))
    for alarm in alarms(run):
        until = "on" if alarm["over"] is None else f"to {alarm['over']}"
        facts.add_row(
            "alarm",
            Text(
                visible(f"step {alarm['step']} {until}: {alarm['message']}"),
                style="red" if alarm["over"] is None else "yellow",
            ),
        )
    if run.labels.tags:
        facts.add_row("tags", Text(", ".join(run.labels.tags)))
    if run.labels.note:
        facts.add_row("note", Text(visible(run.labels.note)))
    stdout().print(facts)
    series = run.metrics.metrics
    names = [
        *(name for name in series if name.startswith("val-core/")),
        *(name for name in SHOWN_METRICS if name in series),
        *(name for name in series if name.startswith(SHOWN_PREFIXES)),
    ]
    metrics = run.table()
    # A damaged summary may name a metric that the run has not.
    values = {name: found for name in names if len(found := metrics.finite_values(name))}
    if values:
        stdout().print()
        rows = [
            [name, f"{values[name][0]:.4g}", f"{values[name][-1]:.4g}", sparkline(values[name])]
            for name in values
        ]
        print_table(["metric", "first", "last", "curve"], rows, right=["first", "last"])
    if changed := changed_settings(run.path):
        stdout().print()
        rows = [
            [key, short(change["value"]), short(change["base"]), place(change["where"])]
            for key, change in changed.items()
        ]
        print_table(["setting", "value", "base", "from"], rows)


def _facts(record: RunRecord) -> Iterator[tuple[str, str]]:
    yield "recipe", record.recipe
    yield "command", shlex.join(record.command)
    yield "created", f"{record.created} on {record.process.host}"
    if record.exit_code is not None:
        yield "exit code", str(record.exit_code)
    if record.failure is not None:
        yield "failure", "{message}  ({code})".format_map(record.failure)
        if record.failure["hint"]:
            yield "help", record.failure["hint"]
    if record.git and (commit := record.git["commit"]):
        yield "commit", f"{commit[:12]}{' with changes' if record.git['diff_sha256'] else ''}"
    versions = ", ".join(
        f"{name} {number}"
        for name, number in record.versions.items()
        if number and name in ("rlctl", "torch", "ray")
    )
    yield "versions", versions


def _figures(run: Run, summary: RunSummary | None) -> Iterator[tuple[str, str]]:
    if summary is None or summary.step is None:
        return
    total = f" of {run.record.total_steps}" if run.record and run.record.total_steps else ""
    yield "step", f"{summary.step}{total}"
    if summary.metric:
        best = f"{percent_or_number(summary.metric, summary.best)} at step {summary.best_step}"
        yield "validation", f"{_validation(summary)}, best {best}  ({summary.metric})"
    if run.seconds is not None:
        tokens = f", {count(summary.tokens)} tokens" if summary.tokens else ""
        yield "took", duration(run.seconds) + tokens


def _files(run: Run) -> Iterator[tuple[str, str]]:
    from rlctl.runs.details import generation_steps, profiles

    yield "folder", f"{run.path}  ({size(run.num_bytes)})"
    if steps := generation_steps(run.path):
        yield "samples", f"steps {', '.join(map(str, steps))}  (--samples)"
    if checkpoints := by_step(run.path / "checkpoints"):
        from rlctl.runs.prune import checkpoint_sizes, pruned_steps

        sizes = checkpoint_sizes(run.path)
        names = [f"{path.name} ({size(sizes.get(step, 0))})" for step, path in checkpoints.items()]
        yield "checkpoints", ", ".join(names)
        if pruned := pruned_steps(run.path):
            yield "pruned", f"steps {', '.join(map(str, pruned))}"
    if traces := profiles(run.path):
        yield "profiles", f"{', '.join(traces)}  (open in ui.perfetto.dev)"
    if (latest := run.path / "attempts" / "latest").exists():
        yield "logs", str(latest)


def short(value: object) -> str:
    """Format a setting's value in at most 40 characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else text[:39] + "…"
