"""Shell completion of arguments. Imports are deferred to the moment of completion."""

from __future__ import annotations

from pathlib import Path

import typer


def recipe(incomplete: str) -> list[str]:
    """Complete recipe names and YAML files."""
    from rlctl.recipes.completion import complete_recipe

    return complete_recipe(incomplete)


def key(incomplete: str) -> list[str]:
    """Complete dotted config keys."""
    from rlctl.recipes.completion import complete_key

    return complete_key(incomplete)


def override(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete `key=value` one section at a time, then the values of the key."""
    from rlctl.recipes.completion import complete_override

    return complete_override(incomplete, ctx.params.get("overrides") or ())


def run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete selectors and names of runs under the command's `--root`, newest first."""
    from rlctl.runs.store import RunStore

    store = RunStore(None)
    if root := ctx.params.get("root"):
        store = RunStore(Path(root))
    found = sorted(store.runs(), key=lambda run: run.created, reverse=True)
    special = [name for name in ("@last", "@failed") if found] + [
        f"@tag:{tag}" for run in found for tag in run.labels.tags
    ]
    return [
        name
        for name in dict.fromkeys([*special, *(run.name for run in found)])
        if name.startswith(incomplete)
    ]


def run_or_quickstart(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete runs and bundled models; the shell offers model folders if nothing matches."""
    return [*run(ctx, incomplete), *bundled_model(incomplete)]


def config_target(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the targets of `rlctl config`: recipes, YAML files, runs."""
    return [*recipe(incomplete), *run(ctx, incomplete)]


def logger(incomplete: str) -> list[str]:
    """Complete tracker names."""
    from rlctl.plugins import names

    return [name for name in names("loggers") if name.startswith(incomplete)]


def explained(incomplete: str) -> list[str]:
    """Complete codes of errors, alarms, metrics and config keys."""
    from rlctl.cli.explain.lookup import known_names

    names = [name for name in known_names() if name.startswith(incomplete)]
    return names or [name for name in known_names() if name.startswith(incomplete.upper())]


def bundled_model(incomplete: str) -> list[str]:
    """Complete the bundled models; the shell offers model folders if nothing matches."""
    from rlctl.quickstart import MODELS

    return [name for name in MODELS if name.startswith(incomplete)]
