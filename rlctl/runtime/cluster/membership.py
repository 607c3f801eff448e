"""Changes of a pool's engines while a run uses them, as `rlctl engines` asks for.

A thread reads the requests, reserves devices, starts engines and writes the state of the pool. The
group adds and removes engines between its calls, so a request never delays a step.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from rlctl.errors import RlctlError
from rlctl.runs.engine_requests import (
    EngineRequest,
    EngineStatus,
    PoolStatus,
    Progress,
    RequestStatus,
    State,
    check_drain,
    received,
)
from rlctl.runtime.cluster.engine_processes import EngineProcesses
from rlctl.runtime.cluster.pool_engine import Engine
from rlctl.runtime.cluster.resources import free_of
from rlctl.runtime.workers.rollout import RolloutSpec
from rlctl.tracking.tracker import Event

_LOG = logging.getLogger(__name__)

_POLL_S = 1.0
_CLOSE_S = 5.0
_NUM_SHOWN = 20  # requests in the file


@dataclass(eq=False)
class _Change:
    """A request under way: devices to wait for, and the engines that join or leave."""

    request: EngineRequest
    deadline: float
    groups: list[PlacementGroup] = field(default_factory=list)  # not reserved yet
    engines: list[Engine] = field(default_factory=list)
    progress: Progress = "waiting"
    message: str = ""


class Membership:
    """Requests to one pool, in the attempt folder `folder`, until `close`."""

    def __init__(
        self, pool: EngineProcesses, spec: RolloutSpec, folder: Path, event: Event
    ) -> None:
        self.pool = pool
        self.spec = spec
        self.folder = folder
        self.event = event
        self._changes: list[_Change] = []
        self._written: PoolStatus | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="engine-requests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and give up devices that were not reserved yet."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def advance(self) -> None:
        """Read new requests, advance those under way and write the state of the pool."""
        for request in received(self.folder):
            change = _Change(request, time.monotonic() + self.pool.spec.start_timeout_s)
            self._changes.append(change)
            _LOG.info("rlctl engines %s: %s", request.action, _wanted(request))
            self.event("engine_request", **vars(request))
            self._begin(change)
        for change in self._changes:
            if change.progress == "waiting":
                self._advance(change)
        self._write()

    def _serve(self) -> None:
        failure = ""
        while not self._closing.is_set():
            try:
                self.advance()
            except (OSError, RayError, ValueError, TypeError) as error:  # of disk, Ray, or request
                if str(error) != failure:  # a full disk stays full
                    failure = str(error)
                    _LOG.warning("rlctl engines does not work: %s", failure)
            self._closing.wait(_POLL_S)
        for change in self._changes:
            for group in change.groups:
                remove_placement_group(group)

    def _begin(self, change: _Change) -> None:
        request = change.request
        if request.urls and "url" not in self.spec.sampling.rollout.engine_kwargs:
            self._fail(change, "the engines of this run are no clients of servers")
            return
        if request.action == "add":
            try:
                while len(change.groups) < request.count:
                    change.groups.append(self.pool.request_devices())
            except (RayError, ValueError, TypeError) as error:  # of Ray
                self._fail(change, f"Ray did not accept the request: {error}")
            return
        try:
            check_drain(self._status(), request)
        except RlctlError as error:
            self._fail(change, error.problems[0].message)
            return
        members = [engine for engine in self._engines() if not engine.draining]
        chosen = [engine for engine in self._engines() if engine.number in request.engines]
        change.engines = chosen or members[len(members) - request.count :]
        for engine in change.engines:
            engine.draining = True

    def _advance(self, change: _Change) -> None:
        request = change.request
        if request.action == "drain":
            left = [engine for engine in change.engines if engine in self._engines()]
            if not left:
                for engine in change.engines:
                    self.event(
                        "engine_drained", engine=engine.number, responses=engine.num_responses
                    )
                self._finish(change, "drained")
            return
        for group in [pending for pending in change.groups if _is_reserved(pending)]:
            change.groups.remove(group)
            url = next(iter(request.urls[len(change.engines) :]), None)
            change.engines.append(self.pool.join(group, self.spec, url))
        failed = [engine for engine in change.engines if engine.failure is not None]
        if failed:
            self._fail(change, f"engine {failed[0].number} did not start: {failed[0].failure}")
        elif change.groups and time.monotonic() > change.deadline:
            spec = self.pool.spec
            self._fail(
                change,
                f"{len(change.engines)} of {request.count} engines started: "
                f"{len(change.groups)} × {self.pool.share} were not free within "
                f"{spec.start_timeout_s:g} s (trainer.timeouts.worker_start_s); "
                f"free: {free_of(spec.share)}",
            )
        elif not change.groups and not any(engine.joining for engine in change.engines):
            self._finish(change, "added")

    def _finish(self, change: _Change, done: str) -> None:
        change.progress = "done"
        change.message = f"{done} {_named(change.engines)}"

    def _fail(self, change: _Change, reason: str) -> None:
        for group in change.groups:
            remove_placement_group(group)
        change.groups = []
        change.progress = "failed"
        change.message = reason
        self.event("engine_request_failed", id=change.request.id, reason=reason)
        _LOG.warning("rlctl engines %s: %s", change.request.action, reason)

    def _engines(self) -> list[Engine]:
        """Return the engines, also those that the group has not added yet."""
        engines = {*list(self.pool.joined), *list(self.pool.engines)}
        return sorted(engines, key=lambda engine: engine.number)

    def _status(self) -> PoolStatus:
        engines = [
            EngineStatus(
                engine.number,
                engine.node,
                _state(engine),
                self.pool.share,
                engine.num_responses,
                round(engine.num_tokens / engine.busy_s, 1) if engine.busy_s else None,
            )
            for engine in self._engines()
        ]
        requests = [
            RequestStatus(change.request.id, change.progress, change.message)
            for change in self._changes[-_NUM_SHOWN:]
        ]
        return PoolStatus(engines, requests)

    def _write(self) -> None:
        status = self._status()
        if status != self._written:
            status.write(self.folder)
            self._written = status


def _state(engine: Engine) -> State:
    if engine.draining:
        return "draining"
    if engine.handle is None:
        return "lost"
    if engine.ready:
        return "serving"
    return "starting"


def _is_reserved(group: PlacementGroup) -> bool:
    return placement_group_table(group)["state"] == "CREATED"


def _wanted(request: EngineRequest) -> str:
    return ", ".join(map(str, request.engines)) or str(request.count)


def _named(engines: list[Engine]) -> str:
    plural = "s" if len(engines) > 1 else ""
    return f"engine{plural} {', '.join(str(engine.number) for engine in engines)}"
