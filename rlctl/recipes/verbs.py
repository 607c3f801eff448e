"""Verbs of `rlctl train` and `rlctl sweep`, as the shipped recipes describe them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rlctl.recipes.search_path import library_recipes
from rlctl.recipes.slots import lookup
from rlctl.recipes.sources import read

DEFAULT = "ppo"
MODEL = "actor_rollout_ref.model.path"


@dataclass(frozen=True)
class Verb:
    """Base NAME_trainer that has a quickstart, the recipe NAME.

    `model` is the key of the trained model's path, and `example` a recipe for data of one's own.
    """

    about: str
    algorithm: str
    model: str
    example: str


@cache
def verbs() -> dict[str, Verb]:
    """Return the verbs by name, the default first."""
    recipes = library_recipes()
    names = [name for name in recipes if f"{name}_trainer" in recipes]
    return {name: _verb(name) for name in sorted(names, key=lambda name: name != DEFAULT)}


def _verb(name: str) -> Verb:
    """Return what the base of a verb says; a key that it leaves out is that of the base's base."""
    base = read(library_recipes()[f"{name}_trainer"])
    model = lookup(base.data, MODEL)  # a reference to another key, or nothing
    parent = [*base.included, DEFAULT][0].removesuffix("_trainer")
    example = f"gsm8k_{name}"
    return Verb(
        f"{base.about}.",
        lookup(base.data, "algorithm.name") or parent,
        model.strip("${}") if model else MODEL,
        example if example in library_recipes() else name,
    )
