"""Summary that `rlctl train` and `rlctl resume` print when a run ends."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from rlctl.cli.options import RUNS_VARIABLE
from rlctl.files import by_step
from rlctl.monitoring.final_summary import print_summary
from rlctl.runs.events import alarms_of, read_events
from rlctl.runs.run_dir import RunDir
from rlctl.runs.store import DEFAULT_ROOT
from rlctl.tracking.jsonl import metric_rows


def print_end(run: RunDir, state: str, seconds: float) -> None:
    """Print what a run reached in `seconds` and the next commands, on stderr; not if it failed."""
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
    name, root = run.record.name, run.path.parent.parent
    usual = Path(os.environ.get(RUNS_VARIABLE) or DEFAULT_ROOT)
    same_name = [each for each in root.iterdir() if (each / name).is_dir()]
    try:
        found = root.samefile(usual) and len(same_name) == 1
    except OSError:  # also where the working folder no longer exists
        found = False
    return shlex.quote(name if found else str(run.path))
