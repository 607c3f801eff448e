"""HTML of runs, comparisons and sweeps for notebooks: a table and curves. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rlctl.plugins.console.report.curves import short
from rlctl.runs.details import alarms, changed_settings
from rlctl.runs.run import Run
from rlctl.runs.run_comparison import Comparison, Curve
from rlctl.sweeps.results import SweepResult
from rlctl.text import count, duration
from rlctl.tracking.run_summary import LOSS, REWARD, percent_or_number, validation_metric

_WIDTH = 320
_HEIGHT = 90
_COLOURS = ("#3b7dd8", "#e0702f", "#2a9d6f", "#a05fc4", "#d1495b", "#12a3b4", "#a9822b", "#7a7f8a")
_MAX_POINTS = 400

Line = tuple[str, Sequence[float], Sequence[float]]  # label, steps, values


def html(shown: Run | Comparison | SweepResult) -> str:
    """Return the HTML of a result of the Python API."""
    if isinstance(shown, Run):
        return _run(shown)
    if isinstance(shown, Comparison):
        return _comparison(shown)
    return _sweep(shown)


def _run(run: Run) -> str:
    figures = run.metrics.figures
    rows: dict[str, str] = {"state": run.state}
    if run.record and run.record.failure:
        rows["failure"] = str(run.record.failure.get("message"))
    if figures is not None:
        rows["step"] = f"{figures.step or 0}"
        if run.record and run.record.total_steps:
            rows["step"] += f" of {run.record.total_steps}"
        rows["time, tokens"] = f"{duration(run.seconds or 0.0)}, {count(figures.tokens)}"
    if figures is not None and figures.metric is not None:
        values = (figures.first, figures.last, figures.best)
        first, last, best = (percent_or_number(figures.metric, value) for value in values)
        rows[figures.metric] = f"{first} → {last}, best {best} at step {figures.best_step}"
    rows |= {f"alarm {alarm['name']}": str(alarm["message"]) for alarm in alarms(run)}
    rows["folder"] = str(run.path)
    table = run.table()
    names = _main(table.names, figures and figures.metric)
    charts = "".join(_chart(name, [_line(Curve.from_table(table, name))]) for name in names)
    changed = changed_settings(run.path)
    settings = _table(["setting", "value"], ([key, each["value"]] for key, each in changed.items()))
    more = f"<details><summary>{len(changed)} changed settings</summary>{settings}</details>"
    return f"<div><b>{escape(run.key)}</b>{_table([], rows.items())}{charts}{more}</div>"


def _comparison(comparison: Comparison) -> str:
    names = _main(comparison.metrics)
    rows = [[key, *values] for key, values in comparison.settings.items()]
    for name in names:
        metric = comparison.metrics[name]
        for label, values in (("last", metric.last), ("best", metric.best)):
            rows.append([f"{label} {name}", *(percent_or_number(name, value) for value in values)])
    charts: list[str] = []
    for name in names:
        by_step = comparison.curves[name]
        lines: list[Line] = []
        for place, run in enumerate(comparison.runs):
            known = [(step, at[place]) for step, at in by_step.items() if at[place] is not None]
            lines.append((run, [step for step, _ in known], [value or 0.0 for _, value in known]))
        charts.append(_chart(name, lines))
    return f"<div>{_table(['', *comparison.runs], rows)}{''.join(charts)}</div>"


def _sweep(sweep: SweepResult) -> str:
    rows: list[list[Any]] = []
    for trial in sweep.trials:
        ends = "" if trial.low is None else f"{short(trial.low)} to {short(trial.high)}"
        value = [short(trial.value), ends, trial.n, trial.state, trial.reason]
        rows.append([trial.number, " ".join(trial.overrides), *value])
    head = ["trial", "values", "mean", "95 % interval", "n", "state", "reason"]
    lines: list[Line] = [
        (f"trial {trial.number}", range(len(trial.curve)), trial.curve) for trial in sweep.trials
    ]
    chart = _chart("value at each validation", lines)
    return f"<div><b>{escape(sweep.sweep.record.name)}</b>{_table(head, rows)}{chart}</div>"


def _main(names: Iterable[str], validation: str | None = None) -> list[str]:
    """Return reward or loss, and the main validation metric, of the metrics that there are."""
    known = list(names)
    found = [name for name in (*REWARD, *LOSS) if name in known]
    validation = validation or validation_metric(dict.fromkeys(known, 0.0))
    return [*found, *filter(None, [validation])]


def _line(curve: Curve) -> Line:
    return "", curve.steps.tolist(), curve.values.tolist()


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines: list[list[str]] = []
    if head:
        lines.append([f"<th>{_cell(name)}</th>" for name in head])
    lines += [[f'<td style="text-align:left">{_cell(cell)}</td>' for cell in row] for row in rows]
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in lines)
    return f"<table>{body}</table>"


def _cell(value: Any) -> str:
    return "-" if value is None else escape(str(value))


def _chart(title: str, lines: Sequence[Line]) -> str:
    """Return an SVG of lines with a title and their range, and a legend if they have labels."""
    drawn = [(place, *line) for place, line in enumerate(lines) if len(line[2])]
    if not drawn:
        return ""
    every: Mapping[str, list[float]] = {
        "x": [at for _, _, x, _ in drawn for at in x],
        "y": [value for _, _, _, y in drawn for value in y],
    }
    (left, right), (low, high) = ((min(every[axis]), max(every[axis])) for axis in "xy")
    curves = ""
    legend = ""
    for place, label, x, y in drawn:
        colour = _COLOURS[place % len(_COLOURS)]
        stride = -(-len(y) // _MAX_POINTS)
        pairs = [*zip(x, y, strict=True)][::stride]
        points = " ".join(
            f"{_WIDTH * (at - left) / ((right - left) or 1):.1f},"
            f"{_HEIGHT * (1 - (value - low) / ((high - low) or 1)):.1f}"
            for at, value in pairs
        )
        curves += f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        if label:
            legend += f' <span style="color:{colour}">■ {escape(label)}</span>'
    said = f"{escape(title)}: {low:.4g} to {high:.4g}, steps {left:g} to {right:g}"
    return (
        f'<figure style="margin:4px 0"><figcaption>{said}{legend}</figcaption>'
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="-2 -2 {_WIDTH + 4} {_HEIGHT + 4}" '
        f'role="img" aria-label="{escape(said)}">{curves}</svg></figure>'
    )
