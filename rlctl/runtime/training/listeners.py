"""Listeners: plug-ins that follow a run; only a run that has one loads this module.

A listener is on if the key `trainer.<its name>` has a value, or if `trainer.listeners` names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from rlctl import plugins
from rlctl.recipes import schema
from rlctl.runs.record import Last, recorded_end
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.base.roles import Roles

LOG = logging.getLogger(__name__)


class Listener:
    """Base class of listeners. A listener with settings, `Params`, gets them as `params`."""

    def __init__(self, run: RunDir, config: schema.Config) -> None:
        self.run = run
        self.config = config

    @classmethod
    def check(cls, config: schema.Config, run: Path | None, sources: Collection[str]) -> None:
        """Raise the errors of a configuration before anything starts.

        `run` is the folder of a resumed run; `sources` are those of the validation rows.
        """

    def on_step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Return why the run ends after this step, or None if it continues.

        Called when the step's metrics are recorded, and for the last step of a resumed run
        without metrics.
        """

    def wrap(self, roles: Roles) -> Roles:
        """Return the roles that the algorithm learns with, such as `roles` with a wrapped actor."""
        return roles

    def on_checkpoint(self) -> None:
        """Handle a complete checkpoint; called in a separate thread."""

    def close(self) -> None:
        """Handle the end of the run, whose record is closed."""


class Listeners:
    """All listeners of a run. One that raises an error is dropped with a warning."""

    def __init__(self, run: RunDir, config: schema.Config) -> None:
        self.run = run
        with recorded_end(partial(_finish_failed, run)):
            self.on = {name: _load(name, config)(run, config) for name in config.trainer.listening}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._call("close")

    def on_checkpoint(self) -> None:
        """Report a complete checkpoint."""
        self._call("on_checkpoint")

    def wrap(self, roles: Roles) -> Roles:
        """Return the roles that the algorithm learns with."""
        for listener in self.on.values():
            roles = getattr(listener, "wrap", lambda given: given)(roles)
        return roles

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Report the metrics of a step; return True if the run ends with it."""
        reasons = self._call("on_step", step, metrics)
        for name, reason in reasons.items():
            LOG.info("step %d: the run ends, because %s", step, reason)
            with suppress(OSError):  # the disk may be full
                self.run.event("ended_early", step=step, by=name, reason=reason)
        return bool(reasons)

    def _call(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of the listeners that have it; return the results that say something."""
        results: dict[str, Any] = {}
        for name, listener in list(self.on.items()):
            if (call := getattr(listener, method, None)) is None:
                continue
            try:
                results[name] = call(*arguments)
            except Exception as error:
                del self.on[name]
                LOG.warning("the listener %s is off: %s: %s", name, type(error).__name__, error)
                with suppress(OSError):
                    self.run.event("listener_off", name=name, why=str(error))
        return {name: result for name, result in results.items() if result}


def _finish_failed(run: RunDir, state: Last, code: int, error: Exception | None) -> None:
    if error is not None:
        run.finish(state, code, error)


def check_listener(
    name: str, config: schema.Config, run: Path | None, sources: Collection[str]
) -> None:
    """Raise the errors of a listener's settings; see `Listener.check`."""
    listener = _load(name, config)
    if (check := getattr(getattr(listener, "func", listener), "check", None)) is not None:
        check(config, run, sources)


def _load(name: str, config: schema.Config) -> Callable[[RunDir, schema.Config], Listener]:
    """Return the plug-in, with its settings."""
    short = name.rpartition(":")[2]
    values = config.trainer.listener_params.get(short, {})
    return plugins.load_with_params("listeners", name, values, f"trainer.listener_params.{short}")
