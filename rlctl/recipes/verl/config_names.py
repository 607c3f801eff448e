"""`--config-path` and `--config-name`, as verl's scripts pass them to Hydra."""

from __future__ import annotations

import re
from pathlib import Path

from rlctl.errors import ConfigError, NotFoundError, Problem
from rlctl.recipes.verl.tables import CONFIGURATIONS, MISSING_CONFIGURATIONS
from rlctl.recipes.verl.tables import PPO_CONFIGURATIONS as _PPO
from rlctl.recipes.verl.tables import SFT_CONFIGURATIONS as _SFT

_COMMANDS = {"evaluation": "rlctl eval RUN", "generation": "rlctl generate RUN PROMPT"}


def is_verls_library(folder: str) -> bool:
    """Return True for the folder or package of verl's own configuration files."""
    return bool(re.search(r"verl[/.]trainer[/.]config/*\Z", folder))


def recipe_of(verb: str, folder: str | None, name: str | None) -> str:
    """Return the recipe that `--config-path=folder --config-name=name` select for `verb`.

    That is a file of the folder if there is one, else the base with the same keys as verl's
    configuration of that name. Raises ConfigError for a configuration of a feature that rlctl
    lacks, and NotFoundError for an unknown name.
    """
    base = "sft_trainer" if verb == "sft" else f"{verb}_trainer"
    stem = (name or ("sft_trainer" if verb == "sft" else "ppo_trainer")).removesuffix(".yaml")
    if folder is not None and not is_verls_library(folder):
        place = Path(folder.removeprefix("file://")).expanduser()
        for file in (place / f"{stem}.yaml", place / f"{stem}.yml"):
            if file.is_file():
                return str(file)
    bare = stem.rpartition("/")[2]
    if bare in _COMMANDS:
        raise ConfigError(f"{_given(name)} is not for training", hint=f"`{_COMMANDS[bare]}`")
    absent = f"there is no {stem}.yaml in {folder}" if folder else "no --config-path is given"
    if verb != "sft" and bare in CONFIGURATIONS:
        return base
    check_name(bare, f"{_given(name)}; {absent}")
    if bare in (_SFT if verb == "sft" else _PPO):
        return base
    if bare in _PPO or bare in _SFT:
        other = "ppo" if bare in _PPO else "sft"
        raise ConfigError(
            f"{_given(name)} is a configuration of {other}", hint=f"`rlctl train {other}`"
        )
    known = ", ".join(_SFT if verb == "sft" else _PPO[:3:2])
    hint = f"verl's names here: {known}; others are read from a clone of verl: --config-path FOLDER"
    raise NotFoundError(Problem(f"no configuration {stem!r}: {absent}", hint=hint))


def settings_of(name: str | None, recipe: str) -> list[str]:
    """Return the overrides of the base `recipe` with the values of verl's configuration `name`."""
    stem = (name or "").removesuffix(".yaml").rpartition("/")[2]
    is_base = recipe.endswith("_trainer")  # and not a file of the user
    return list(CONFIGURATIONS.get(stem, ())) if is_base else []


def check_name(name: str, where: str) -> None:
    """Raise ConfigError if `name` is a configuration of a feature that rlctl lacks."""
    for words, feature in MISSING_CONFIGURATIONS.items():
        if name not in _PPO + _SFT and re.search(words, name):
            message = f"{feature.sentence} (given: {where})"
            raise ConfigError(message, hint=feature.hint)


def _given(name: str | None) -> str:
    return f"--config-name={name}"
