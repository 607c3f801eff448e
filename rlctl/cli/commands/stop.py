"""`rlctl stop`: a run that another process drives finishes its step, saves and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.options import Root, RunNames

if TYPE_CHECKING:
    from rlctl.runs.stop import Driven
    from rlctl.runs.store import RunStore

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Examples:\n\n  rlctl stop ppo-261121\n\n  rlctl stop my-sweep\n\n  rlctl stop @last --now"
)
def stop(
    runs: RunNames,
    now: Annotated[
        bool,
        typer.Option(
            "--now",
            help="Break the step off; `rlctl resume` then goes on from the last checkpoint.",
        ),
    ] = False,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=1, help="How long to wait for the end."),
    ] = 300.0,
    root: Root = None,
) -> None:
    """Let runs or sweeps finish their step, save and end, and wait until they have.

    `rlctl resume` goes on with them.
    """
    from rlctl.cli.console import notice
    from rlctl.runs.stop import ask, wait
    from rlctl.runs.store import RunStore

    store = RunStore.at(root)
    found = [_driven(store, each) for each in runs]
    for each in found:
        ask(each, now)
    for each in found:
        notice(f"{each.name}: {wait(each, timeout_s)}")


def _driven(store: RunStore, selector: str) -> Driven:
    from rlctl.errors import ConfigError
    from rlctl.runs.follow import reread
    from rlctl.runs.run_dir import STOP_FILE
    from rlctl.runs.stop import Driven
    from rlctl.sweeps.record import SweepDir, find_sweep, names_sweep

    if names_sweep(store.root, selector):
        sweep = find_sweep(store.root, selector)
        return Driven(
            sweep.record.name, sweep.record.process, lambda: SweepDir(sweep.path).state, None
        )
    run = store.find(selector)
    if run.record is None:
        raise ConfigError(run.problem or "no readable record", where=str(run.path))
    return Driven(run.name, run.record.process, lambda: reread(run).state, run.path / STOP_FILE)
