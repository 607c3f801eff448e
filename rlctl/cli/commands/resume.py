"""`rlctl resume`: continue a run that was stopped, killed or made longer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli import address_option
from rlctl.cli.address_option import Address, Detach, Slurm
from rlctl.cli.limit_options import MaxTime, Retries, SaveBy
from rlctl.cli.options import Root, Trust, overrides_argument, run_argument
from rlctl.cli.remote_jobs import run as run_job
from rlctl.cli.startup import announce, until_start
from rlctl.cli.stderr import notice
from rlctl.cli.time_limits import Limits
from rlctl.errors import UsageError
from rlctl.owner import command
from rlctl.runs.store import RunStore

if TYPE_CHECKING:
    from rlctl.runs.run import Run
    from rlctl.sweeps.sweep_record import SweepDir

app = typer.Typer()

Overrides = Annotated[
    list[str] | None, overrides_argument("Overrides on top of the run's configuration.")
]
Target = Annotated[
    str,
    run_argument(
        "Run or sweep by name, prefix or folder, @last or @failed; "
        "or the URL of a remote copy (s3://…)."
    ),
]
FromStep = Annotated[
    int | None,
    typer.Option(
        "--from-step", min=1, help="Use the checkpoint of this step; by default the latest."
    ),
]
Fork = Annotated[
    str | None,
    typer.Option(
        "--fork", metavar="NAME", help="Start a new run of this name from the checkpoint."
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Resume even if the configuration or the data have changed."),
]
Inline = Annotated[
    bool | None,
    typer.Option(
        "--inline/--no-inline",
        help="Run in this process, without Ray; by default as the run was started.",
    ),
]

_EXAMPLES = """
Examples:

  rlctl resume @failed

  rlctl resume ppo-261121 trainer.total_epochs=3        extend a finished run

  rlctl resume s3://bucket/runs/quickstart/ppo-261121   from its mirror

  rlctl resume my-sweep                                 its unfinished trials

  rlctl resume @last --from-step 40 --fork colder \\
    actor_rollout_ref.rollout.temperature=0.8
"""


@app.command(epilog=_EXAMPLES)
def resume(
    context: typer.Context,
    run: Target,
    overrides: Overrides = None,
    from_step: FromStep = None,
    fork: Fork = None,
    force: Force = False,
    trust: Trust = False,
    inline: Inline = None,
    max_time: MaxTime = None,
    save_by: SaveBy = None,
    retries: Retries = 0,
    address: Address = None,
    detach: Detach = False,
    slurm: Slurm = None,
    root: Root = None,
) -> None:
    """Resume from the latest complete checkpoint."""
    if address_option.launched(context, slurm, detach):
        return
    address_option.check_options(address, inline or False)
    announce("checking the run")
    from rlctl import api
    from rlctl.runs.run import Run
    from rlctl.storage import is_url

    limits = Limits(max_time, save_by, retries)
    options = _options(from_step, fork, force)
    words = [*(overrides or []), *options]
    if trust:
        words.append("--trust")
    if address is not None:
        from rlctl.cli.remote_checks import check_resume

        check_resume(run, overrides or [], from_step, fork, RunStore(root).root)
        _run_job(address, detach, run, [*words, *limits.words], root)
        return
    found = _pull(run, root) if is_url(run) else api.find_run_or_sweep(run, root)
    if not isinstance(found, Run):
        _resume_sweep(found, plain=not (overrides or options or inline or limits.words))
        return
    if inline is None:
        inline = found.record is not None and "--inline" in found.record.command
    if retries:
        path = found.path.absolute()  # "." has no name
        folder = path.with_name(fork or path.name)
        limits.supervise(["resume", str(found.path), *words], folder, inline, overrides or [])
    with until_start() as on_end:
        api.resume(
            found,
            overrides or [],
            from_step=from_step,
            fork=fork,
            force=force,
            inline=inline,
            progress=True,
            end_by=limits.end_by(),
            on_end=on_end,
        )


def _run_job(address: str, detach: bool, run: str, words: Sequence[str], root: Path | None) -> None:
    """Resume as a Ray job, whose runs are in the same folder."""
    name = f"{Path(run).name.lstrip('@')}-{time.strftime('%y%m%d-%H%M%S')}"
    folder = str(RunStore(root).root.absolute())
    run_job(address, detach, name, ["resume", run, *words, "--root", folder])


def _options(from_step: int | None, fork: str | None, force: bool) -> list[str]:
    """Return the options as words of a command line."""
    words = []
    if force:
        words.append("--force")
    if from_step:
        words += ["--from-step", str(from_step)]
    if fork:
        words += ["--fork", fork]
    return words


def _pull(url: str, root: Path | None) -> Run:
    """Download the remote copy of a run into its folder under `root`."""
    from rlctl.api import open_run
    from rlctl.runtime.training.remote_fetch import pull

    folder = pull(url, RunStore(root).root)
    notice(f"downloaded the copy to {folder}")
    return open_run(folder)


def _resume_sweep(sweep: SweepDir, plain: bool) -> None:
    """Resume a sweep; `plain` says that neither overrides nor options are given."""
    from rlctl import api
    from rlctl.cli.views import sweep as sweep_view

    name = sweep.record.name
    if not plain:
        raise UsageError(
            f"{name!r} is a sweep: it resumes without overrides and options",
            hint="its runs, named SWEEP-NNN, take overrides and options",
        )
    if sweep.state == "finished":
        notice(f"{name} has finished all of its trials")
        return
    with command(), sweep_view.live() as view:
        done = api.resume_sweep(sweep, view=view)
    sweep_view.print_sweep(done.sweep)
