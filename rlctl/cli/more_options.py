"""Options of plug-ins for commands of rlctl, such as `--tasks` of `rlctl eval`."""

from __future__ import annotations

from typing import Any

from typer import Typer
from typer.main import get_group


def add_options(command: Any, app: Typer) -> None:
    """Add the options, the help and the examples of the app's only command to `command`.

    A parameter of both is that of `command`, and tells the place of those before it. The plug-in's
    function is called first; if it returns True, it has done the work.
    """
    group: Any = get_group(app)
    (added,) = group.commands.values()
    given = [parameter.name for parameter in command.params]
    wanted = [parameter.name for parameter in added.params]
    place = len(command.params)
    for parameter in reversed(added.params):
        if parameter.name in given:
            place = [shown.name for shown in command.params].index(parameter.name)
        else:
            command.params.insert(place, parameter)
    call = command.callback

    def callback(**values: Any) -> Any:
        if added.callback(**{name: values[name] for name in wanted}) is not True:
            call(**{name: values[name] for name in given})

    command.callback = callback
    text = command.help or ""
    gap = "\n\n"
    if gap in text:  # the first paragraph is that of lists
        gap = " "
    command.help = f"{text}{gap}{added.help or ''}".strip()
    command.epilog = (command.epilog or "") + (added.epilog or "")
