"""What `rlctl config` speaks of: a recipe, a stored configuration file, or a run, under one roof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.errors import NotFoundError, Problem, UsageError
from rlctl.recipes.layers import Origin
from rlctl.recipes.search_path import find_recipe
from rlctl.recipes.sources import read
from rlctl.recipes.stored import stored_origins


@dataclass(frozen=True)
class Subject:
    """A configuration to be shown: its values and, where they are known, the origins of each key."""

    name: str
    container: dict[str, Any]
    origins: dict[str, list[Origin]]


def subject(name: str, overrides: Sequence[str] = ()) -> Subject:
    """The recipe (by name or file), the stored `config.yaml` or the run that `name` means. Raises NotFoundError when there is none."""
    stored = _stored(name)
    if stored is None:
        from rlctl.cli.console import notice
        from rlctl.recipes.compose import compose

        recipe = compose(name, overrides)
        for line in recipe.notices:
            notice(line)
        return Subject(recipe.name, recipe.container, recipe.origins)
    if overrides:
        raise UsageError(
            f"{name} is composed already and takes no overrides",
            hint="name a recipe, or leave the overrides out",
        )
    return _read_stored(name, stored)


def values_of(name: str) -> dict[str, Any]:
    """The values of what `name` means; of a recipe as `compose_unvalidated` has them, so that a base, which lacks some, has values, too."""
    from rlctl.recipes.compose import compose_unvalidated

    stored = _stored(name)
    return compose_unvalidated(name) if stored is None else _read_stored(name, stored).container


def _stored(name: str) -> Path | None:
    """The `config.yaml` behind a run or a path, or None when `name` is a recipe to be composed."""
    try:
        path = find_recipe(name)
    except NotFoundError as no_recipe:
        from rlctl.runs.store import RunStore

        try:
            return RunStore.at(None).find(name).path / "config.yaml"
        except NotFoundError:
            raise NotFoundError(
                Problem(
                    f"no recipe, file or run is named {name!r}", hint=no_recipe.problems[0].hint
                )
            ) from None
    return (
        path
        if not (source := read(path)).defaults and {"data", "trainer"} <= source.data.keys()
        else None
    )


def _read_stored(name: str, config: Path) -> Subject:
    if not config.is_file():
        raise NotFoundError(f"{name} has no configuration", where=str(config))
    return Subject(name, read(config).data, stored_origins(config.parent))
