"""Summary printed when a run ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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

_ACTOR, _CRITIC = "actor/lr", "critic/lr"  # of a step that has updated them
_SHOWN = {"step", *REWARD, *LOSS, *SECONDS, *TOKENS, _ACTOR, _CRITIC}


def print_summary(
    state: str,
    folder: Path,
    rows: Iterable[Row],
    seconds: float,
    alarms: Sequence[Mapping[str, Any]],
    next_commands: Sequence[str],
) -> None:
    """Print the outcome to stderr: steps, wall-clock `seconds`, tokens, validation, reward curve,
    alarms, the run's folder and the commands to type next.

    `rows` are as `metric_rows` yields them, `alarms` as `alarms_of` returns them.
    """
    # Of a long run, all metrics would need gigabytes.
    rows = [
        {name: row[name] for name in row if name in _SHOWN or name.startswith("val")}
        for row in rows
    ]
    head = RunSummary.from_rows(rows)
    # A run that starts from the checkpoint of another one first validates it, without a step.
    trained = [row for row in rows if any(not name.startswith(("step", "val")) for name in row)]
    steps = plural(len(trained), "step")
    console = SafeConsole(stderr=True)
    tokens = f", {count(head.tokens)} tokens" if head.tokens else ""
    colour = "bold green" if state == "finished" else "bold yellow"
    console.print(
        Text.assemble((state, colour), f": {steps} in {duration(seconds)}{tokens}"),
        soft_wrap=True,
    )
    lines = [
        *_lines(head, rows),
        *_warnings(rows, alarms),
        ("run", Text(str(folder))),
        *(
            ("" if index else "next", Text(command, style="cyan"))
            for index, command in enumerate(next_commands)
        ),
    ]
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        console.print(Text.assemble((f"  {label:{width}}", "dim"), "  ", value), soft_wrap=True)


def _lines(head: RunSummary, rows: Sequence[Row]) -> list[tuple[str, Text]]:
    """Return labels and values of the curves."""
    lines: list[tuple[str, Text]] = []
    if head.metric:
        first, last, best = (
            percent_or_number(head.metric, value) for value in (head.first, head.last, head.best)
        )
        value = f"{first} → {last}   best {best} at step {head.best_step}"
        steps = [row["step"] for row in rows if figure(row, (head.metric,)) is not None]
        if steps == [0] and len(rows) > 1:
            value = f"{first} at step 0; not validated later, see trainer.test_freq"
        lines.append(("accuracy" if is_accuracy(head.metric) else "validation", Text(value)))
    for name, names in (("reward", REWARD), ("loss", LOSS)):
        values = [value for row in rows if (value := figure(row, names)) is not None]
        if values:
            lines.append((name, Text(f"{values[0]:.3g} → {values[-1]:.3g}   {sparkline(values)}")))
    return lines


def _warnings(
    rows: Sequence[Row], alarms: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Text]]:
    """Yield labels and values of the alarms, one for each kind, and of an actor that was idle."""
    if any(_CRITIC in row for row in rows) and not any(_ACTOR in row for row in rows):
        text = "only the critic was trained: the actor learns after trainer.critic_warmup steps"
        yield "warning", Text(text, style="yellow")
    for name in dict.fromkeys(alarm["name"] for alarm in alarms):
        first, *more = (alarm for alarm in alarms if alarm["name"] == name)
        text = f"step {first['step']}: {first['message']}"
        if more:
            text += f", {len(more) + 1} times"
        over = (more or [first])[-1]["over"]
        text += f" ({first['hint']})" if over is None else f", until step {over}"
        yield "alarm", Text(text, style="yellow")
