"""Folders of `rlctl/plugins`: which of them this tree lacks, and what is in each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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
    "data": {"--reader"},
    "debug": {"--replay"},
    "doctor": {"--bug-report"},
    "eval": {"--tasks", "--num-fewshot", "--limit", "--task-dir", "--intervals", "--samples"},
    "export": {"--push", "--private", "--card-only"},
    "show": {"--diff", "--advice", "--components", "--tokens"},
}


def folder_of_command(line: str) -> str | None:
    """Return the folder that has the line's command, or one of its options; None for the core."""
    first, second, *_ = *line.removeprefix("rlctl ").split(), "", ""
    if _OPTIONS.get(first, set()) & {*line.split()}:
        return "console"
    if first == "prep":
        return folder_of("datasets", second)
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


# Settings that select a plug-in, and its kind.
_SELECTING = {
    "adv_estimator": "advantages",
    "loss_mode": "policy_losses",
    "algorithm.name": "algorithms",
    "rollout.name": "engines",
    "environment": "environments",
}
_SELECTED = re.compile(rf"({'|'.join(map(re.escape, _SELECTING))})=(\w+)")


def folders_of_settings(settings: object) -> set[str | None]:
    """Return the folders of the plug-ins that settings, `key=name`, select."""
    found = _SELECTED.findall(str(settings))
    return {folder_of(_SELECTING[key], name) for key, name in found}


def of_settings(cases: Iterable[Sequence[Any]]) -> list[Any]:
    """Return cases as parameters of a test, marked with the folders that their settings need."""
    return [pytest.param(*case, marks=marks_of(*folders_of_settings(case))) for case in cases]


_RECIPES = {
    **dict.fromkeys(("gridworld", "tools"), "agents"),
    **dict.fromkeys(
        (
            *("distill", "dpo", "format_smollm", "gsm8k_judge", "gsm8k_reinforce_plus_plus"),
            *("gsm8k_rloo", "gspo", "judge", "math_gspo", "online_dpo", "ppo_reward_model", "raft"),
            *("reinforce_plus_plus", "reward_model", "rloo", "rm", "self_distill"),
        ),
        "objectives",
    ),
}


def folder_of_recipe(name: str) -> str | None:
    """Return the folder without which the recipe does not train."""
    return _RECIPES.get(name.removesuffix("_trainer"))


def can_train(recipe: str) -> bool:
    """Return False if the folder that the recipe needs was deleted."""
    folder = folder_of_recipe(recipe)
    return folder is None or is_there(folder)


def of_recipes(names: Iterable[str]) -> list[Any]:
    """Return names of recipes as parameters of a test, marked with the folder of each."""
    return [pytest.param(name, marks=marks_of(folder_of_recipe(name))) for name in names]


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
