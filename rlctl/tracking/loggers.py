"""Installed loggers: building one as a tracker, and its state on this machine."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlctl.errors import ConfigError, MissingExtraError, RlctlError
from rlctl.plugins import load, load_with_params, packages
from rlctl.tracking.tracker import Preflight, Tracker


def make_tracker(name: str, params: Mapping[str, Mapping[str, Any]]) -> Tracker:
    """Build a tracker with its settings in `params`."""
    written, settings = settings_of(name, params)
    return load_with_params("loggers", name, settings, f"trainer.tracking.params.{written}")()


def settings_of(
    name: str, params: Mapping[str, Mapping[str, Any]]
) -> tuple[str, Mapping[str, Any]]:
    """Return the key in `params` of a logger, and its settings; those of `module:Name` may be
    under `Name`.
    """
    if name in params:
        return name, params[name]
    short = name.rpartition(":")[2]
    return short, params.get(short, {})


def preflight(
    name: str, mode: str | None, params: Mapping[str, Mapping[str, Any]] | None = None
) -> str:
    """Return the mode that a logger would use, in a few words; empty for a logger without modes.

    `params` are the settings of all loggers. Raises the errors of `rlctl.plugins.load` and of the
    logger's preflight, and ConfigError if `mode` is given for a logger without modes.
    """
    tracker = load("loggers", name)
    if isinstance(tracker, Preflight):
        if not inspect.ismethod(tracker.preflight):  # its settings decide
            return make_tracker(name, params or {}).preflight(mode)  # pyright: ignore[reportAttributeAccessIssue]
        return tracker.preflight(mode)
    if mode is not None:
        raise ConfigError(
            f"logger {name} has no modes",
            where=f"trainer.tracking.modes.{name}={mode}",
            hint="remove the key",
        )
    return ""


@dataclass(frozen=True)
class LoggerState:
    """A logger, the package that provides it, and its state here.

    `message` is its mode or its problem, `remedy` a fix for the problem.
    """

    name: str
    package: str
    state: Literal["ready", "not installed", "would not start"]
    message: str
    remedy: str | None = None


def examine() -> list[LoggerState]:
    """Return the state of every logger that an installed package provides, by name."""
    return [_examine(name, package) for name, package in packages("loggers").items()]


def _examine(name: str, package: str) -> LoggerState:
    try:
        return LoggerState(name, package, "ready", preflight(name, None))
    except RlctlError as error:
        problem = error.problems[0]
        state = "would not start"
        if isinstance(error, MissingExtraError):
            state = "not installed"
        return LoggerState(name, package, state, problem.message, problem.help)
