"""`rlctl engines`: rollout engines of a running run, which may join and leave."""

from __future__ import annotations

from typing import Annotated

import typer

from rlctl.cli.console import print_json, print_table
from rlctl.cli.options import Json, Root, RunName
from rlctl.cli.stderr import notice
from rlctl.errors import UsageError
from rlctl.runs.engine_requests import (
    EngineRequest,
    attempt_folder,
    check_drain,
    pool_status,
    send,
    wait,
)
from rlctl.runs.run import Run
from rlctl.runs.store import RunStore

app = typer.Typer()

Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=0,
        help="Time to wait until it is done; the run goes ahead with it all the same.",
    ),
]


@app.command("list", epilog="Example: rlctl engines list @last --json")
def list_engines(run: RunName, root: Root = None, as_json: Json = False) -> None:
    """List the rollout engines of a running run, with their state and speed.

    Responses and tokens per second are those since an engine joined the run.
    """
    found = pool_status(RunStore(root).find(run)).engines
    if as_json:
        print_json(found)
        return
    columns = ["engine", "node", "state", "devices", "responses", "tokens/s"]
    rows = [
        [
            str(engine.engine),
            engine.node,
            engine.state,
            ", ".join(f"{amount:g} {name}" for name, amount in engine.devices.items()),
            str(engine.responses),
            "" if engine.tokens_per_s is None else f"{engine.tokens_per_s:g}",
        ]
        for engine in found
    ]
    print_table(columns, rows, right=["responses", "tokens/s"])


@app.command(
    epilog="Examples:\n\n  rlctl engines add @last --count 2\n\n"
    "  rlctl engines add @last --url http://node7:8000\n"
)
def add(
    run: RunName,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="Number of engines to add; by default 1.")
    ] = None,
    urls: Annotated[
        list[str] | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="Add the server at this address, in a run whose engines are servers.",
        ),
    ] = None,
    timeout_s: Timeout = 300.0,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Start more engines beside those of a running run, on free devices of its cluster.

    They get the current weights before their first request. If devices are not free, the run waits
    for them up to `trainer.timeouts.worker_start_s`, without a delay of its steps. `rlctl resume`
    starts with the number of the configuration.
    """
    if urls and count not in (None, len(urls)):
        raise UsageError(
            f"--count {count} does not match {len(urls)} addresses", hint="leave out --count"
        )
    found = RunStore(root).find(run)
    pool_status(found)  # raises an error without a pool
    urls = urls or []
    request = EngineRequest("add", len(urls) or count or 1, urls=urls)
    _send(found, request, timeout_s, as_json)


@app.command(
    epilog="Examples:\n\n  rlctl engines drain @last 2\n\n  rlctl engines drain @last --count 2\n"
)
def drain(
    run: RunName,
    numbers: Annotated[
        list[int] | None,
        typer.Argument(metavar="ENGINE...", help="Engines by number, as `engines list` shows."),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, help="Drain so many, the newest first."),
    ] = None,
    timeout_s: Timeout = 300.0,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Let engines finish their requests, then stop them and release their devices.

    Responses do not depend on the engine that generates them. The last engine cannot be drained.
    """
    if bool(numbers) == bool(count):
        raise UsageError(
            "which engines: give either their numbers or --count",
            hint="`rlctl engines list RUN` shows the numbers",
        )
    found = RunStore(root).find(run)
    request = EngineRequest("drain", count or 0, numbers or ())
    check_drain(pool_status(found), request)
    _send(found, request, timeout_s, as_json)


def _send(run: Run, request: EngineRequest, timeout_s: float, as_json: bool) -> None:
    send(attempt_folder(run), request)
    done = wait(run, request, timeout_s)
    if as_json:
        message = None
        if done is not None:
            message = done.message
        print_json({"run": run.name, "done": done is not None, "message": message})
    elif done is None:
        notice(f"{run.name} has the request; `rlctl engines list {run.name}` shows its progress")
    else:
        notice(f"{run.name}: {done.message}")
