"""`rlctl explain`: errors, metrics and keys, from tables inside the package."""

from __future__ import annotations

from typing import Annotated

import typer

from rlctl.cli import complete
from rlctl.cli.console import print_json, stdout
from rlctl.cli.options import Json
from rlctl.errors import NotFoundError, Problem

app = typer.Typer()

_EXAMPLES = """
Examples:

  rlctl explain E-OOM                   an error, by its code

  rlctl explain actor/entropy kl        a metric, and an alarm

  rlctl explain optim.lr                keys: type, default, verl's name

  rlctl explain --json 7                an exit code
"""


@app.command(epilog=_EXAMPLES)
def explain(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="CODE|METRIC|KEY...",
            help="Code of an error, exit code, metric, alarm, or config key, also by its end.",
            autocompletion=complete.explained,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Explain the code of an error, a metric, an alarm or a config key.

    Options of TRL and OpenRLHF and keys of verl are explained by the keys that replace them.
    """

    from rich.text import Text

    from rlctl.cli import all_commands
    from rlctl.cli.explain.lookup import Explanation
    from rlctl.cli.explain.lookup import explain as look_up

    found: list[Explanation] = []
    problems: list[Problem] = []
    for name in names:
        found += [
            Explanation(name, "command", command.help or "", {"options": f"rlctl {name} --help"})
            for command in all_commands()
            if command.name == name
        ]
        try:
            found += look_up(name)
        except NotFoundError as error:
            problems += [] if found and found[-1].name == name else error.problems
    if as_json:
        if not problems:
            print_json(found)
        found = []
    width = max((len(label) for entry in found for label in entry.facts), default=0)
    for number, entry in enumerate(found):
        if number:
            stdout().print()
        stdout().print(Text.assemble((entry.name, "bold"), f"  {entry.kind}"))
        stdout().print(f"  {entry.text}")
        for label, text in entry.facts.items():
            stdout().print(f"  {label:{width}}  {text}")
    if problems:
        raise NotFoundError(*problems)
