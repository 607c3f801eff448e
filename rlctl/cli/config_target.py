"""Target of `rlctl config`: a recipe, a stored configuration file or a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.cli.startup import compose_with_notices
from rlctl.errors import NotFoundError, Problem, UsageError
from rlctl.recipes.layers import Origin
from rlctl.recipes.recorded_config import config_file, stored_origins
from rlctl.recipes.search_path import find_recipe
from rlctl.recipes.yaml_sources import read
from rlctl.runs.store import RunStore


@dataclass(frozen=True)
class ConfigTarget:
    """Values of a configuration and the known origins of each key."""

    name: str
    container: dict[str, Any]
    origins: dict[str, list[Origin]]


def load_target(name: str, overrides: Sequence[str] = ()) -> ConfigTarget:
    """Load the recipe (by name or file), stored `config.yaml` or run called `name`.

    Raises NotFoundError for an unknown name, UsageError for overrides of a stored configuration.
    """
    stored = _stored(name)
    if stored is None:
        recipe = compose_with_notices(name, overrides)
        return ConfigTarget(recipe.name, recipe.recorded, recipe.origins)
    if overrides:
        raise UsageError(
            f"{name} is already composed and takes no overrides",
            hint="name a recipe or remove the overrides",
        )
    return _read_stored(name, stored)


def values_of(name: str) -> dict[str, Any]:
    """Return the values of a target; recipes are not validated, so that a base works too."""
    from rlctl.recipes.compose import compose_unvalidated

    stored = _stored(name)
    if stored is None:
        return compose_unvalidated(name)
    return _read_stored(name, stored).container


def _stored(name: str) -> Path | None:
    """Return the `config.yaml` of a run or path, or None if `name` is a recipe to compose."""
    try:
        path = find_recipe(name)
    except NotFoundError as error:
        try:
            return config_file(RunStore(None).find(name).path)
        except NotFoundError:
            raise NotFoundError(
                Problem(f"no recipe, file or run is named {name!r}", hint=error.problems[0].hint)
            ) from None
    source = read(path)
    if source.defaults or not {"data", "trainer"} <= source.data.keys():
        return None
    return path


def _read_stored(name: str, config: Path) -> ConfigTarget:
    if not config.is_file():
        raise NotFoundError(f"{name} has no configuration", where=str(config))
    return ConfigTarget(name, read(config).data, stored_origins(config.parent))
