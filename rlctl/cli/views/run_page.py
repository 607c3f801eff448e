"""Page of one run in the terminal: `rlctl show`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from rlctl.cli.console import print_table, stdout
from rlctl.cli.stderr import warn
from rlctl.cli.views.runs import COLOURS, SHOWN_METRICS, short, validation
from rlctl.files import by_step
from rlctl.recipes.search_path import place
from rlctl.runs.record import RunRecord
from rlctl.runs.run import Run
from rlctl.terminal import visible
from rlctl.text import count, duration, size, sparkline
from rlctl.tracking.run_summary import RunSummary, percent_or_number

SHOWN_PREFIXES = ("agent/outcome/", "agent/refused_calls/", "tool/")


def print_run(run: Run) -> None:
    """Print the page of `rlctl show`."""
    from rlctl.runs import details
    from rlctl.runs.details import alarms, changed_settings
    from rlctl.tracking.destination import commands, line

    stdout().print(Text.assemble((run.name, "bold"), "  ", (run.state, COLOURS[run.state])))
    for problem in filter(None, (run.problem, run.metrics.problem)):
        warn(problem)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name, value in [
        ("project", run.project),
        *_facts(run.record),
        *_figures(run, run.metrics.figures),
        *details.facts_of_plugins(run),
        *_files(run),
    ]:
        facts.add_row(name, Text(visible(value)))
    for name, destination in details.trackers(run).items():
        facts.add_row(name, Text(visible("; ".join([line(destination), *commands(destination)]))))
    for alarm in alarms(run):
        until = "on"
        style = "red"
        if alarm["over"] is not None:
            until = f"to {alarm['over']}"
            style = "yellow"
        text = visible(f"step {alarm['step']} {until}: {alarm['message']}")
        facts.add_row("alarm", Text(text, style=style))
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


def _facts(record: RunRecord | None) -> Iterator[tuple[str, str]]:
    if record is None:
        return
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
        text = commit[:12]
        if record.git["diff_sha256"]:
            text += " with changes"
        yield "commit", text
    versions = ", ".join(
        f"{name} {number}"
        for name, number in record.versions.items()
        if number and name in ("rlctl", "torch", "ray")
    )
    yield "versions", versions


def _figures(run: Run, summary: RunSummary | None) -> Iterator[tuple[str, str]]:
    if summary is None or summary.step is None:
        return
    step = str(summary.step)
    if run.record and run.record.total_steps:
        step += f" of {run.record.total_steps}"
    saved = max(by_step(run.path / "checkpoints"), default=0)
    if saved > summary.step:
        step += f"; step {saved} is saved before its validation"
    yield "step", step
    if summary.metric:
        best = f"{percent_or_number(summary.metric, summary.best)} at step {summary.best_step}"
        yield "validation", f"{validation(summary)}, best {best}  ({summary.metric})"
    if run.seconds is not None:
        took = duration(run.seconds)
        if summary.tokens:
            took += f", {count(summary.tokens)} tokens"
        yield "took", took


def _files(run: Run) -> Iterator[tuple[str, str]]:
    from rlctl.runs.details import broken_updates, generation_steps, profiles

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
    if broken := broken_updates(run.path):
        yield "broken updates", f"{', '.join(broken)}  (rlctl debug {run.name} --replay)"
    if (latest := run.path / "attempts" / "latest").exists():
        yield "logs", str(latest)
