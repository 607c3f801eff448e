"""Manual page `rlctl.1`, generated from the commands by `python -m rlctl.cli.man_page`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_group

from rlctl import __version__
from rlctl.cli import LazyCommand, app

PAGE = Path(__file__).with_name("rlctl.1")  # the wheel installs it into share/man/man1
_END = """.SH EXIT STATUS
0 success, 1 failed run, 2 command line, 3 configuration, 4 not found, 5 conflict, 6 missing
package, 7 missing resource, 70 defect, 128 + N signal N. `rlctl explain CODE` explains an error.
.SH ENVIRONMENT
RLCTL_RUNS: folder of all runs. RLCTL_DEBUG=1: tracebacks of errors.
"""


def manual() -> str:
    """Return the manual page of all commands, in the format of man(7)."""
    root = get_group(app)
    parts = [
        f'.TH RLCTL 1 "" "rlctl {__version__}" "User Commands"',
        ".SH NAME",
        r"rlctl \- train language models with reinforcement learning",
        ".SH SYNOPSIS",
        "rlctl [OPTIONS] COMMAND [ARGUMENTS]",
        ".SH DESCRIPTION",
        *_paragraphs(root.help or ""),
        *_parameters(root),
        ".SH COMMANDS",
    ]
    for name, command in root.commands.items():
        loaded = command.load() if isinstance(command, LazyCommand) else command
        parts += _command(f"rlctl {name}", loaded)
    return "\n".join(parts) + "\n" + _END


def _command(path: str, command: Any) -> Iterator[str]:
    """Yield the lines of a command and of its subcommands; `path` is its name with its parents'."""
    inner = getattr(command, "commands", {})
    arguments = [_label(each) for each in command.params if each.param_type_name == "argument"]
    yield f".SS {_roff(' '.join([path, *arguments, *(['COMMAND'] if inner else [])]))}"
    yield from _paragraphs(command.help or "")
    yield from _parameters(command)
    if command.epilog:
        yield from (".PP", ".nf", _roff(inspect.cleandoc(command.epilog)), ".fi")
    for name, each in inner.items():
        if not each.hidden:
            yield from _command(f"{path} {name}", each)


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in filter(None, inspect.cleandoc(text).split("\n\n")):
        yield from (".PP", _roff(paragraph))


def _parameters(command: Any) -> Iterator[str]:
    """Yield the arguments and options with a help text, without --help."""
    for each in command.params:
        if each.help and not each.hidden and not (each.name or "").endswith("_completion"):
            yield from (".TP", _roff(_label(each)), _roff(" ".join(each.help.split())))


def _label(parameter: Any) -> str:
    """Return an argument's name in capitals, or an option's names and that of its value."""
    value = parameter.metavar or (parameter.name or "").upper()
    if parameter.param_type_name == "argument":
        return value
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag or parameter.count else f"{names} {value}"


def _roff(text: str) -> str:
    """Return text in ASCII in which roff finds no requests."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    escaped = re.sub(r"[^\x00-\x7f]", lambda match: rf"\[u{ord(match[0]):04X}]", escaped)
    lines = (rf"\&{line}" if line.startswith((".", "'")) else line for line in escaped.splitlines())
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(manual(), encoding="utf-8")
