"""Arguments of the Python API as overrides in Hydra's grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlctl import plugins
from rlctl.errors import UsageError
from rlctl.recipes.keys import schema_keys
from rlctl.suggest import hydra_text

_WORD = re.compile(r"(?!(?:true|false|null|inf|nan)$)[A-Za-z_][\w-]*", re.IGNORECASE)


def override_texts(
    overrides: Sequence[str] | Mapping[str, Any],
    name: str | None = None,
    logger: str | Sequence[str] | None = None,
    reward: Callable[..., Any] | None = None,
) -> list[str]:
    """Return `overrides`, texts or values by key, and those of the other arguments.

    A mapping may have sections inside. Raises UsageError for a value that has no such text, and for
    a function that reward processes cannot import.
    """
    if isinstance(overrides, Mapping):
        overrides = list(_settings(overrides, ""))
    given = list(overrides)
    if name is not None:
        given.append(hydra_text("trainer.experiment_name", name))
    if logger is not None:
        names = [logger] if isinstance(logger, str) else logger
        given.append(f"trainer.logger={_text(['console', *names])}")
    if reward is not None:
        given += plugins.load("python_api", "reward")(reward, given)
    return given


def _settings(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        known = schema_keys().get(key)
        if isinstance(value, Mapping) and known is not None and known.kind == "section":
            yield from _settings(value, f"{key}.")
        else:
            yield f"{key}={_text(value, key)}"


def _text(value: Any, key: str = "") -> str:
    """Return a value in Hydra's grammar."""
    if hasattr(value, "tolist"):  # numpy's and torch's
        value = value.tolist()
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case Mapping():
            pairs = (f"{name}: {_text(inner, key)}" for name, inner in value.items())
            return f"{{{', '.join(pairs)}}}"
        case list() | tuple():
            return f"[{','.join(_text(inner, key) for inner in value)}]"
    if not (isinstance(value, str) or hasattr(value, "__fspath__")):
        raise UsageError(
            f"a value of type {type(value).__name__} is no setting", where=key, hint="such as 1e-6"
        )
    text = str(value)
    return text if _WORD.fullmatch(text) else hydra_text("", text)[1:]
