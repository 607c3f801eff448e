"""Errors of the command line's form, and the corrected command line to paste."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlctl.errors import Fix, Problem, Words
from rlctl.plugins.faults import removed
from rlctl.redaction import redact_word
from rlctl.suggest import closest

# Commands and options of other tools, with ours, by the group in which they are given.
_WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "rlctl": {
        "help": ("--help",),
        "-v": ("--version",),
        "-V": ("--version",),
        "list": ("runs",),
        "ls": ("runs",),
        "status": ("runs",),
        "run": ("train",),
        "start": ("train",),
        "fine-tune": ("train",),
        "finetune": ("train",),
        "rm": ("runs", "rm"),
        "delete": ("runs", "rm"),
        "log": ("logs",),
        "info": ("show",),
        "evaluate": ("eval",),
        "test": ("eval",),
        "kill": ("stop",),
        "push": ("export",),
        "ui": ("board",),
        "dashboard": ("board",),
        "check": ("doctor",),
        "tune": ("sweep",),
        "init": ("new",),
        "create": ("new",),
    },
    "rlctl config": {"get": ("why",), "list": ("keys",), "ls": ("keys",), "explain": ("why",)},
    "rlctl recipes": {"list": ("ls",), "get": ("show",), "cat": ("show",)},
    "rlctl runs": {"delete": ("rm",), "remove": ("rm",), "list": (), "ls": ()},
}
# Options of Hydra's command lines, and what does the same here.
_HYDRA = {
    "--multirun": "`rlctl sweep ALGORITHM KEY=A,B` runs several values of a key",
    "-m": "`rlctl sweep ALGORITHM KEY=A,B` runs several values of a key",
    "--cfg": "`rlctl config show --yaml` prints the composed configuration",
    "--config-name": "`--recipe FILE` selects a recipe",
    "--config-path": "`--recipe FILE` selects a recipe",
    "--resolve": "`rlctl config show --yaml` prints the composed configuration",
}
_EXAMPLE = re.compile(r"(?<!\()rlctl [^`\n]+?(?=\s{3,}|\n|`|$)")


def explain(message: str, error: Any, words: Sequence[str]) -> Problem:
    """Return the problem of a usage error of Typer with this message, raised for `rlctl WORDS`.

    The hint is an example of the command where it has one.
    """
    context = getattr(error, "ctx", None)
    path = "rlctl"
    epilog = ""
    if context:
        path = context.command_path
        epilog = getattr(context.command, "epilog", None) or ""
    fix: Fix | None = None
    given = getattr(error, "option_name", None)
    if match := re.match(r"no such command '(.+?)'", message):
        message = match[0]
        kind = ".".join(["commands", *path.split()[1:]])
        if (problem := removed(kind, match[1])) is not None:
            return problem
        fix = _command(path, context, match[1])
    elif given and message.startswith("no such option"):
        message = f"no such option: {given}"
        if given not in _HYDRA:
            fix = _option(path, context, error, given, words)
    hint = f"`{path} --help` lists arguments and options"
    example = _EXAMPLE.search(re.sub(r"\\\n\s*", "", epilog))
    if example and fix is None:
        hint = f"for example `{example[0].strip()}`; {hint}"
    if given in _HYDRA and fix is None:
        hint = _HYDRA[given]
    return Problem(message, hint=hint, fix=fix)


def _command(path: str, context: Any, given: str) -> Fix | None:
    """Return the fix of an unknown command: a synonym, a typo, or a command that is left out."""
    known = context.command.list_commands(context)
    if given in _WORDS.get(path, {}):
        return given, _WORDS[path][given]
    if path == "rlctl":
        from rlctl.recipes.search_path import verbs

        if given in verbs():
            return given, ("train", given)
    if path == "rlctl train" and (recipe := _recipe(given)) is not None:
        named = [name for name in sorted(known, key=len) if name in recipe]
        verb = next(name for name in (*named, *_bases(recipe), "ppo") if name in known)
        return given, (verb, "--recipe", recipe)
    if "show" in known and (Path(given).suffix or Path(given).exists()):
        return given, ("show", given)
    longer = [name for name in known if name.startswith(given)]
    if len(longer) == 1:
        return given, longer[0]
    near = closest(given, known)
    if near is None:
        return None
    return given, near


def _option(path: str, context: Any, error: Any, given: str, words: Sequence[str]) -> Fix | None:
    """Return the fix of an unknown option: an option alike, or a setting written as an option."""
    if given in _WORDS.get(path, {}):
        return given, _WORDS[path][given]
    if path == "rlctl train":  # the algorithm is left out
        return ("train",), ("train", "ppo")
    name = given.lstrip("-")
    place = _place(words, given)
    if place is None:
        return None
    takes_overrides = any(parameter.name == "overrides" for parameter in context.command.params)
    whole = words[place]
    options = [
        option for option in getattr(error, "possibilities", None) or () if option != "--help"
    ]
    near = closest(given, options)
    is_key = "." in name or (takes_overrides and len(name) < 4)
    if near and (near.startswith(given) or not is_key):
        return whole, near + whole[len(given) :]
    if not takes_overrides:
        return None
    from rlctl.recipes.keys import similar_keys

    keys = similar_keys(name.replace("-", "_"))
    if not keys:
        return None
    if "=" in whole:
        return whole, f"{keys[0]}={whole.partition('=')[2]}"
    following = words[place + 1 : place + 2]
    if not following or following[0].startswith("-") or "=" in following[0]:
        return None
    return (whole, following[0]), f"{keys[0]}={following[0]}"


def _place(words: Sequence[str], option: str) -> int | None:
    return next(
        (i for i, word in enumerate(words) if word == option or word.startswith(f"{option}=")),
        None,
    )


def _recipe(given: str) -> str | None:
    """Return the recipe, by name or file, that `given` names or almost names."""
    if Path(given).suffix in (".yaml", ".yml"):
        return given
    from rlctl.recipes.search_path import library_recipes

    recipes = library_recipes()
    if given in recipes:
        return given
    near = closest(given, recipes)
    if near is None or len(given) <= 3 or "_" not in near:
        return None
    return near


def _bases(recipe: str) -> list[str]:
    """Return the names of the files on whose settings a shipped recipe builds."""
    from rlctl.recipes.search_path import library_recipes
    from rlctl.recipes.yaml_sources import read

    path = library_recipes().get(recipe)
    if path is None:
        return []
    return [name.removesuffix("_trainer") for name in read(path).included]


# Commands that take overrides, which may be added at their end.
_TAKES_OVERRIDES = {"train", "resume", "sweep", "fit"}
_MAX_CHECKS = 4  # of a corrected line, each followed by corrections of what it still lacks


def correct(
    words: Sequence[str],
    problems: Sequence[Problem],
    check: Callable[[Sequence[str]], Sequence[Problem]] | None,
) -> tuple[str | None, list[Problem]]:
    """Return the corrected line, None if no fix can be applied, and the problems that remain.

    `check` returns the problems of a command line. With it, the fixes of problems that only the
    corrected line has are applied, too.
    """
    line = corrected(words, problems)
    remaining = [problem for problem in problems if corrected(words, [problem]) is None]
    for _ in range(_MAX_CHECKS):
        if check is None or line is None:
            break
        words = shlex.split(line)[1:]
        remaining = list(check(words))
        if not remaining or (longer := corrected(words, remaining)) in (None, line):
            break
        line = longer
    return line, remaining


def corrected(words: Sequence[str], problems: Sequence[Problem]) -> str | None:
    """Return `rlctl WORDS` with the fixes of the problems, None if no fix can be applied.

    The line is quoted for a shell. Secrets in it are replaced; so are those in the fixes.
    """
    line = [redact_word(word) for word in words]
    changed: set[str] = set()
    for before, after in (problem.fix for problem in problems if problem.fix is not None):
        if isinstance(before, tuple) or isinstance(after, tuple):
            if _replace(line, _words(before), _words(after)):
                changed.update(_words(before))
            continue
        key = _key(before)
        if key in changed:  # by another problem of the same key
            continue
        changed.add(key)
        place = _find(line, before)
        if place is not None:
            name, equals, value = line[place].partition("=")
            line[place] = after
            if equals and value == before:
                line[place] = f"{name}={after}"
        elif "=" not in before and after.startswith(f"{before}=") and _TAKES_OVERRIDES & {*line}:
            line.append(after)
        else:
            changed.discard(key)
    if not changed:
        return None
    return f"rlctl {shlex.join(line)}"


def _words(words: Words) -> list[str]:
    if isinstance(words, str):
        return [words]
    return list(words)


def _replace(line: list[str], given: list[str], instead: list[str]) -> bool:
    """Replace the first occurrence of words in a row; return whether there is one."""
    for start in range(len(line) - len(given) + 1):
        if line[start : start + len(given)] == given:
            line[start : start + len(given)] = instead
            return True
    return False


def _find(line: Sequence[str], given: str) -> int | None:
    """Return the index of the last word that is `given`, or has this key or value."""
    for index, word in reversed([*enumerate(line)]):
        if given in (word, _key(word)) or ("=" in word and word.partition("=")[2] == given):
            return index
    return None


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")
