"""Engines of a pool, kept alive and under the trainer's weights."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from threading import Lock
from typing import Any

import ray

from rlctl.errors import InternalError, RlctlError
from rlctl.runtime.base.roles import LostEnginesError
from rlctl.runtime.cluster.channels import GroupChannel, Sent, StoreChannel, StoredWeights
from rlctl.runtime.cluster.engine_processes import EngineProcesses
from rlctl.runtime.cluster.group_host import GroupHost
from rlctl.runtime.cluster.open_turns import OpenTurn
from rlctl.runtime.cluster.pool import gather
from rlctl.runtime.cluster.pool_engine import Engine, failure_reason
from rlctl.runtime.rollout.engine_weights import Selection
from rlctl.runtime.rollout.weight_sync import WeightChannel, uses_object_store
from rlctl.runtime.workers.interrupts import INTERRUPTS
from rlctl.runtime.workers.rollout import RolloutSpec
from rlctl.tracking.tracker import Event

logger = logging.getLogger(__name__)

# Lets the trainer send its weights to a channel; returns what the channel returns to each rank.
SendWeights = Callable[[WeightChannel[Any]], Sequence[Any]]

_MAX_FAILURES = 3  # engines that one request may be lost with before the run fails
_MAX_BROKEN = 3  # weight syncs that break without a lost engine before all engines are restarted
_GRACE_S = 30.0  # for an engine to leave a broken group
_LATE_S = 60.0  # for an engine to load a bucket, while the others wait


class LiveEngines:
    """Engines that get the trainer's weights, and that are started again when they are lost.

    Their requests then wait in `unplaced` for another engine.
    """

    def __init__(self, pool: EngineProcesses, spec: RolloutSpec, event: Event) -> None:
        self.pool = pool
        self.spec = spec
        self.rollout = spec.sampling.rollout
        self.trainer_device = spec.trainer_device or pool.spec.rank_info.device
        self.event = event
        self.version = 0  # of the trainer's weights
        self.group = GroupHost(only_changes=self.rollout.checkpoint_engine.only_changes)
        self.num_broken = 0  # syncs in a row that broke without a lost engine
        self.all_down_since: float | None = None  # when the last ready engine was lost
        self.send_weights: SendWeights | None = None  # None: the engines' weights are stale
        self.can_send = Lock()  # the trainer's weights do not change while it is held
        self.awaits_broadcast = False  # weights have changed since the last one
        self.num_bytes = 0  # of the last sync of the trainer's weights
        self.unplaced: list[OpenTurn] = []  # of lost engines
        self._num_losses: Counter[int] = Counter()  # engines lost with a request, by its key
        for engine in pool.engines:
            pool.start(engine, spec)

    def wait(self) -> None:
        """Wait until all engines are built. Raises RlctlError if one fails to start."""
        pool = self.pool
        starting = [
            engine.start_result for engine in pool.engines if engine.start_result is not None
        ]
        gather(starting, "building the rollout engines", pool.spec.start_timeout_s, pool.tail)
        for engine in pool.engines:
            pool.finish_start(engine)

    def mark_stale(self) -> None:
        """Require `update_weights` before the next exchange: the policy changes."""
        self.version += 1
        self.send_weights = None

    def broadcast(self, send_weights: SendWeights) -> int:
        """Send the trainer's weights to all ready engines; return their bytes.

        Responses may be open, but no exchange may be under way. Engines that become ready later get
        these weights until `end_broadcasts`, and then those of the next call.
        """
        self.version += 1
        self.send_weights = send_weights
        self.awaits_broadcast = False
        self.all_down_since = None
        self.restart_lost()
        while any(engine.ready and engine.version != self.version for engine in self.pool.engines):
            self.sync_weights(send_weights)
        return self.num_bytes

    def end_broadcasts(self) -> None:
        """Let engines that become ready wait for the next `broadcast`: the policy changes."""
        with self.can_send:
            self.awaits_broadcast = True

    def update_weights(self, send_weights: SendWeights) -> None:
        """Send the trainer's weights to every ready engine that lacks them, unless they changed.

        `send_weights` is kept until `mark_stale`, for engines that restart while they are needed.
        """
        self.send_weights = send_weights
        self.all_down_since = None
        self.pool.change_members()
        with self.can_send:
            if not self.awaits_broadcast:
                self.sync_weights(send_weights)

    def ready_engines(self) -> list[Engine]:
        """Send the trainer's weights to engines that lack them, unless those have changed.

        Returns the engines that can generate, if any. Raises LostEnginesError if none can before
        the next `broadcast`.
        """
        engines = self.pool.engines
        send_weights = self.send_weights
        if send_weights is None:
            raise InternalError("generation with stale engine weights: call update_weights before")
        with self.can_send:
            waits = self.awaits_broadcast
            if waits:
                self._check_alive(any(engine.ready for engine in engines))
            else:
                self.sync_weights(send_weights)
        ready = [engine for engine in engines if engine.version == self.version]
        if waits and not ready:
            raise LostEnginesError("no rollout engine with the weights of this step is left")
        return ready

    def restart_lost(self) -> None:
        """Start lost engines, and finish or give up starts that are under way."""
        self.pool.change_members()
        now = time.monotonic()
        limit = self.pool.spec.start_timeout_s
        for engine in self.pool.engines:
            if engine.handle is None and now >= engine.retry_at:
                self.pool.start(engine, self.spec)
            elif engine.start_result is None:
                continue
            elif ray.wait([engine.start_result], timeout=0)[0]:
                reason = failure_reason(engine.start_result, raise_rlctl_errors=False)
                if reason is None:
                    self.pool.finish_start(engine)
                    seconds = round(now - engine.started_at, 1)
                    kind = "engine_added" if engine.joining else "engine_restarted"
                    engine.joining = False
                    self.event(kind, engine=engine.number, node=engine.node, seconds=seconds)
                else:
                    self.mark_failed(engine, reason)
            elif now - engine.started_at > limit:
                self.mark_failed(engine, f"it did not start within {limit:g} s")

    def sync_weights(self, send_weights: SendWeights) -> None:
        """Send weights to ready engines that lack them; give up when all are down for too long."""
        stale = [
            engine
            for engine in self.pool.engines
            if engine.ready and engine.version != self.version
        ]
        if stale:
            with INTERRUPTS.held():
                self._send_to(stale, send_weights)
        self._check_alive(any(engine.version == self.version for engine in self.pool.engines))

    def _check_alive(self, is_alive: bool) -> None:
        """Raise RlctlError if no engine is alive for `restart_timeout_s`."""
        if is_alive:
            self.all_down_since = None
            return
        limit = self.pool.restart_timeout_s
        self.all_down_since = self.all_down_since or time.monotonic()
        if time.monotonic() - self.all_down_since > limit:
            raise RlctlError(
                f"no rollout engine is left, and none could be started again within {limit:g} s",
                where=self.pool.tail(),
                hint="trainer.timeouts.rollout_restart_s sets the deadline",
            )

    def _send_to(self, stale: list[Engine], send_weights: SendWeights) -> None:
        """Run one weight sync from the trainer to `stale` engines."""
        are_new = any(engine.version < 0 for engine in stale)
        selection = Selection.ALL if are_new else Selection.CHANGING
        through_host = uses_object_store(self.rollout, self.trainer_device)
        if not through_host and all(engine.num_receivers for engine in stale):
            self._broadcast_to(stale, send_weights, selection)
            return
        weights = StoredWeights.join(send_weights(StoreChannel(selection)))
        self.num_bytes = weights.num_bytes
        began = time.monotonic()
        loading = [
            (engine, engine.handle.load_stored.remote(weights.buckets, weights.version))
            for engine in stale
        ]
        for engine, call in loading:
            self._finish_load(engine, call, self.pool.spec.call_timeout_s, began)

    def _broadcast_to(
        self, stale: list[Engine], send_weights: SendWeights, selection: Selection
    ) -> None:
        """Run a weight sync in a group of the trainer's ranks and `stale` engines.

        If the group breaks, engines that are not lost remain stale.
        """
        timeout_s = self.pool.spec.call_timeout_s
        address = self.group.address_for(stale)
        numbers = accumulate((engine.num_receivers for engine in stale), initial=0)
        loading = [
            (engine, engine.handle.load_broadcast.remote(address, number))
            for number, engine in zip(numbers, stale, strict=False)
        ]
        # The trainer's call, which has this limit, must outlive a late engine.
        late_s, grace_s = min(_LATE_S, timeout_s / 4), min(_GRACE_S, timeout_s / 4)
        given = self.pool.spec.rank_info
        rank_info = replace(given, timeout_s=late_s, device=self.trainer_device)
        with self.group.watch([call for _, call in loading]):
            sent: Sequence[Sent] = send_weights(GroupChannel(address, rank_info, selection))
        reason = next((part.failure for part in sent if part.failure is not None), None)
        self.num_bytes = sum(part.num_bytes for part in sent)
        if reason is not None:
            self.group.dissolve()
            timeout_s = grace_s
        sent_at = time.monotonic()
        for engine, call in loading:
            self._finish_load(engine, call, timeout_s, sent_at)
        has_left = any(engine.ready and engine.version != self.version for engine in stale)
        if has_left:  # also after the trainer's last broadcast
            self.group.dissolve()
        is_broken = has_left and all(engine.ready for engine in stale)
        self.num_broken += 1
        if not is_broken:
            self.num_broken = 0
        if self.num_broken == _MAX_BROKEN:
            for engine in stale:
                self.mark_failed(engine, f"{_MAX_BROKEN} weight syncs broke: {reason}")

    def _finish_load(
        self, engine: Engine, call: ray.ObjectRef, timeout_s: float, since: float
    ) -> None:
        """Wait until an engine has loaded weights, or mark it as failed."""
        reason = failure_reason(call, timeout_s, since, late="did not load its weights")
        if reason is not None:
            self.mark_failed(engine, reason)
        elif ray.get(call) is not False:  # else its group broke
            engine.version = self.version

    def mark_failed(self, engine: Engine, reason: str) -> None:
        """Kill the engine and let its requests wait for another.

        Raises RlctlError for a request that was lost with `_MAX_FAILURES` engines.
        """
        turns = [turn.missing() for turn in engine.turns.values()]
        self.unplaced += turns
        self._num_losses.update(turn.request.key for turn in turns)
        tail = engine.tail()
        reason = engine.cause_in(reason)
        self.pool.stop(engine)
        engine.version = -1
        first_line = next(iter(reason.strip().splitlines()), "no reason was given")
        self.event("engine_lost", engine=engine.number, reason=reason, requests=len(turns))
        if engine.joining:  # the devices that it was given do not suit it
            engine.draining = True
            engine.failure = reason
        fate = "removing" if engine.draining else "restarting"
        logger.warning("rollout engine %d is lost (%s); %s it", engine.number, first_line, fate)
        if max((self._num_losses[turn.request.key] for turn in turns), default=0) >= _MAX_FAILURES:
            raise RlctlError(
                f"{_MAX_FAILURES} rollout engines were lost with the same prompts: {reason}",
                where=tail,
            )
