"""First words of a command that imports torch, Ctrl-C before a run exists, and a run's summary."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rlctl.cli.options import RUNS_VARIABLE
from rlctl.cli.stderr import notice
from rlctl.errors import RlctlError
from rlctl.files import by_step
from rlctl.owner import command
from rlctl.safe_console import SafeConsole
from rlctl.text import count, counted, duration, plural, sparkline
from rlctl.tracking.run_summary import (
    LOSS,
    REWARD,
    SECONDS,
    TOKENS,
    Row,
    RunSummary,
    figure,
    is_accuracy,
    percent_or_number,
)

if TYPE_CHECKING:
    from rlctl.recipes.layers import Recipe
    from rlctl.runs.run_dir import RunDir
    from rlctl.runtime.launch import OnEnd


def announce(doing: str) -> None:
    """Print `doing …` on stderr. Call it before the heavy imports, which take seconds."""
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed
        print(f"{doing} …", file=sys.stderr, flush=True)


def compose_with_notices(source: str, overrides: Sequence[str]) -> Recipe:
    """Compose a recipe, and print its notices on stderr."""
    from rlctl.recipes.compose import compose

    recipe = compose(source, overrides)
    for line in recipe.notices:
        notice(line)
    return recipe


@contextmanager
def problems_as_json(enabled: bool) -> Iterator[None]:
    """Print the problems of an error in the block as JSON on stdout, if `enabled`."""
    try:
        yield
    except RlctlError as error:
        if enabled:
            from rlctl.cli.console import print_json
            from rlctl.cli.json_errors import document_with_error

            print_json(document_with_error({"ok": False}, error))
        raise


@contextmanager
def until_start() -> Iterator[OnEnd]:
    """Yield the `on_end` of a run of a command; report Ctrl-C that comes before the run exists."""
    ended = False

    def on_end(run: RunDir, state: str, seconds: float) -> None:
        nonlocal ended
        ended = True
        print_end(run, state, seconds)

    try:
        with command():
            yield on_end
    except KeyboardInterrupt:
        if not ended:
            print("interrupted before the start: nothing was written", file=sys.stderr)
        raise


def print_end(run: RunDir, state: str, seconds: float) -> None:
    """Print what a run reached in `seconds` and the next commands, on stderr.

    The error of a failed run follows, so only the step from which it resumes is printed.
    """
    from rlctl.runs.events import alarms_of, read_events
    from rlctl.tracking.jsonl import metric_rows

    if run.record.skipped_rows:
        notice(f"training rows left out: {counted(run.record.skipped_rows)}")
    name = _selector(run)
    unreported: list[Row] = []
    next_commands: list[str] = []
    if state != "finished":
        from rlctl.cli.unfinished import resume_commands, unreported_rows

        next_commands += resume_commands(run, name)
        unreported += unreported_rows(run)
    events = read_events(run.path)
    places = _places(events)
    if state == "failed":
        for tracker, place in places:
            notice(f"{tracker}: {place}")
        return
    next_commands += _next_commands(run, name)
    if places:
        from rlctl.tracking.destination import commands_of, destinations

        next_commands += commands_of(destinations(events), name)
    rows = chain(metric_rows(run.metrics), unreported)
    print_summary(state, run.path, rows, seconds, alarms_of(events), next_commands)


def _next_commands(run: RunDir, name: str) -> list[str]:
    """Return the commands that work on the run as it is."""
    commands = [f"rlctl show {name}"]
    if any(run.path.glob("generations/*")):
        commands.append(f"rlctl show {name} --samples")
    commands.append(f"rlctl report {name}")
    if saved := [*by_step(run.path / "checkpoints").values()]:
        if (saved[-1] / "huggingface").is_dir():
            commands.append(f"rlctl eval {name}")
        commands.append(f"rlctl export {name} DIR")
    return commands


def _selector(run: RunDir) -> str:
    """Return the run's name, or its folder where other commands would not find the name."""
    from rlctl.runs.naming import DEFAULT_ROOT

    name = run.path.name
    root = run.path.parent.parent
    usual = Path(os.environ.get(RUNS_VARIABLE) or DEFAULT_ROOT)
    with suppress(OSError):  # the working folder or the run may no longer exist
        same_name = [project for project in root.iterdir() if (project / name).is_dir()]
        if root.samefile(usual) and len(same_name) == 1:
            return shlex.quote(name)
    return shlex.quote(str(run.path))


_ACTOR = "actor/lr"  # of a step that has updated it
_CRITIC = "critic/lr"
_FAILURES = "reward/num_failed", "reward/num_timed_out", "agent/num_failed"
_SHOWN = {"step", *REWARD, *LOSS, *SECONDS, *TOKENS, _ACTOR, _CRITIC, *_FAILURES}


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
    from rlctl.runs.events import read_events

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
    took = f": {steps} in {duration(seconds)}"
    if head.tokens:
        took += f", {count(head.tokens)} tokens"
    colour = "bold yellow"
    if state == "finished":
        colour = "bold green"
    console.print(Text.assemble((state, colour), took), soft_wrap=True)
    labels = ["next", *[""] * len(next_commands)]
    commands = [Text(command, style="cyan") for command in next_commands]
    lines = [
        *_lines(head, rows),
        *_warnings(rows, alarms),
        ("run", Text(str(folder))),
        *((name, Text(place)) for name, place in _places(read_events(folder))),
        *zip(labels, commands, strict=False),
    ]
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        console.print(Text.assemble((f"  {label:{width}}", "dim"), "  ", value), soft_wrap=True)


def _places(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the trackers besides the console, and where their data are."""
    if not any("tracker" in event for event in events):
        return []
    from rlctl.tracking.destination import destinations, line

    return [(name, line(place)) for name, place in destinations(events).items()]


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
        label = "validation"
        if is_accuracy(head.metric):
            label = "accuracy"
        lines.append((label, Text(value)))
    for name, names in (("reward", REWARD), ("loss", LOSS)):
        values = [value for row in rows if (value := figure(row, names)) is not None]
        if values:
            lines.append((name, Text(f"{values[0]:.3g} → {values[-1]:.3g}   {sparkline(values)}")))
    return lines


def _warnings(
    rows: Sequence[Row], alarms: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Text]]:
    """Yield labels and values of failed rewards, an idle actor, and one alarm of each kind."""
    failed, late, lost = (int(sum(row.get(name) or 0 for row in rows)) for name in _FAILURES)
    if failed:
        text = f"the reward of {plural(failed, 'response')} failed"
        if late:
            text += f"; {plural(late, 'call')} took longer than reward.timeout_s"
        yield "warning", Text(text, style="yellow")
    if lost:
        yield "warning", Text(f"{plural(lost, 'episode')} failed", style="yellow")
    if any(_CRITIC in row for row in rows) and not any(_ACTOR in row for row in rows):
        text = "only the critic was trained: the actor learns after trainer.critic_warmup steps"
        yield "warning", Text(text, style="yellow")
    for name in dict.fromkeys(alarm["name"] for alarm in alarms):
        first, *more = (alarm for alarm in alarms if alarm["name"] == name)
        text = f"step {first['step']}: {first['message']}"
        if more:
            text += f", {len(more) + 1} times"
        over = (more or [first])[-1]["over"]
        if over is None:
            text += f" ({first['hint']})"
        else:
            text += f", until step {over}"
        yield "alarm", Text(text, style="yellow")
