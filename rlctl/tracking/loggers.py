"""Installed loggers: building one as a tracker, and its state on this machine.

Servers are tested quickly, because SDKs of trackers retry for minutes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rlctl.errors import ConfigError, MissingExtraError, RlctlError
from rlctl.plugins import load, load_with_params, packages
from rlctl.tracking.tracker import Preflight, Tracker


def make_tracker(name: str, params: Mapping[str, Mapping[str, Any]]) -> Tracker:
    """Build a tracker with its settings, `params[name]`."""
    settings = params.get(name, {})
    return load_with_params("loggers", name, settings, f"trainer.tracking.params.{name}")()


def preflight(name: str, mode: str | None) -> str:
    """Return the mode that a logger would use, in a few words; empty for a logger without modes.

    Raises the errors of `rlctl.plugins.load` and of the logger's own preflight, and ConfigError if
    `mode` is given for a logger without modes.
    """
    tracker = load("loggers", name)
    if isinstance(tracker, Preflight):
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
        state = "not installed" if isinstance(error, MissingExtraError) else "would not start"
        return LoggerState(name, package, state, problem.message, problem.hint)


TIMEOUT_S = 2.0


def reachable(url: str) -> bool:
    """Return True if the server of `url`, or its proxy, accepts a connection in `TIMEOUT_S`."""
    target = urlsplit(url)
    proxy = getproxies().get(target.scheme)
    if proxy and not proxy_bypass(target.hostname or ""):
        target = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    address = target.hostname or "", target.port or {"http": 80}.get(target.scheme, 443)
    connected = threading.Event()

    def connect() -> None:
        with suppress(OSError), socket.create_connection(address, TIMEOUT_S):
            connected.set()

    # Name resolution ignores the socket's timeout, so another thread does it.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    return connected.is_set()
