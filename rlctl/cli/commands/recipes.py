"""`rlctl recipes`: list, show, copy and check recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli import complete
from rlctl.cli.commands.config import Json

app = typer.Typer(no_args_is_help=True, help="List, show, copy and check the recipes.")

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME|PATH",
        help="A shipped recipe by name, or a file.",
        autocompletion=complete.recipe,
    ),
]


@app.command("ls")
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


@app.command()
def show(recipe: Name) -> None:
    """Print a recipe as it is written; `rlctl config show -r NAME` shows what it composes to."""
    from rlctl.recipes.search_path import find_recipe

    print(find_recipe(recipe).read_text(encoding="utf-8"), end="")


@app.command()
def cp(
    recipe: Name,
    to: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE|DIR]", help="Where to; by default NAME.yaml in this folder."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
) -> None:
    """Copy a recipe into a file of your own, to be changed and trained with `--recipe FILE`."""
    from rlctl.cli.console import notice
    from rlctl.errors import ConflictError, ResourceError
    from rlctl.recipes.search_path import find_recipe

    source = find_recipe(recipe)
    target = to or Path(f"{source.stem}.yaml")
    target = target / source.name if target.is_dir() else target
    if target.exists() and not force:
        raise ConflictError(f"{target} exists", hint="another name, or --force")
    try:
        target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {target}: {error.strerror}") from error
    print(target)
    notice(f"change it, then: rlctl recipes check {target}")


@app.command()
def check(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|PATH]...",
            help="Recipes; by default all that are shipped.",
            autocompletion=complete.recipe,
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="A key that is set and has no effect is an error.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compose recipes and name everything that is wrong with them, and every key that has no effect."""
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
