"""`rlctl config`: composed configurations, the origin of each value, and the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from rlctl.cli import PluginGroup, complete
from rlctl.cli.config_target import ConfigTarget, load_target, values_of
from rlctl.cli.console import print_json, print_table, stdout
from rlctl.cli.options import Json, overrides_argument
from rlctl.cli.stderr import notice
from rlctl.errors import NotFoundError, UsageError
from rlctl.recipes.keys import known_key, schema_keys
from rlctl.recipes.layers import Origin, leaves, nested
from rlctl.suggest import did_you_mean
from rlctl.terminal import visible


class _ConfigGroup(PluginGroup):
    """Group `rlctl config`, of which some commands are plug-ins."""

    kind = "commands.config"


app = typer.Typer(cls=_ConfigGroup)


RecipeOption = Annotated[
    str,
    typer.Option(
        "--recipe",
        "-r",
        metavar="NAME|PATH|RUN",
        help="Recipe, config.yaml or run to show.",
        autocompletion=complete.config_target,
    ),
]
Overrides = Annotated[list[str] | None, overrides_argument("Overrides in Hydra's grammar.")]


@app.command(
    epilog="""
Examples:

  rlctl config show optim.lr --recipe gsm8k_ppo --origin

  rlctl config show --recipe @last --changed
"""
)
def show(
    arguments: Annotated[
        list[str] | None,
        overrides_argument(
            "Words or a glob that select keys; overrides.", "[PATTERN] [KEY=VALUE]..."
        ),
    ] = None,
    recipe: RecipeOption = "ppo",
    changed: Annotated[
        bool, typer.Option("--changed", help="Show only values that differ from the base.")
    ] = False,
    origin: Annotated[
        bool, typer.Option("--origin", help="Show what set each value: file and line, or override.")
    ] = False,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print nested YAML to stdout.")] = False,
    as_json: Json = False,
) -> None:
    """Show the composed configuration of a recipe or a run."""
    from rlctl.recipes.key_reference import as_text

    if as_yaml and as_json:
        raise UsageError("--yaml and --json exclude each other", hint="give one of them")
    patterns = [word for word in arguments or [] if not _is_override(word)]
    found = load_target(recipe, [word for word in arguments or [] if _is_override(word)])
    values = leaves(found.container)
    names = _matching(patterns, list(values))
    if changed:
        names = [name for name in names if _differs(found.origins.get(name, ()))]
    chosen = {name: values[name] for name in names}
    chains = {name: found.origins.get(name) for name in names}
    places = {name: chain[-1].where for name, chain in chains.items() if chain}
    if as_json and origin:
        print_json({name: {"value": chosen[name], "where": places.get(name)} for name in names})
    elif as_json:
        print_json(nested(chosen))
    elif as_yaml:
        import yaml

        dumped = yaml.safe_dump(nested(chosen), sort_keys=False, allow_unicode=True)
        typer.echo(visible(dumped), nl=False)
    elif origin:
        rows = [(name, as_text(value), places.get(name, "")) for name, value in chosen.items()]
        print_table(["key", "value", "from"], rows)
    else:
        print_table(["key", "value"], [(name, as_text(value)) for name, value in chosen.items()])


@app.command(epilog="Example: rlctl config why actor.optim.lr --recipe gsm8k_ppo")
def why(
    key: Annotated[
        str,
        typer.Argument(help="Key, or an unambiguous end of one.", autocompletion=complete.key),
    ],
    overrides: Overrides = None,
    recipe: RecipeOption = "ppo",
    as_json: Json = False,
) -> None:
    """Explain a value: list all settings of the key with file and line, the effective one first."""
    from rlctl.cli.startup import announce
    from rlctl.recipes.key_reference import as_text, selected_setting
    from rlctl.recipes.unused_keys import unused_keys
    from rlctl.recipes.validate import lookup

    found = load_target(recipe, overrides or [])
    name = _resolve(key, found)
    value = lookup(found.container, name)
    chain = list(reversed(found.origins.get(name, ())))
    if chain and chain[0].level > 1:
        announce("reading which keys the algorithm uses")
    unused = next(
        (unused.reason for unused in unused_keys(found.container, found.origins, keys=[name])), None
    )
    if as_json:
        print_json({"key": name, "value": value, "origins": chain, "no_effect": unused})
        return
    entry = known_key(name)
    shown = as_text(value)
    if (setting := selected_setting(name, found.container)) is not None:
        entry = setting.key
        if not chain:
            shown = setting.default
    stdout().print(f"{name} = {shown}")
    if entry is not None:
        stdout().print(f"  {entry.help}; {entry.type}", style="dim")
    if chain:
        print_table(
            ["value", "set by"], [(as_text(setting.value), setting.where) for setting in chain]
        )
    if unused is not None:
        stdout().print(f"no effect here: {unused}")
    if chain and isinstance(chain[0].value, str) and chain[0].value.startswith("${"):
        stdout().print(f"refers to another key: rlctl config why {chain[0].value[2:-1]}")


@app.command(epilog="Example: rlctl config keys '*.lr'")
def keys(
    pattern: Annotated[
        list[str] | None, typer.Argument(help="Words in the key's name, or a glob such as '*.lr'.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List keys with type, default and help."""
    from rlctl.recipes.key_reference import key_rows, shipped_settings

    rows = {row.key.name: row for row in key_rows()}
    if any("params" in word for word in pattern or ()):
        rows |= {row.key.name: row for row in shipped_settings()}
    names = _matching(pattern, list(rows))
    chosen = [rows[name] for name in names]
    if as_json:
        print_json(
            [
                {
                    "key": row.key.name,
                    "type": row.key.type,
                    "default": row.default,
                    "help": row.key.help,
                }
                for row in chosen
            ]
        )
    else:
        print_table(
            ["key", "type", "default", "help"],
            [(row.key.name, row.key.type, row.default, row.key.help) for row in chosen],
        )


@app.command(epilog="Example: rlctl config diff gsm8k_ppo @last")
def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="Recipe, config.yaml or run.", autocompletion=complete.config_target
        ),
    ],
    b: Annotated[
        str,
        typer.Argument(
            metavar="B",
            help="Recipe, config.yaml or run to compare with.",
            autocompletion=complete.config_target,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Compare two configurations: recipes, stored files or runs."""
    from rlctl.recipes.key_reference import as_text

    left, right = leaves(values_of(a)), leaves(values_of(b))
    names = [
        name
        for name in dict.fromkeys([*left, *right])
        if left.get(name, _ABSENT) != right.get(name, _ABSENT)
    ]
    if as_json:
        print_json([{"key": name, "a": left.get(name), "b": right.get(name)} for name in names])
    elif names:
        texts = [{name: as_text(value) for name, value in side.items()} for side in (left, right)]
        cells = [(name, *(side.get(name, "") for side in texts)) for name in names]
        print_table(["key", a, b], cells)
    else:
        notice(f"{a} and {b} have the same values")


_ABSENT = object()


def _matching(words: list[str] | None, names: list[str]) -> list[str]:
    """Return the names that match the words, all names without words.

    Raises NotFoundError if no name matches.
    """
    from rlctl.recipes.key_reference import matching

    if not words:
        return names
    found = matching(" ".join(words), names)
    if not found:
        hint = "`rlctl config keys` lists all keys"
        if words[0].startswith("@"):
            hint = f"-r {words[0]} shows the configuration of that run"
        raise NotFoundError(f"no key matches {' '.join(words)!r}", hint=hint)
    return found


def _is_override(text: str) -> bool:
    return "=" in text or text.startswith("~")


def _differs(chain: Sequence[Origin]) -> bool:
    """Return True if a recipe or the command line changed the value of the base."""
    base = next((setting for setting in reversed(chain) if setting.level == 1), None)
    return bool(chain) and chain[-1].level > 1 and (base is None or base.value != chain[-1].value)


def _resolve(key: str, found: ConfigTarget) -> str:
    """Return the full name of `key`, which may be an unambiguous end of it."""
    from rlctl.recipes.key_reference import selected_setting

    names = leaves(found.container)
    if key in names or selected_setting(key, found.container) is not None:
        return key
    if key in schema_keys() and schema_keys()[key].kind == "section":
        raise UsageError(
            f"{key} is a section", hint=f"`rlctl config show {key} --origin` shows its keys"
        )
    ending = [name for name in names if name.endswith(f".{key}")]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise NotFoundError(
            f"{key} matches {len(ending)} keys", hint=f"give one of them: {' or '.join(ending)}"
        )
    hint = did_you_mean(key, names) or f"`rlctl config keys {key}` searches the names of keys"
    raise NotFoundError(f"no key {key}", hint=hint)
