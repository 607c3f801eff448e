"""`rlctl recipes`: the shipped recipes, copies and checks of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from rlctl import plugins
from rlctl.causes import as_rlctl_error
from rlctl.cli import complete
from rlctl.cli.console import print_json, print_table, stdout
from rlctl.cli.options import Json, Strict
from rlctl.cli.stderr import notice, print_problems, warn
from rlctl.errors import ConflictError, Problem
from rlctl.files import write_text
from rlctl.recipes.search_path import find_recipe, library_recipes
from rlctl.terminal import visible

app = typer.Typer()

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME|PATH",
        help="Recipe by name or file.",
        autocompletion=complete.recipe,
    ),
]


@app.command("ls", epilog="Example: rlctl recipes ls --json")
def list_recipes(as_json: Json = False) -> None:
    """List the shipped recipes."""
    from rlctl.recipes.yaml_sources import read

    found = [(name, read(path)) for name, path in library_recipes().items()]
    if as_json:
        print_json(
            [
                {
                    "name": name,
                    "about": source.about,
                    "on": source.included,
                    "path": str(source.path),
                }
                for name, source in found
            ]
        )
    else:
        print_table(
            ["name", "about", "on"],
            [(name, source.about, ", ".join(source.included)) for name, source in found],
        )


@app.command(epilog="Example: rlctl recipes show gsm8k_ppo")
def show(recipe: Name, as_json: Json = False) -> None:
    """Print the file of a recipe; `rlctl config show -r NAME` shows the composed values."""
    path = find_recipe(recipe)
    text = path.read_text(encoding="utf-8")
    if as_json:
        print_json({"path": path, "text": text})
    else:
        typer.echo(visible(text), nl=False)


@app.command(epilog="Example: rlctl recipes cp gsm8k_ppo mine.yaml")
def cp(
    recipe: Name,
    to: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE|DIR]", help="Target; by default NAME.yaml in the current folder."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Copy a recipe to a file that you can edit and train with `--recipe FILE`."""
    source = find_recipe(recipe)
    target = to or Path(f"{source.stem}.yaml")
    if target.is_dir():
        target /= source.name
    if target.exists() and not force:
        raise ConflictError(
            f"{target} already exists", hint="choose another name, or overwrite it with --force"
        )
    try:
        write_text(target, source.read_text(encoding="utf-8"))
    except OSError as error:
        from rlctl.write_errors import cannot_write

        raise cannot_write("the recipe", target, error) from error
    if as_json:
        print_json({"path": target})
        return
    typer.echo(target)
    notice(f"edit it, then run: rlctl recipes check {shlex.quote(str(target))}")


@app.command(epilog="Example: rlctl recipes check mine.yaml --strict")
def check(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|PATH]...",
            help="Recipes by name or file; by default all shipped ones.",
            autocompletion=complete.recipe,
        ),
    ] = None,
    strict: Strict = False,
    as_json: Json = False,
) -> None:
    """Compose recipes and list all their problems and all keys that have no effect."""
    names = recipes or [name for name in library_recipes() if not name.endswith("_trainer")]
    checks = [(name, _check_recipe(name, strict)) for name in names]
    if as_json:
        print_json(
            [
                {
                    "recipe": name,
                    "ok": not result.problems,
                    "problems": result.problems,
                    "no_effect": result.unused,
                }
                for name, result in checks
            ]
        )
    else:
        for name, result in checks:
            _print_check(name, result)
    code = max((result.exit_code for _, result in checks), default=0)
    if code:
        raise typer.Exit(code)


class _Check(NamedTuple):
    """Problems of a recipe, which make it unusable, and its keys without effect."""

    problems: Sequence[Problem] = ()
    unused: Sequence[str] = ()
    exit_code: int = 0


def _print_check(name: str, result: _Check) -> None:
    print_problems(result.problems)
    for line in result.unused:
        warn(f"{name}: {line}")
    verdict = "ok"
    if result.problems:
        verdict = "wrong"
    stdout().print(f"{verdict:6}{name}")


def _check_recipe(name: str, strict: bool) -> _Check:
    """Compose a recipe and load its plug-ins; data and models are not read."""
    from rlctl.recipes.compose import compose
    from rlctl.recipes.role_table import needed_roles
    from rlctl.recipes.slots import SLOTS
    from rlctl.recipes.unused_keys import report_unused_keys
    from rlctl.runtime.build import load_algorithm

    try:
        recipe = compose(name)
        for slot in SLOTS:
            for plugin in filter(slot.is_loaded_here, slot.selected(recipe.container)):
                if ":" in plugin:
                    plugins.load(slot.kind, plugin)
        needs = load_algorithm(recipe.config, num_steps=1).needs
        roles = {role.name for role in needed_roles(recipe.config, needs)}
        return _Check(unused=report_unused_keys(recipe, roles, strict=strict))
    except Exception as error:
        known = as_rlctl_error(error)  # of users' code, too
        if known is None:
            raise
        return _Check(known.problems, exit_code=known.exit_code)
