"""How runs look on a terminal."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlctl.cli.console import notice, paged, stdout, table, warn
from rlctl.errors import UsageError
from rlctl.monitoring.run_summary import RunSummary
from rlctl.monitoring.text import ago, count, duration, percent_or_number, sparkline
from rlctl.runs.details import alarms, changed_settings, curves, generation_steps
from rlctl.runs.listing import RunPage, RunQuery
from rlctl.runs.record import RunRecord
from rlctl.runs.store import Run, RunStore
from rlctl.tracking.tracker import Sample

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
SHOWN_METRICS = ("critic/score/mean", "critic/rewards/mean", "actor/ppo_kl", "actor/reward_kl_penalty", "actor/kl_loss", "actor/entropy",
                 "actor/pg_clipfrac", "actor/grad_norm", "critic/vf_loss", "critic/vf_explained_var", "train/loss", "response_length/mean",
                 "response_length/clip_ratio", "perf/throughput", "timing_s/step")  # fmt: skip


def print_runs(page: RunPage, root: Path) -> None:
    """The table of `rlctl runs`; what it leaves out is said on stderr."""
    if not page.runs:
        notice(
            "no run is like that"
            if page.of_how_many
            else f"no runs in {root.resolve()}; `rlctl train ppo` makes one"
        )
        return
    stdout().print(_runs_table(page))
    if page.hidden:
        notice(f"{page.hidden} more; --all shows them")
    for run in page.runs:
        if problem := run.problem or run.figures[1]:
            warn(f"{run.key}: {problem}")


def watch_runs(listing: RunQuery, store: RunStore, as_json: bool) -> None:
    """The table, drawn anew until Ctrl-C. Errors: UsageError where there is no terminal to draw on."""
    if as_json or not stdout().is_terminal:
        raise UsageError("--watch draws on a terminal", hint="leave it out to list the runs once")
    with Live(console=stdout(), auto_refresh=False, transient=True) as live:
        while True:
            page = listing.page(store)
            live.update(_runs_table(page) if page.runs else Text("no runs yet"), refresh=True)
            time.sleep(WATCH_S)


def _runs_table(page: RunPage) -> Table:
    several = len({run.project for run in page.runs}) > 1
    usual = ["state", "made", "took", "step", "validation"] if page.with_usual_columns else []
    rows = [
        [
            run.key if several else run.name,
            *(_usual(run) if usual else []),
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
    return table(["run", *usual, *extra], rows, right=["took", "step", *numeric])


def _cell(key: str, value: object) -> str | Text:
    if key == "state":
        return Text(str(value), style=COLOURS[str(value)])
    if value is None:
        return "-"
    return (
        percent_or_number(key, value) if "/" in key and isinstance(value, float) else short(value)
    )


def _usual(run: Run) -> list[str | Text]:
    headline = run.figures[0] or RunSummary.from_rows([])
    total = run.record.total_steps if run.record else None
    steps = "-" if headline.step is None else str(headline.step)
    return [
        Text(run.state, style=COLOURS[run.state]),
        ago((datetime.now(UTC) - run.created).total_seconds()),
        duration(run.seconds) if run.seconds is not None else "-",
        f"{steps}/{total}" if total else steps,
        _validation(headline),
    ]


def _validation(headline: RunSummary) -> str:
    first, last = (
        percent_or_number(headline.metric, value) for value in (headline.first, headline.last)
    )
    return f"{first} → {last}" if headline.metric else "-"


def print_run(run: Run) -> None:
    """The page of `rlctl show`."""
    headline, problem = run.figures
    stdout().print(Text.assemble((run.name, "bold"), "  ", (run.state, COLOURS[run.state])))
    for trouble in filter(None, (run.problem, problem)):
        warn(trouble)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name, value in [
        ("project", run.project),
        *(_facts(run.record) if run.record else []),
        *_figures(run, headline),
        *_files(run),
    ]:
        facts.add_row(name, Text(value))
    for alarm in alarms(run):
        until = "on" if alarm["over"] is None else f"to {alarm['over']}"
        facts.add_row(
            "alarm",
            Text(
                f"step {alarm['step']} {until}: {alarm['message']}",
                style="red" if alarm["over"] is None else "yellow",
            ),
        )
    if run.labels.tags:
        facts.add_row("tags", Text(", ".join(run.labels.tags)))
    if run.labels.note:
        facts.add_row("note", Text(run.labels.note))
    stdout().print(facts)
    values = curves(run)
    names = [name for name in values if name.startswith("val-core/")] + [
        name for name in SHOWN_METRICS if name in values
    ]
    if names:
        stdout().print()
        rows = [
            [name, f"{values[name][0]:.4g}", f"{values[name][-1]:.4g}", sparkline(values[name])]
            for name in names
        ]
        stdout().print(table(["metric", "first", "last", "course"], rows, right=["first", "last"]))
    if changed := changed_settings(run.path):
        stdout().print()
        rows = [
            [key, short(each["value"]), short(each["base"]), each["where"]]
            for key, each in changed.items()
        ]
        stdout().print(table(["setting", "value", "base", "from"], rows))


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    facts = [
        ("recipe", record.recipe),
        ("command", shlex.join(record.command)),
        ("made", f"{record.created} on {record.process.host}"),
    ]
    if record.exit_code is not None:
        facts.append(("exit code", str(record.exit_code)))
    if record.git and (commit := record.git["commit"]):
        facts.append(
            ("commit", f"{commit[:12]}{' with changes' if record.git['diff_sha256'] else ''}")
        )
    versions = ", ".join(
        f"{name} {number}"
        for name, number in record.versions.items()
        if number and name in ("rlctl", "torch", "ray")
    )
    return [*facts, ("versions", versions)]


def _figures(run: Run, headline: RunSummary | None) -> list[tuple[str, str]]:
    if headline is None or headline.step is None:
        return []
    total = f" of {run.record.total_steps}" if run.record and run.record.total_steps else ""
    facts = [("step", f"{headline.step}{total}")]
    if headline.metric:
        best = percent_or_number(headline.metric, headline.best)
        facts.append(
            (
                "validation",
                f"{_validation(headline)}, best {best} at step {headline.best_step}  ({headline.metric})",
            )
        )
    if run.seconds is not None:
        facts.append(
            (
                "took",
                duration(run.seconds)
                + (f", {count(headline.tokens)} tokens" if headline.tokens else ""),
            )
        )
    return facts


def _files(run: Run) -> list[tuple[str, str]]:
    steps = generation_steps(run.path)
    checkpoints = sorted(folder.name for folder in run.path.glob("checkpoints/step_*"))
    facts = [("folder", str(run.path))]
    if steps:
        facts.append(("samples", f"steps {', '.join(map(str, steps))}  (--samples)"))
    if checkpoints:
        facts.append(("checkpoints", ", ".join(checkpoints)))
    if (run.path / "attempts" / "latest").exists():
        facts.append(("logs", str(run.path / "attempts" / "latest")))
    return facts


def print_samples(
    step: int, samples: Sequence[Sample], number: int | None, sought: str | None
) -> None:
    """Validation samples one below the other, page by page on a terminal, with the text that was `sought` marked; how many on stderr."""
    if not samples:
        notice(f"no sample of step {step} is of that kind")
        return
    with paged():
        _print_samples(samples[:number], sought)
    shown = len(samples[:number])
    notice(
        f"{shown} of {len(samples)} samples of step {step}"
        + ("; -n N shows more" if len(samples) > shown else "")
    )


def _print_samples(samples: Sequence[Sample], sought: str | None) -> None:
    for sample in samples:
        mark = ("right", "bold green") if sample.right else ("wrong", "bold red")
        parts = "".join(f"  {name} {value:g}" for name, value in sample.components.items())
        head = f"  score {sample.score:g}{parts}  {sample.length} tokens  {sample.finish}  {sample.data_source}"
        stdout().print(Text.assemble(mark, (head, "dim")))
        for name, text in (
            ("prompt", sample.prompt),
            ("answer", sample.response),
            ("truth", str(sample.ground_truth)),
        ):
            shown = Text(_visible(text.strip()))
            if sought:
                shown.highlight_regex(
                    re.compile(re.escape(sought), re.IGNORECASE), "black on yellow"
                )
            stdout().print(Text.assemble((f"{name}: ", "bold"), shown))
        stdout().print()


def short(value: object) -> str:
    """A setting's value in at most forty characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:39] + "…"


def _visible(text: str) -> str:
    """A model may write anything: its control characters are shown, not obeyed by the terminal."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text
    )
