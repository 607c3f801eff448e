"""First words of a command that imports torch, Ctrl-C before a run exists, and a run's summary."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.cli.options import RUNS_VARIABLE
from rlctl.files import by_step

if TYPE_CHECKING:
    from rlctl.runs.run_dir import RunDir
    from rlctl.runtime.launch import OnEnd


def announce(doing: str) -> None:
    """Print `doing …` on stderr. Call it before the heavy imports, which take seconds."""
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed
        print(f"{doing} …", file=sys.stderr, flush=True)


@contextmanager
def until_start() -> Iterator[OnEnd]:
    """Yield the `on_end` of a run; report Ctrl-C that comes before the run exists."""
    ended = False

    def on_end(run: RunDir, state: str, seconds: float) -> None:
        nonlocal ended
        ended = True
        print_end(run, state, seconds)

    try:
        yield on_end
    except KeyboardInterrupt:
        if not ended:
            print("interrupted before the start: nothing was written", file=sys.stderr)
        raise


def print_end(run: RunDir, state: str, seconds: float) -> None:
    """Print what a run reached in `seconds` and the next commands, on stderr; not if it failed."""
    from rlctl.monitoring.final_summary import print_summary
    from rlctl.runs.events import alarms_of, read_events
    from rlctl.tracking.jsonl import metric_rows

    if state != "failed":
        rows = metric_rows(run.metrics)
        alarms = alarms_of(read_events(run.path))
        print_summary(state, run.path, rows, seconds, alarms, _next_commands(run, state))


def _next_commands(run: RunDir, state: str) -> list[str]:
    """Return the commands that work on the run as it is."""
    name = _selector(run)
    commands = [] if state == "finished" else [f"rlctl resume {name}"]
    commands.append(f"rlctl show {name}")
    if any(run.path.glob("generations/*")):
        commands.append(f"rlctl show {name} --samples")
    commands.append(f"rlctl report {name}")
    if by_step(run.path / "checkpoints"):
        commands += [f"rlctl eval {name}", f"rlctl export {name} DIR"]
    return commands


def _selector(run: RunDir) -> str:
    """Return the run's name, or its folder where other commands would not find the name."""
    from rlctl.runs.store import DEFAULT_ROOT

    name, root = run.record.name, run.path.parent.parent
    usual = Path(os.environ.get(RUNS_VARIABLE) or DEFAULT_ROOT)
    same_name = [project for project in root.iterdir() if (project / name).is_dir()]
    try:
        is_found = root.samefile(usual) and len(same_name) == 1
    except OSError:  # also where the working folder no longer exists
        is_found = False
    return shlex.quote(name if is_found else str(run.path))
