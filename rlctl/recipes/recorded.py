"""Configuration as records and trackers show it: without secrets.

A value that was read from the environment (`${oc.env:NAME}`) is recorded as written and read again
when the run resumes. A literal secret is recorded as `<secret>` and must be given again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from rlctl.errors import Problem
from rlctl.recipes.layers import Origin, leaves
from rlctl.recipes.schema import Config
from rlctl.redaction import SECRET, is_secret_key, redact, redact_value, redact_word, register

_ENVIRONMENT = "oc.env"
_PREFIX = "override "
_TAG_LENGTH = 4  # hexadecimal digits: too few to find a value by trying all candidates


def recorded(container: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resolved `container` without secrets; `written` has its values as written.

    Registers the secrets, so that messages do not show them either.
    """
    shown = _shown(container, written, "", set(_from_environment(leaves(dict(written)))))
    assert isinstance(shown, dict)
    return shown


def _shown(value: Any, written: Any, key: str, environment: set[str]) -> Any:
    """Return the recorded form of `value`, found at `key`, whose form as written is `written`."""
    if key in environment:
        shown = redact_value(written, key)  # it may contain a literal, as a variable's default
        register(value, key, shown)
        return shown
    if isinstance(value, Mapping):
        sections: Mapping[str, Any] = {}
        if isinstance(written, Mapping):
            sections = written
        prefix = f"{key}.".lstrip(".")
        return {
            name: _shown(inner, sections.get(name), f"{prefix}{name}", environment)
            for name, inner in value.items()
        }
    shown = redact_value(value, key)
    _register_hidden(value, shown, key)
    return shown


def environment_tags(
    container: Mapping[str, Any], recorded: Mapping[str, Any], salt: str
) -> dict[str, str]:
    """Return a short hash of each value that was read from the environment, by key.

    A changed value has another tag, with a chance of 1 in 65,536 to have the same. Leaves out keys
    and variables with the name of a secret.
    """
    values = leaves(dict(container))
    return {
        key: hashlib.sha256(f"{salt}{values.get(key)!r}".encode()).hexdigest()[:_TAG_LENGTH]
        for key, text in leaves(dict(recorded)).items()
        if "${" in str(text) and not any(map(is_secret_key, (key, *_words(str(text)))))
    }


def recorded_origins(origins: Mapping[str, list[Origin]]) -> dict[str, list[Origin]]:
    """Return the origins without secrets."""
    return {
        key: [
            dataclasses.replace(
                setting, value=redact_value(setting.value, key), where=without_secret(setting.where)
            )
            for setting in chain
        ]
        for key, chain in origins.items()
    }


def without_secret(where: str) -> str:
    """Return the place of a setting without secrets: a file and line, or an override."""
    if where.startswith(_PREFIX):
        return _PREFIX + redact_word(where.removeprefix(_PREFIX))
    return redact(where)


def missing_secrets(config: Config) -> list[Problem]:
    """Return a problem for each value of an earlier run that was a secret and is not stored."""
    return [
        Problem(
            f"{key} is a secret, which the earlier run did not store",
            hint=f"give it again: {key}=…; a value such as {key}='${{oc.env:NAME}}' is read from "
            "the environment each time",
        )
        for key, value in leaves(config.model_dump()).items()
        if SECRET in str(value)
    ]


def _from_environment(written: Mapping[str, Any]) -> list[str]:
    """Return the keys whose value depends on an environment variable, directly or by reference."""
    texts = {key: str(value) for key, value in written.items() if "${" in str(value)}
    found = [key for key, text in texts.items() if _ENVIRONMENT in text]
    for key in found:  # grows
        for other, text in texts.items():
            if other not in found and any(_names(word, key) for word in _words(text)):
                found.append(other)
    return found


def _words(text: str) -> set[str]:
    return {word.strip(".") for word in re.findall(r"[\w.]+", text)} - {""}


def _names(word: str, key: str) -> bool:
    """Return True if a word of an interpolation can name `key` or a section that contains it."""
    return f".{word}." in f".{key}." and not word.isdigit()


def _register_hidden(value: Any, shown: Any, key: str) -> None:
    """Register the parts of `value` that `shown` does not have."""
    if isinstance(value, Mapping) and isinstance(shown, Mapping):
        for (name, inner), other in zip(value.items(), shown.values(), strict=True):
            _register_hidden(inner, other, f"{key}.{name}")
    elif isinstance(value, list) and isinstance(shown, list):
        for inner, other in zip(value, shown, strict=True):
            _register_hidden(inner, other, key)
    elif shown == SECRET:
        register(value, "secret")
    elif isinstance(value, str) and SECRET in str(shown):
        for part in _hidden_parts(value, str(shown)):
            register(part, "secret")


def _hidden_parts(value: str, shown: str) -> list[str]:
    """Return the parts of a text that were replaced, such as the user and password of a URL."""
    pattern = "(.+)".join(re.escape(part) for part in shown.split(SECRET))
    match = re.fullmatch(pattern, value, re.DOTALL)
    if match is None:
        return []
    return [piece for part in match.groups() for piece in (part, *part.split(":"))]
