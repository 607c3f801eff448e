"""Rollout engines of a running run: their state, and requests to change their number.

Both are files of the current attempt, so that they work from any host that shares the disk, and a
resumed run starts with the number of its configuration.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlctl.errors import ConflictError, NotFoundError, RlctlError, UsageError
from rlctl.files import read_record, replacing
from rlctl.runs.logs import POLL_S, reread
from rlctl.runs.run import ACTIVE, Run
from rlctl.runs.subfolders import own_subfolder

STATUS_FILE = "engines.json"
REQUESTS = "engine_requests"  # folder

State = Literal["serving", "starting", "draining", "lost"]
Progress = Literal["waiting", "done", "failed"]


@dataclass(frozen=True)
class EngineStatus:
    """Engine of a run. `tokens_per_s` is None before its first response."""

    engine: int
    node: str
    state: State
    devices: Mapping[str, float]
    responses: int
    tokens_per_s: float | None


@dataclass(frozen=True)
class EngineRequest:
    """Request to start `count` engines, or to drain `engines` (else any `count`).

    With `urls`, the new engines are clients of these servers.
    """

    action: Literal["add", "drain"]
    count: int = 0
    engines: Sequence[int] = ()
    urls: Sequence[str] = ()
    # No other request has the same; ids sort by time.
    id: str = field(default_factory=lambda: f"{time.time_ns():020d}-{os.getpid()}")


@dataclass(frozen=True)
class RequestStatus:
    """Progress of a request; `message` says why it failed, or what was done."""

    id: str
    progress: Progress
    message: str


@dataclass(frozen=True)
class PoolStatus:
    """Engines of a run, and the latest requests."""

    engines: Sequence[EngineStatus]
    requests: Sequence[RequestStatus]

    def write(self, folder: Path) -> None:
        """Replace the file in the attempt `folder`, without waiting for the disk."""
        with replacing(folder / STATUS_FILE, sync=False) as aside:
            aside.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> PoolStatus | None:
        """Read the file in the attempt `folder`; None if there is none."""
        try:
            data: dict[str, Any] = json.loads(read_record(folder / STATUS_FILE))
        except FileNotFoundError:
            return None
        return cls(
            [EngineStatus(**engine) for engine in data["engines"]],
            [RequestStatus(**request) for request in data["requests"]],
        )

    def request(self, id: str) -> RequestStatus | None:
        """Return the progress of a request; None if the run has not read it yet."""
        return next((request for request in self.requests if request.id == id), None)


def attempt_folder(run: Run) -> Path:
    """Return the folder of the current attempt of a running run.

    Raises ConflictError if the run is not running.
    """
    record = run.readable_record()
    if run.state not in ACTIVE:
        raise ConflictError(
            f"{run.name} is {run.state}: it has no engines",
            where=str(run.path),
            hint=f"`rlctl resume {run.name}` continues it with the engines of its configuration",
        )
    return run.path / "attempts" / str(record.attempts)


def pool_status(run: Run) -> PoolStatus:
    """Return the engines of a running run. Raises ConflictError without an engine pool."""
    status = PoolStatus.read(attempt_folder(run))
    if status is None:
        raise ConflictError(
            f"{run.name} has no pool of rollout engines, or has not started it yet",
            where=str(run.path),
            hint="`trainer.placement.rollout=engines` gives them a pool (docs/placement.md)",
        )
    return status


def check_drain(status: PoolStatus, request: EngineRequest) -> None:
    """Raise NotFoundError for an engine that does not exist, UsageError if none would remain."""
    numbers = {engine.engine for engine in status.engines if engine.state != "draining"}
    missing = sorted({*request.engines} - {engine.engine for engine in status.engines})
    if missing:
        raise NotFoundError(
            f"there is no engine {missing[0]}",
            hint=f"the engines are {', '.join(str(engine.engine) for engine in status.engines)}",
        )
    left = len(numbers - {*request.engines})
    if not request.engines:
        left -= request.count
    if left < 1:
        raise UsageError(
            f"the last engine cannot be drained: {len(numbers)} of the run take requests",
            hint="add one first (`rlctl engines add RUN`), or end the run (`rlctl stop RUN`)",
        )


def send(attempt: Path, request: EngineRequest) -> None:
    """Write a request for the process that drives the run, into the folder of its `attempt`."""
    folder = own_subfolder(attempt, REQUESTS)
    with replacing(folder / f"{request.id}.json") as aside:
        aside.write_text(json.dumps(asdict(request)), encoding="utf-8")


def received(attempt: Path) -> Iterator[EngineRequest]:
    """Yield the requests in the folder of an `attempt`, oldest first, and remove their files.

    Raises ValueError or TypeError for a file without a request, which leaves later ones there.
    """
    for path in sorted((attempt / REQUESTS).glob("[!.]*.json")):
        text = path.read_text(encoding="utf-8")
        path.unlink()
        yield EngineRequest(**json.loads(text))


def wait(run: Run, request: EngineRequest, timeout_s: float) -> RequestStatus | None:
    """Wait until the request is done; return None after `timeout_s`.

    Raises RlctlError if it has failed, or if the run ends before.
    """
    folder = attempt_folder(run)
    deadline = time.monotonic() + timeout_s
    while True:
        status = PoolStatus.read(folder)
        found = status and status.request(request.id)
        if found is not None and found.progress == "failed":
            raise RlctlError(found.message, where=str(folder))
        if found is not None and found.progress == "done":
            return found
        if (state := reread(run).state) not in ACTIVE:
            raise RlctlError(f"{run.name} is {state}: it ended before the request was done")
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL_S)
