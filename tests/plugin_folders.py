"""Folders of `rlctl/plugins`: which of them this tree lacks, and what is in each."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("agents", "bridges", "console", "objectives")


def is_there(folder: str) -> bool:
    """Return True if the folder of `rlctl/plugins` was not deleted."""
    return (ROOT / "rlctl" / "plugins" / folder / "__init__.py").is_file()


def in_this_tree(path: str) -> bool:
    """Return False for a file, or what begins with its path, of a folder that was deleted."""
    return not any(f"plugins/{folder}/" in path for folder in FOLDERS if not is_there(folder))


def absent(folder: str) -> str:
    """Return the reason to skip a test that needs the folder."""
    return f"rlctl/plugins/{folder} is not in this tree"


def folder_of(kind: str, name: str) -> str | None:
    """Return the folder that has the plug-in `name`; None if it is in the core or unknown."""
    for point in entry_points(group=f"rlctl.{kind}", name=name):
        parts = point.module.split(".")
        if parts[:2] == ["rlctl", "plugins"]:
            return parts[2]
    return None


# Options of commands of the core that are of the folder `console`.
_OPTIONS = {
    "debug": {"--replay"},
    "doctor": {"--bug-report"},
    "eval": {"--tasks", "--num-fewshot", "--limit", "--task-dir", "--intervals", "--samples"},
    "export": {"--push", "--private", "--card-only"},
    "show": {"--diff", "--advice", "--components", "--tokens"},
}


def folder_of_command(line: str) -> str | None:
    """Return the folder that has the line's command, or one of its options; None for the core."""
    first, second, *_ = *line.split(), "", ""
    if _OPTIONS.get(first, set()) & {*line.split()}:
        return "console"
    return folder_of("commands", first) or folder_of(f"commands.{first}", second)


def can_run(line: str) -> bool:
    """Return False if the folder of the line's command was deleted."""
    folder = folder_of_command(line)
    return folder is None or is_there(folder)


def marks_of(*folders: str | None) -> list[pytest.MarkDecorator]:
    """Return the marks of a case that needs the folders."""
    return [pytest.mark.plugin(folder) for folder in folders if folder is not None]


def of_plugins(kind: str, names: Iterable[str]) -> list[Any]:
    """Return names of plug-ins as parameters of a test, marked with the folder of each."""
    return [pytest.param(name, marks=marks_of(folder_of(kind, name))) for name in names]


def of_commands(cases: Iterable[Any]) -> list[Any]:
    """Return cases as parameters of a test, marked with the folder of the command of each.

    A case is a command line or its words, or a sequence that begins with one.
    """
    params = []
    for case in cases:
        values = (case,) if isinstance(case, str) else tuple(case)
        line = values[0] if isinstance(values[0], str) else " ".join(values[0])
        params.append(pytest.param(*values, marks=marks_of(folder_of_command(line))))
    return params
