"""Protocols of dialects: the class that a plug-in of the kind is, and its translator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from rlctl.errors import Problem
from rlctl.recipes.dialects import Foreign, Translation


class Translator(Protocol):
    """Settings of one configuration in a dialect.

    `paths` are the parts of dotted paths that are appended to the values of keys.
    """

    paths: dict[str, Any]

    def translate(self, key: str, value: Any, where: str) -> Translation:
        """Translate one setting; record it if its name or value is the dialect's."""
        ...

    def combined(
        self, look: Callable[[str], Any], is_set: Callable[[str], bool]
    ) -> dict[str, tuple[Any, str]]:
        """Return values and places by key of the settings that are translated together."""
        ...

    def add_unused(self, key: str, value: Any, where: str, reason: str) -> None:
        """Record a setting that has no effect."""
        ...

    def problems(self, container: dict[str, Any]) -> Sequence[Problem]:
        """Return the problems of refused settings, for resolved values."""
        ...

    def notices(self) -> Sequence[str]:
        """Return lines for the user about accepted settings."""
        ...

    def settings(self) -> Sequence[Foreign]:
        """Return the recorded settings."""
        ...


class Dialect(Protocol):
    """Library whose keys, words and configurations are read."""

    def reads(self, key: str, value: Any) -> bool:
        """Return True if `value` may be a word of the library for a key of rlctl."""
        ...

    def translate(self, key: str, value: Any) -> Translation:
        """Return a setting under its present name."""
        ...

    def translator(self, bases: Collection[str]) -> Translator:
        """Return the translator of a configuration that includes the shipped `bases`."""
        ...

    def has_part(self, group: str, name: Any) -> bool:
        """Return True for a part that only the library has: a setting, which is translated."""
        ...

    def is_library(self, folder: str) -> bool:
        """Return True for the folder or package of the library's configurations."""
        ...

    def check_part(self, name: str, where: str) -> None:
        """Raise ConfigError if a part that does not exist needs a feature that rlctl lacks."""
        ...

    def recipe(self, verb: str, folder: str | None, name: str | None) -> tuple[str, list[str]]:
        """Return the recipe and overrides of `--config-path=folder --config-name=name`."""
        ...

    def explain(self, name: str) -> tuple[str, str, Mapping[str, str]] | None:
        """Return kind, explanation and facts by label of a key of the library, or None."""
        ...

    def aliases(self, key: str) -> Mapping[str, str]:
        """Return the library's names of a key of rlctl, by the label of the library."""
        ...
