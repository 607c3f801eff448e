"""Text of errors, and JSON form of those that a worker raises while it loads a user's code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl.errors import ConfigError, MissingExtraError, Problem, ResourceError, RlctlError

_ERRORS = {each.__name__: each for each in (ConfigError, MissingExtraError, ResourceError)}


def error_text(error: BaseException) -> str:
    """Return type and text of `error`; of a group, those of its causes."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(error_text(each) for each in error.exceptions)
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def error_to_json(error: RlctlError) -> list[Any]:
    """Return the class name and the problems of `error`."""
    problems = [[each.message, each.where, each.hint] for each in error.problems]
    return [type(error).__name__, problems]


def error_from_json(data: Sequence[Any]) -> RlctlError:
    """Return the error of `error_to_json`; a ConfigError if its class is another one."""
    kind, problems = data
    return _ERRORS.get(kind, ConfigError)(*(Problem(*each) for each in problems))
