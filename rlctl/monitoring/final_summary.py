"""Summary printed when a run ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlctl.monitoring.run_summary import LOSS, REWARD, Row, RunSummary, figure, is_accuracy
from rlctl.monitoring.text import count, duration, percent_or_number, sparkline


def print_summary(
    state: str, folder: Path, rows: Iterable[Row], seconds: float, next_commands: Sequence[str]
) -> None:
    """Print the outcome to stderr: steps, wall-clock `seconds`, tokens, validation, reward curve,
    the run's folder and the commands to type next. `rows` are as `read_metrics` returns them."""
    rows = list(rows)
    head = RunSummary.from_rows(rows)
    steps = sum(row["step"] > 0 for row in rows)
    console = Console(stderr=True, highlight=False)
    tokens = f", {count(head.tokens)} tokens" if head.tokens else ""
    colour = "bold green" if state == "finished" else "bold yellow"
    console.print(
        Text.assemble((state, colour), f": {steps} steps in {duration(seconds)}{tokens}"),
        soft_wrap=True,
    )
    console.print(_lines(head, folder, rows, next_commands))


def _lines(
    head: RunSummary, folder: Path, rows: Sequence[Row], next_commands: Sequence[str]
) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    if head.metric:
        first, last, best = (
            percent_or_number(head.metric, value) for value in (head.first, head.last, head.best)
        )
        table.add_row(
            "  accuracy" if is_accuracy(head.metric) else "  validation",
            Text(f"{first} → {last}   best {best} at step {head.best_step}"),
        )
    for name, names in (("reward", REWARD), ("loss", LOSS)):
        values = [value for row in rows if (value := figure(row, names)) is not None]
        if values:
            table.add_row(
                f"  {name}", Text(f"{values[0]:.3g} → {values[-1]:.3g}   {sparkline(values)}")
            )
    table.add_row("  run", Text(str(folder)))
    for index, command in enumerate(next_commands):
        table.add_row("" if index else "  next", Text(command, style="cyan"))
    return table
