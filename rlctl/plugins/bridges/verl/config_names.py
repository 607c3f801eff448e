"""`--config-path` and `--config-name`, as verl's scripts pass them to Hydra."""

from __future__ import annotations

import re
from pathlib import Path

from rlctl.errors import ConfigError, NotFoundError, Problem
from rlctl.plugins.bridges.verl import tables

_COMMANDS = {"evaluation": "rlctl eval RUN", "generation": "rlctl generate RUN PROMPT"}


def is_verls_library(folder: str) -> bool:
    """Return True for the folder or package of verl's configuration files."""
    return bool(re.search(r"verl[/.]trainer[/.]config/*\Z", folder))


def recipe_of(verb: str, folder: str | None, name: str | None) -> str:
    """Return the recipe that `--config-path=folder --config-name=name` select for `verb`.

    That is a file of the folder if there is one, else the base with the same keys as verl's
    configuration of that name. Raises ConfigError for a configuration of a feature that rlctl
    lacks, and NotFoundError for an unknown name.
    """
    trainer = "sft" if verb == "sft" else "ppo"
    other = "ppo" if verb == "sft" else "sft"
    stem = (name or f"{trainer}_trainer").removesuffix(".yaml")
    if folder is not None and not is_verls_library(folder):
        place = Path(folder.removeprefix("file://")).expanduser()
        for file in (place / f"{stem}.yaml", place / f"{stem}.yml"):
            if file.is_file():
                return str(file)
    bare = stem.rpartition("/")[2]
    given = f"--config-name={name}"
    known = tables.TRAINER_CONFIGURATIONS
    if bare in _COMMANDS:
        raise ConfigError(f"{given} is not for training", hint=f"`{_COMMANDS[bare]}`")
    if bare in known[trainer] or (trainer == "ppo" and bare in tables.CONFIGURATIONS):
        return f"{verb}_trainer"
    absent = f"there is no {stem}.yaml in {folder}" if folder else "no --config-path is given"
    check_name(bare, f"{given}; {absent}")
    if bare in known[other]:
        raise ConfigError(f"{given} is a configuration of {other}", hint=f"`rlctl train {other}`")
    names = ", ".join(known[trainer][:2])
    hint = f"verl's names here: {names}; others are read from a clone of verl: --config-path FOLDER"
    raise NotFoundError(Problem(f"no configuration {stem!r}: {absent}", hint=hint))


def settings_of(name: str | None, recipe: str) -> list[str]:
    """Return the overrides of the base `recipe` with the values of verl's configuration `name`."""
    if not recipe.endswith("_trainer"):  # a file of the user
        return []
    stem = (name or "").removesuffix(".yaml").rpartition("/")[2]
    return list(tables.CONFIGURATIONS.get(stem, ()))


def check_name(name: str, where: str) -> None:
    """Raise ConfigError if `name` is a configuration of a feature that rlctl lacks."""
    if any(name in names for names in tables.TRAINER_CONFIGURATIONS.values()):
        return
    for words, needs in tables.MISSING_CONFIGURATIONS.items():
        if re.search(words, name):
            feature = tables.FEATURES[needs]
            message = f"{feature.sentence} (given: {where})"
            raise ConfigError(message, hint=feature.hint, code="E-NOT-SUPPORTED")
