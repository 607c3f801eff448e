"""Completion of arguments: each function imports what it needs only when the TAB key is pressed."""

from __future__ import annotations


def recipe(incomplete: str) -> list[str]:
    """Names of recipes, and YAML files."""
    from rlctl.recipes.completion import complete_recipe

    return complete_recipe(incomplete)


def key(incomplete: str) -> list[str]:
    """Dotted keys of the configuration."""
    from rlctl.recipes.completion import complete_key

    return complete_key(incomplete)


def override(incomplete: str) -> list[str]:
    """`key=value`, section by section, then the values of the key."""
    from rlctl.recipes.completion import complete_override

    return complete_override(incomplete)
