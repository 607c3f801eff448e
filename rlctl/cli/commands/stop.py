"""`rlctl stop`: stop runs and sweeps that other processes execute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.options import Root, RunNames

if TYPE_CHECKING:
    from rlctl.runs.run import Run
    from rlctl.runs.stop import StopTarget
    from rlctl.sweeps.record import SweepDir

app = typer.Typer(add_completion=False)


_EXAMPLES = """
Examples:

  rlctl stop ppo-261121

  rlctl stop my-sweep

  rlctl stop @last --now
"""


@app.command(epilog=_EXAMPLES)
def stop(
    runs: RunNames,
    now: Annotated[
        bool,
        typer.Option(
            "--now",
            help="Interrupt the current step; `rlctl resume` continues from the last checkpoint.",
        ),
    ] = False,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=1, help="Time to wait until they end."),
    ] = 300.0,
    root: Root = None,
) -> None:
    """Stop runs or sweeps after the current step, save, and wait until they end.

    `rlctl resume` continues them.
    """
    from rlctl.api import find_run_or_sweep
    from rlctl.cli.console import notice
    from rlctl.runs.stop import request_stop, wait

    found = [_stop_target(find_run_or_sweep(name, root)) for name in runs]
    for target in found:
        request_stop(target, now)
    for target in found:
        notice(f"{target.name}: {wait(target, timeout_s)}")


def _stop_target(target: Run | SweepDir) -> StopTarget:
    from rlctl.runs.stop import StopTarget, run_target
    from rlctl.sweeps.record import SweepDir

    if not isinstance(target, SweepDir):
        return run_target(target)
    record, folder = target.record, target.path
    return StopTarget(record.name, folder, record.process, lambda: SweepDir(folder).state, None)
