"""`rlctl report`: runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli.console import print_json
from rlctl.cli.options import Json, Root, run_argument
from rlctl.cli.stderr import notice
from rlctl.files import write_text

app = typer.Typer()

_EXAMPLES = """
Examples:

  rlctl report @last                        writes runs/…/report.html

  rlctl report ppo-a ppo-b grpo -o compare.html

  rlctl report my-sweep                its trials, and its search space
"""


@app.command(epilog=_EXAMPLES)
def report(
    runs: Annotated[
        list[str],
        run_argument("Runs by name or prefix, folder, @last or @failed; or one sweep.", "RUN..."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="File to write; by default report.html in the folder of the run or sweep, "
            "or in the current folder for several runs.",
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option("--samples", min=0, help="Number of samples per validation."),
    ] = 50,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML file about runs: curves, alarms, samples, settings.

    Prints the path of the file.
    """
    from rlctl.api import find_run_or_sweep, open_run
    from rlctl.plugins.console.report.content import content
    from rlctl.plugins.console.report.page import page
    from rlctl.runs.run_comparison import distinct
    from rlctl.sweeps.results import runs_of, search
    from rlctl.sweeps.sweep_record import SweepDir

    folder = Path()
    space = None
    first = find_run_or_sweep(runs[0], root) if len(runs) == 1 else None
    if isinstance(first, SweepDir):
        found = runs_of(first)
        space = search(first)
    else:
        found = distinct([open_run(name, root) for name in runs])
    if first is not None or len(found) == 1:
        folder = (first or found[0]).path
    target = output or folder / "report.html"
    text = page(content(found, samples, space))
    try:
        write_text(target, text)
    except OSError as error:
        from rlctl.write_errors import cannot_write

        hint = "-o FILE writes to another place"
        raise cannot_write("the report", target, error, hint) from error
    if as_json:
        print_json({"path": target, "bytes": len(text.encode())})
        return
    typer.echo(target)
    notice(f"{len(text.encode()) / 1e6:.1f} MB; opens in any browser, without a network")
