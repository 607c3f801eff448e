"""Summary that `rlctl train` and `rlctl resume` print when a run ends."""

from __future__ import annotations

from rlctl.monitoring.final_summary import print_summary
from rlctl.runs.run_dir import RunDir
from rlctl.tracking.jsonl import read_metrics


def print_end(run: RunDir, state: str, seconds: float) -> None:
    """Print what a run reached in `seconds` and the next commands, on stderr; not if it failed."""
    if state == "failed":
        return
    name = run.record.name
    commands = [f"rlctl show {name}", f"rlctl show {name} --samples", f"rlctl report {name}"]
    if state == "finished" and any(run.path.glob("checkpoints/step_*")):
        commands.append(f"rlctl eval {name}")
    print_summary(state, run.path, read_metrics(run.metrics), seconds, commands)
