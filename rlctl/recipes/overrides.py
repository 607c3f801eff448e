"""Overrides of the command line, parsed by Hydra's grammar into settings and choices of parts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException

from rlctl.errors import ConfigError, Problem
from rlctl.recipes.dialects import dialects
from rlctl.recipes.keys import known_key, schema_keys
from rlctl.recipes.layers import Setting
from rlctl.recipes.search_path import resolve_folder
from rlctl.recipes.yaml_repository import YamlRepository
from rlctl.redaction import redact_word
from rlctl.suggest import closest, did_you_mean, nearest, override_fix, quoted

_KEY = re.compile(r"[~+]{0,2}[A-Za-z_$][\w/@.:$-]*")


@dataclass
class Choices:
    """Parsed overrides: settings of keys, choices of parts for Hydra, and the problems found."""

    settings: list[Setting] = field(default_factory=list)
    parts: list[Override] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add_problem(
        self,
        message: str,
        override: Override,
        hint: str | None,
        fix: tuple[str, str] | None = None,
    ) -> None:
        """Add a problem of one override."""
        self.problems.append(Problem(message, f"override {override.input_line}", hint, fix))


def parse(overrides: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    """Parse each override by itself, so that a problem names the override."""
    parser = OverridesParser.create()
    parsed: list[Override] = []
    problems: list[Problem] = []
    given = [text for text in overrides if text.strip()]  # shell scripts leave empty arguments
    while given:
        text = given.pop(0)
        if (apart := _split_by_spaces(text, given)) is not None:
            problems.append(apart)
            continue
        key, equals, value = text.partition("=")
        where = f"override {redact_word(text)}"
        shown = redact_word(text).partition("=")[2]  # quoting would hide a secret from `Problem`
        if not _KEY.fullmatch(key):
            hint = "write key=VALUE, such as trainer.seed=2"
            problems.append(Problem(f"{key!r} is not a key", where, hint))
            continue
        if "" in key.lstrip("~+").split("@")[0].split("."):
            hint = "remove the extra dot; write key=VALUE, such as trainer.seed=2"
            problems.append(Problem(f"{key!r} is not a key: a part of it is empty", where, hint))
            continue
        if not equals and not text.startswith("~"):
            problems.append(_no_value(text, where))
            continue
        override = _parsed(parser, text)
        if override is None:
            from rlctl.recipes.repairs import repaired, unparsable

            other_forms = (_parsed(parser, other) for other in repaired(text))
            override = next(filter(None, other_forms), None)
            if override is None:
                problems.append(unparsable(text, partial(_parsed, parser)))
                continue
        if override.is_sweep_override():
            hint = "use `rlctl sweep` to try several values"
            fix = None
            if "(" not in value:
                single = quoted(key, shown)
                listed = f"[{shown}]"
                in_shell = shlex.quote(f"{key}={listed}")
                hint = f"a list is {in_shell}; one value with a comma is {single}; {hint}"
                known = known_key(key.lstrip("+"))
                if known is not None and "list" in known.type:
                    fix = override_fix(where, value=listed)
            problems.append(Problem(f"{redact_word(text)} has several values", where, hint, fix))
            continue
        parsed.append(override)
    return parsed, problems


def _parsed(parser: OverridesParser, text: str) -> Override | None:
    """Parse an override, or return None if it is not of Hydra's grammar."""
    try:
        return parser.parse_overrides([text])[0]
    except HydraException:
        return None


def _split_by_spaces(text: str, following: list[str]) -> Problem | None:
    """Return the problem of a key whose value is another word: `key = 1`, `key 1`, `key: 1`.

    Removes the words that belong to it from `following`.
    """
    key = text.rstrip("=:")
    values = following[:2]
    if "=" in key or known_key(key) is None or not values:
        return None
    if values[0] in ("=", ":"):
        values = values[:2]
    elif _KEY.fullmatch(values[0].partition("=")[0]) and (
        "=" in values[0] or known_key(values[0]) is not None
    ):
        return None
    else:
        values = values[:1]
    del following[: len(values)]
    joined = f"{key}={values[-1]}"
    shown = redact_word(joined)
    return Problem(
        f"an override is one word: {shown}",
        f"override {redact_word(text)}",
        "write no spaces around the equals sign",
        ((text, *values), joined),
    )


def _no_value(text: str, where: str) -> Problem:
    """Return the problem of a word without an equals sign: a recipe, `key:value`, or a bare key."""
    message = f"{text!r} is not key=value"
    if Path(text).suffix in (".yaml", ".yml"):
        return Problem(message, where, f"a recipe is --recipe {text}", (text, ("--recipe", text)))
    key, colon, value = text.partition(":")
    if colon and value and known_key(key) is not None:
        return Problem(message, where, f"write {key}={value}", (text, f"{key}={value}"))
    return Problem(message, where, f"write {text}=VALUE")


def search_path_override(parsed: list[Override]) -> list[Path]:
    """Return the folders of `hydra.searchpath=[…]`, relative to the current folder."""
    for override in parsed:
        if override.key_or_group == "hydra.searchpath":
            entries = plain(override.value())
            where = f"override {override.input_line}"
            if not isinstance(entries, list):
                raise ConfigError("hydra.searchpath must be a list of folders", where=where)
            return [resolve_folder(str(entry), Path.cwd(), where) for entry in entries]
    return []


def sort_overrides(parsed: list[Override], repository: YamlRepository) -> Choices:
    """Split overrides into settings of keys and choices of parts (`optim@critic.optim=adamw`)."""
    choices = Choices()
    for override in parsed:
        name = override.key_or_group
        value = override.value()
        if name.split(".")[0] == "hydra":
            if name != "hydra.searchpath":
                choices.add_problem(
                    f"{name} is not supported", override, "only hydra.searchpath is read"
                )
        elif _is_setting(override, repository):
            if override.package is None:
                text = override.input_line or ""
                choices.settings.append(Setting(name, plain(value), text, override.is_delete()))
            else:
                groups = ", ".join(repository.get_group_options("", ObjectType.GROUP))
                choices.add_problem(
                    f"group {name} does not exist", override, f"existing groups: {groups}"
                )
        elif override.is_delete():
            _add_removal(override, repository, choices)
        elif str(value) not in repository.get_group_options(name):
            options = ", ".join(repository.get_group_options(name))
            hint = f"parts in {name}/: {options}"
            first = next((key for key in schema_keys() if key.startswith(f"{name}.")), None)
            if first is not None:
                hint += f"; to set a key of the section {name}: {first}=…"
            near = closest(str(value), repository.get_group_options(name))
            fix = override_fix(f"override {override.input_line}", value=near)
            choices.add_problem(f"part {name}/{value} does not exist", override, hint, fix)
        else:
            choices.parts.append(override)
    _drop_unknown_groups(choices, repository)
    return choices


def _is_setting(override: Override, repository: YamlRepository) -> bool:
    """Return True for an override of a key, False for a choice of a part."""
    return (
        isinstance(override.value(), dict)
        or not repository.group_exists(override.key_or_group)
        or (override.package is None and _is_key(override.key_or_group, override.value()))
    )


def _is_key(name: str, value: Any) -> bool:
    """Return True for a dotted key, and for a part that only a dialect has."""
    return "." in name or any(dialect.has_part(name, value) for dialect in dialects())


def _add_removal(override: Override, repository: YamlRepository, choices: Choices) -> None:
    """Add the removal of a part, or a problem if the schema requires its section."""
    section = override.package or override.key_or_group
    if known_key(section) is None:
        choices.parts.append(override)
        return
    options = "|".join(repository.get_group_options(override.key_or_group))
    group = override.get_key_element().lstrip("~")
    choices.add_problem(
        f"{section} cannot be removed", override, f"choose another part: {group}={options}"
    )


def _drop_unknown_groups(choices: Choices, repository: YamlRepository) -> None:
    """Replace choices of parts that the recipe does not have by problems."""
    if not choices.parts:
        return
    known = repository.known_choices()
    kept: list[Override] = []
    for override in choices.parts:
        name = override.get_key_element().lstrip("+~")
        if override.is_add() or name in known:
            kept.append(override)
            continue
        same = [choice for choice in known if choice.split("@")[0] == override.key_or_group]
        hint = did_you_mean(name, known)
        if same:
            hint = f"write {' or '.join(f'{choice}={override.value()}' for choice in same)}"
        near = next(iter([*sorted(same), *nearest(name, known)]), None)
        fix = override_fix(f"override {override.input_line}", key=near)
        choices.add_problem(f"the recipe has no part at {name}", override, hint, fix)
    choices.parts = kept


def plain(value: Any) -> Any:
    """Convert Hydra's parsed value to plain data."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(plain(k)): plain(v) for k, v in value.items()}
    return value
