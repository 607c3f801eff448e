"""`rlctl resume`: go on with a run that was stopped, killed or made longer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli import complete, remote
from rlctl.cli.limits import Limits, MaxTime, Retries, SaveBy
from rlctl.cli.options import Root
from rlctl.cli.remote import Address, Detach

if TYPE_CHECKING:
    from rlctl.runtime.resume import ResumeOptions, ResumePlan

app = typer.Typer(add_completion=False)

_EXAMPLES = """
Examples:

  rlctl resume @failed

  rlctl resume ppo-261121 trainer.total_epochs=3               a finished run goes on

  rlctl resume s3://bucket/runs/quickstart/ppo-261121          from its copy on shared storage (trainer.mirror)

  rlctl resume my-sweep                                        its unfinished trials

  rlctl resume @last --from-step 40 --fork colder actor_rollout_ref.rollout.temperature=0.8
"""


@app.command(epilog=_EXAMPLES)
def resume(
    run: Annotated[
        str,
        typer.Argument(
            help="A run's or a sweep's name or the beginning of it, its folder, @last or @failed; or the address of its copy (s3://…).",
            autocompletion=complete.run,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Overrides on top of the run's own configuration.",
            autocompletion=complete.override,
        ),
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option(
            "--from-step", min=1, help="The checkpoint of this step instead of the newest."
        ),
    ] = None,
    fork: Annotated[
        str | None,
        typer.Option(
            "--fork", metavar="NAME", help="A new run of this name that begins with the state."
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Go on although the configuration or the data make another run of it."
        ),
    ] = False,
    inline: Annotated[
        bool, typer.Option("--inline", help="Run in this one process, without Ray.")
    ] = False,
    max_time: MaxTime = None,
    save_by: SaveBy = None,
    retries: Retries = 0,
    address: Address = None,
    detach: Detach = False,
    root: Root = None,
) -> None:
    """Go on from the newest whole checkpoint, as if the run had never stopped."""
    from rlctl.cli.commands.sweep import resume_sweep
    from rlctl.cli.console import notice
    from rlctl.errors import UsageError
    from rlctl.runs.store import RunStore
    from rlctl.storage import is_url
    from rlctl.sweeps.record import names_sweep

    store, limits = RunStore.at(root), Limits(max_time, save_by, retries)
    given = {"--from-step": from_step, "--fork": fork}
    options = [
        *(["--force"] if force else []),
        *(str(word) for option, value in given.items() if value for word in (option, value)),
    ]
    if address is not None:
        words = [
            "resume",
            run,
            *(overrides or []),
            *options,
            *limits.words,
            "--root",
            str(store.root.absolute()),
        ]
        remote.run(
            address, detach, f"{Path(run).name.lstrip('@')}-{time.strftime('%y%m%d-%H%M%S')}", words
        )
        return
    if names_sweep(store.root, run):
        if overrides or options or inline or limits.words:
            raise UsageError(
                f"{run!r} is a sweep, which goes on as it is",
                hint="its runs, named SWEEP-NNN, take overrides and options",
            )
        resume_sweep(store.root, run)
        return
    if is_url(run):
        from rlctl.runtime.checkpoint.remote_fetch import pull

        run = str(pull(run, store.root))
        notice(f"the copy is in {run}")
    found = store.find(run)
    if retries:
        folder = found.path.with_name(fork) if fork else found.path
        limits.supervise(["resume", str(found.path), *(overrides or []), *options], folder, inline)
    from rlctl.runtime.resume import ResumeOptions

    _go_on(
        found.path, overrides or [], ResumeOptions(from_step, fork, force, inline), limits.end_by()
    )


def _go_on(run: Path, overrides: list[str], wish: ResumeOptions, end_by: float | None) -> None:
    from rlctl.cli.console import notice
    from rlctl.cli.views.run_end import print_end
    from rlctl.runtime.launch import train
    from rlctl.runtime.resume import plan_resume

    resumption = plan_resume(run, overrides, wish)
    if resumption.finished:
        steps = resumption.plan.num_steps
        notice(
            f"{run.name} has finished its {steps} steps; a larger trainer.total_epochs or trainer.total_training_steps makes it go on"
        )
        return
    announce(run.name, resumption)
    train(resumption.plan, resumption.start, end_by, print_end)


def announce(name: str, resumption: ResumePlan) -> None:
    """On stderr: where it goes on, what is different from before."""
    from rlctl.cli.console import notice, warn

    start = resumption.start
    for line in resumption.warnings:
        warn(line)
    for change in resumption.changes:
        notice(f"changed: {change}")
    for line in resumption.notes:
        notice(line)
    if start is not None:
        where = (
            f"step {start.step}"
            if start.checkpoint is not None
            else "the beginning: it has no checkpoint"
        )
        verb = (
            "goes on from"
            if start.run is not None and start.checkpoint is not None
            else "starts from"
        )
        notice(f"{name} {verb} {where}, of {resumption.plan.num_steps} steps")
