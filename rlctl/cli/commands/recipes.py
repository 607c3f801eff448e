"""`rlctl recipes`: the shipped recipes, copies and checks of them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli import complete
from rlctl.cli.options import Json, Strict
from rlctl.terminal import visible

app = typer.Typer(no_args_is_help=True)

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
    from rlctl.cli.console import print_json, stdout, table
    from rlctl.recipes.search_path import library_recipes
    from rlctl.recipes.sources import read

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
        stdout().print(
            table(
                ["name", "about", "on"],
                [(name, source.about, ", ".join(source.included)) for name, source in found],
            )
        )


@app.command(epilog="Example: rlctl recipes show gsm8k_ppo")
def show(recipe: Name) -> None:
    """Print the file of a recipe; `rlctl config show -r NAME` shows the composed values."""
    from rlctl.recipes.search_path import find_recipe

    typer.echo(visible(find_recipe(recipe).read_text(encoding="utf-8")), nl=False)


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
) -> None:
    """Copy a recipe to a file that you can edit and train with `--recipe FILE`."""
    from rlctl.cli.console import notice
    from rlctl.errors import ConflictError, cannot_write
    from rlctl.files import write_text
    from rlctl.recipes.search_path import find_recipe

    source = find_recipe(recipe)
    target = to or Path(f"{source.stem}.yaml")
    target = target / source.name if target.is_dir() else target
    if target.exists() and not force:
        raise ConflictError(
            f"{target} exists", hint="choose another name, or overwrite it with --force"
        )
    try:
        write_text(target, source.read_text(encoding="utf-8"))
    except OSError as error:
        raise cannot_write("the recipe", target, error) from error
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
    from rlctl.cli.console import print_json, print_problems, stdout, warn
    from rlctl.recipes.search_path import library_recipes
    from rlctl.runtime.planning.recipe_check import check_recipe

    names = recipes or [name for name in library_recipes() if not name.endswith("_trainer")]
    checks = [check_recipe(name, strict=strict) for name in names]
    if as_json:
        print_json([each.as_dict() for each in checks])
    for each in checks if not as_json else ():
        print_problems(each.problems)
        for line in each.unused:
            warn(f"{each.name}: {line}")
        stdout().print(f"{'ok' if not each.problems else 'wrong':6}{each.name}", markup=False)
    code = max((each.exit_code for each in checks), default=0)
    if code:
        raise typer.Exit(code)
