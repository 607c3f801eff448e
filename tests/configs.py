"""Configurations of many settings: composed once, then changed without Hydra."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import yaml

from rlctl.recipes.compose import compose
from rlctl.recipes.schema import Config


@cache
def _composed(recipe: str, overrides: tuple[str, ...]) -> Config:
    return compose(recipe, overrides).config


def configured(recipe: str, overrides: Iterable[str], settings: Iterable[str]) -> Config:
    """Return the recipe with `overrides`, which are composed once, and `settings`, `key=value`.

    Keys that are defined by reference to one of the settings do not follow it.
    """
    values = _composed(recipe, tuple(overrides)).model_dump()
    for setting in settings:
        key, _, value = setting.partition("=")
        *path, last = key.split(".")
        section = values
        for name in path:
            section = section[name]
        section[last] = yaml.safe_load(value)
    return Config.model_validate(values)
