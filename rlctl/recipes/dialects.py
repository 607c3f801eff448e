"""Dialects: keys, words and configurations of other libraries that recipes and commands may use.

A plug-in of the kind `dialects` is a class that each composition imports. It imports its tables
where it translates, so a recipe with keys of rlctl alone loads none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rlctl import plugins
from rlctl.errors import ConfigError
from rlctl.recipes.keys import known_key, without_empty_text

if TYPE_CHECKING:
    from rlctl.recipes.dialect_protocol import Dialect, Translator

Kind = Literal["", "renamed", "dropped", "unused", "refused"]


@dataclass(frozen=True, slots=True)
class Translation:
    """Present form of one setting: its `key` (None = not used) and `value`.

    `kind` says what became of it (empty: nothing) and `text` why: a line for the user, a reason, or
    the message of a refusal with its `hint`. `flat` marks a setting of a plug-in that was given
    under a key of the dialect.
    """

    key: str | None
    value: Any = None
    kind: Kind = ""
    text: str = ""
    hint: str | None = None
    flat: bool = False


@dataclass(frozen=True, slots=True)
class Foreign:
    """Setting that was given in a dialect: `key`=`value` at `where`."""

    key: str
    value: Any
    where: str
    kind: Kind
    text: str


def dialects() -> list[Dialect]:
    """Return the installed dialects."""
    return [plugins.load("dialects", name)() for name in plugins.names("dialects")]


def present_name(key: str) -> str:
    """Return the key under rlctl's name; one that no dialect knows stays."""
    names = (dialect.translate(key, None).key for dialect in _readers(dialects(), key, None))
    return next((name for name in names if name not in (None, key)), key)


def named_recipe(verb: str, folder: str | None, name: str | None) -> tuple[str, list[str]]:
    """Return recipe and overrides that `--config-path` and `--config-name` select."""
    for dialect in dialects():
        return dialect.recipe(verb, folder, name)
    hint = "give the file with --recipe"
    raise ConfigError("no dialect that reads --config-name is installed", hint=hint)


@dataclass
class Translators:
    """Translators of one configuration that includes the shipped `bases`, made when needed."""

    bases: Collection[str] = ()
    _dialects: list[Dialect] = field(default_factory=dialects)
    _made: dict[int, Translator] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Translator]:
        return iter(self._made.values())

    def translate(self, key: str, value: Any, where: str) -> Translation:
        """Return a setting under its present name; record it if it is of a dialect."""
        for dialect in _readers(self._dialects, key, value):
            if id(dialect) not in self._made:
                self._made[id(dialect)] = dialect.translator(self.bases)
            result = self._made[id(dialect)].translate(key, value, where)
            if result.kind:
                return result
        return Translation(key, without_empty_text(key, value))

    def add_unused(self, key: str, value: Any, where: str, reason: str) -> None:
        """Record that a translated setting has no effect."""
        for translator in self:
            if any(setting.key == key for setting in translator.settings()):
                translator.add_unused(key, value, where, reason)

    def settings(self) -> list[Foreign]:
        """Return the settings that were given in dialects."""
        return [setting for translator in self for setting in translator.settings()]


def _readers(known: Sequence[Dialect], key: str, value: Any) -> Iterator[Dialect]:
    """Yield the dialects that a setting may be of: all of them if the key is unknown."""
    is_known = known_key(key) is not None
    return (dialect for dialect in known if not is_known or dialect.reads(key, value))
