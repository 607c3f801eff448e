"""Rollout engines of a pool, as their group sees them, and the results of their calls."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup

from rlctl.errors import RlctlError
from rlctl.recipes.role_table import ROLLOUT
from rlctl.runs.logs import format_tails
from rlctl.runtime.cluster.open_turns import OpenTurn
from rlctl.runtime.cluster.task_errors import error_of_users_code
from rlctl.runtime.rollout.http_server import LostServerError
from rlctl.runtime.rollout.requests import Completion, Request


@dataclass(eq=False)
class Engine:
    """One slot of the pool: down (no handle), starting (`start_result` is pending) or ready."""

    number: int
    logs: Sequence[Path]  # of its processes; none: they write to this terminal
    group: PlacementGroup | None = None  # its devices
    node: str = ""  # or nodes
    handle: Any = None  # of the process that gets its calls
    followers: Sequence[Any] = ()  # processes of its other devices
    following: Sequence[ray.ObjectRef] = ()  # their calls, which last as long as they live
    start_result: ray.ObjectRef | None = None
    started_at: float = 0.0
    version: int = -1  # of its weights; -1: none
    num_receivers: int = 1  # processes in a group that gets weights; 0: it cannot join one
    num_failures: int = 0  # since its last result
    retry_at: float = 0.0
    turns: dict[int, OpenTurn] = field(default_factory=dict)  # by key
    cancelled: list[int] = field(default_factory=list)  # keys that its next exchange drops
    draining: bool = False  # it gets no new requests, and is removed once it is idle
    url: str | None = None  # of the server that it was added for
    joining: bool = False  # it was added to a running pool and has not been built yet
    failure: str | None = None  # reason why it could not join
    num_responses: int = 0
    num_tokens: int = 0  # of its responses
    busy_s: float = 0.0
    busy_until: float = 0.0  # time of the last response

    @property
    def idle(self) -> bool:
        """True if no request is open."""
        return not self.turns

    def count(self, finished: Sequence[Completion], since: float, until: float) -> None:
        """Count responses to a call that was sent at `since` and ended at `until`."""
        self.busy_s += until - max(since, self.busy_until)
        self.busy_until = until
        self.num_responses += len(finished)
        self.num_tokens += sum(len(response.response_ids) for response in finished)

    @property
    def ready(self) -> bool:
        """True if the engine is built and accepts calls."""
        return self.handle is not None and self.start_result is None

    def call(self, method: str, *args: Any) -> ray.ObjectRef:
        """Queue a call of the worker's `method` after earlier calls."""
        return self.handle.call.remote(ROLLOUT.name, method, args, {})

    def cancel(self, keys: Collection[int]) -> None:
        """Forget turns with these keys; the next exchange lets the engine drop them."""
        dropped = sorted(self.turns.keys() & set(keys))
        self.cancelled += dropped
        for key in dropped:
            del self.turns[key]

    def pop_cancelled(self) -> list[int]:
        """Return the keys to drop since the last call."""
        cancelled = self.cancelled
        self.cancelled = []
        return cancelled

    def receive(self, finished: Sequence[Completion]) -> list[Completion]:
        """Return finished responses as those of the caller's requests; forget complete ones."""
        completions = []
        for completion in finished:
            turn = self.turns[completion.key]
            completions.append(turn.receive(completion))
            if turn.is_complete:
                del self.turns[completion.key]
        return completions

    def tail(self) -> str:
        """Return the last lines of the engine's log."""
        if not self.logs:
            return "the worker's output on this terminal"
        return format_tails(self.logs)

    def cause_in(self, reason: str) -> str:
        """Return `reason` with the errors of the other processes of the engine, if any."""
        if not self.following:
            return reason
        ended = ray.wait([*self.following], num_returns=len(self.following), timeout=0)[0]
        errors = [failure_reason(call, raise_rlctl_errors=False) for call in ended]
        return "; ".join(dict.fromkeys([reason, *filter(None, errors)]))


def failure_reason(
    result: ray.ObjectRef,
    timeout_s: float | None = None,
    since: float | None = None,
    raise_rlctl_errors: bool = True,
    late: str = "returned no result",
) -> str | None:
    """Return why an engine's call failed, or None if it succeeded.

    `late` describes a call that takes longer than `timeout_s`, which counts from `since`, a time of
    `time.monotonic`, or from now. Raises the call's RlctlError, because every other engine would
    raise it too, unless its server is lost. Pass `raise_rlctl_errors=False` for errors of one
    engine only, such as a failed start.
    """
    left_s = timeout_s
    if timeout_s is not None and since is not None:
        left_s = max(0.0, since + timeout_s - time.monotonic())
    # A finished result of another node takes time to fetch, which is not the engine's.
    if not ray.wait([result], timeout=left_s, fetch_local=False)[0]:
        return f"it {late} within {timeout_s:g} s"
    try:
        ray.get(result, timeout=timeout_s)
    except RayTaskError as error:
        is_lost = isinstance(error.cause, LostServerError)
        if raise_rlctl_errors and isinstance(error.cause, RlctlError) and not is_lost:
            raise error.cause from error
        if raise_rlctl_errors and (users := error_of_users_code(error)) is not None:
            raise users from error
        return f"{type(error.cause).__name__}: {error.cause}"
    except RayActorError as error:
        return str(error.error_msg)
    except GetTimeoutError:
        return f"it {late} within {timeout_s:g} s"
    return None


def place(
    turns: Sequence[OpenTurn], engines: Sequence[Engine], ready: Sequence[Engine]
) -> tuple[dict[Engine, list[Request]], list[OpenTurn]]:
    """Distribute `turns` over the `ready` ones of all `engines` that are not draining.

    Returns the requests of each engine, and the turns that must wait for one. A turn goes to the
    engine of its affinity if that is able, else to the least busy one.
    """
    new: dict[Engine, list[Request]] = {engine: [] for engine in ready}
    members = [engine for engine in engines if not engine.draining]
    able = [engine for engine in ready if not engine.draining]
    if not able:
        return new, [*turns]
    for turn in turns:
        affinity = turn.request.affinity
        target = members[affinity % len(members)] if affinity >= 0 else None
        if target not in able:
            target = min(able, key=lambda engine: len(engine.turns))
        new[target].append(turn.request)
        target.turns[turn.request.key] = turn
    return new, []
