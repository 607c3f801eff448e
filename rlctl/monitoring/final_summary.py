"""Summary printed when a run ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.text import Text

from rlctl.monitoring.run_summary import (
    LOSS,
    REWARD,
    SECONDS,
    TOKENS,
    Row,
    RunSummary,
    figure,
    is_accuracy,
)
from rlctl.monitoring.safe_console import SafeConsole
from rlctl.monitoring.text import count, duration, percent_or_number, plural, sparkline

_SHOWN = {"step", *REWARD, *LOSS, *SECONDS, *TOKENS}


def print_summary(
    state: str, folder: Path, rows: Iterable[Row], seconds: float, next_commands: Sequence[str]
) -> None:
    """Print the outcome to stderr: steps, wall-clock `seconds`, tokens, validation, reward curve,
    the run's folder and the commands to type next. `rows` are as `metric_rows` yields them."""
    # Of a long run, all metrics would need gigabytes.
    rows = [
        {name: row[name] for name in row if name in _SHOWN or name.startswith("val")}
        for row in rows
    ]
    head = RunSummary.from_rows(rows)
    # A run that starts from the checkpoint of another one first validates it, without a step.
    trained = [row for row in rows if any(not name.startswith(("step", "val")) for name in row)]
    steps = plural(len(trained), "step")
    console = SafeConsole(stderr=True, highlight=False)
    tokens = f", {count(head.tokens)} tokens" if head.tokens else ""
    colour = "bold green" if state == "finished" else "bold yellow"
    console.print(
        Text.assemble((state, colour), f": {steps} in {duration(seconds)}{tokens}"),
        soft_wrap=True,
    )
    lines = _lines(head, folder, rows, next_commands)
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        console.print(Text.assemble((f"  {label:{width}}", "dim"), "  ", value), soft_wrap=True)


def _lines(
    head: RunSummary, folder: Path, rows: Sequence[Row], next_commands: Sequence[str]
) -> list[tuple[str, Text]]:
    """Return labels and values."""
    lines: list[tuple[str, Text]] = []
    if head.metric:
        first, last, best = (
            percent_or_number(head.metric, value) for value in (head.first, head.last, head.best)
        )
        lines.append(
            (
                "accuracy" if is_accuracy(head.metric) else "validation",
                Text(f"{first} → {last}   best {best} at step {head.best_step}"),
            )
        )
    for name, names in (("reward", REWARD), ("loss", LOSS)):
        values = [value for row in rows if (value := figure(row, names)) is not None]
        if values:
            lines.append((name, Text(f"{values[0]:.3g} → {values[-1]:.3g}   {sparkline(values)}")))
    lines.append(("run", Text(str(folder))))
    for index, command in enumerate(next_commands):
        lines.append(("" if index else "next", Text(command, style="cyan")))
    return lines
