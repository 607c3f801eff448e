"""`rlctl config schema`: JSON schema of recipes, for editors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rlctl.cli.stderr import notice

app = typer.Typer(add_completion=False)

_EXAMPLES = """
Examples:

  rlctl config schema --out recipe.schema.json

  # first line of a recipe, for VS Code's YAML extension, neovim, JetBrains:

  # yaml-language-server: $schema=recipe.schema.json
"""
_INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}
_HYDRA = ("defaults", "hydra")  # keys of a recipe that are no settings


@app.command("schema", epilog=_EXAMPLES)
def schema(
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write there instead of stdout."),
    ] = None,
) -> None:
    """Print the JSON schema of a recipe, so that editors complete and check its keys."""
    import json

    from rlctl.files import write_text

    text = json.dumps(recipe_schema(), indent=2, ensure_ascii=False) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    write_text(out, text)
    notice(f"first line of a recipe: # yaml-language-server: $schema={out}")


def recipe_schema() -> dict[str, Any]:
    """Return the schema of recipes: all keys with type, bounds, default and help; none required.

    Any value may also be an interpolation such as `${data.train_batch_size}`.
    """
    from rlctl.recipes.compose import base_settings
    from rlctl.recipes.schema import Config

    whole = Config.model_json_schema()
    definitions = whole.pop("$defs")
    defaults = {key: origin.value for key, origin in base_settings().items()}
    root = _section(whole, definitions, "", defaults)
    for name in _HYDRA:
        root["properties"][name] = {"description": "Hydra's: parts and parents of the recipe"}
    root["patternProperties"] = {"^_": {}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "rlctl recipe",
        **root,
    }


def _section(
    section: Mapping[str, Any],
    definitions: Mapping[str, Any],
    prefix: str,
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, value in section.get("properties", {}).items():
        key = f"{prefix}{name}"
        resolved = _resolved(value, definitions)
        if "properties" in resolved:
            properties[name] = _section(resolved, definitions, f"{key}.", defaults)
            continue
        described = {"description": resolved.pop("description", key)}
        if key in defaults:
            described["default"] = defaults[key]
        properties[name] = described | {"anyOf": [resolved, _INTERPOLATION]}
    shown = {"description": section["description"]} if "description" in section else {}
    return {**shown, "type": "object", "properties": properties, "additionalProperties": False}


def _resolved(value: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with the definitions that it refers to."""
    if "$ref" in value:
        found = definitions[value["$ref"].rpartition("/")[2]]
        return _resolved(found, definitions) | {
            name: text for name, text in value.items() if name != "$ref"
        }
    resolved: dict[str, Any] = {}
    for name, inner in value.items():
        if name in ("anyOf", "prefixItems"):
            resolved[name] = [_resolved(choice, definitions) for choice in inner]
        elif name in ("items", "additionalProperties") and isinstance(inner, dict):
            resolved[name] = _resolved(inner, definitions)
        elif name not in ("title", "required", "bounds"):
            resolved[name] = inner
    return resolved
