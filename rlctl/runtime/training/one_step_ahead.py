"""Rollouts one step ahead of learning.

The rollouts of step k + 1 are generated under the weights that step k − 1 left, while step k
learns. The schedule is a function of the step alone, so a run is repeatable at any speed of engines
and trainer. If they share devices, they take turns and the rollouts are the same. Each token has
its staleness: the number of steps between its weights and the newest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from rlctl.runtime.base.batch import Scored
from rlctl.runtime.base.clock import Clock
from rlctl.runtime.base.roles import LostEnginesError, Published
from rlctl.runtime.training.rollout_source import (
    Collected,
    CollectionSetup,
    RolloutSource,
    SourceState,
    state_of,
)
from rlctl.runtime.workers.interrupts import INTERRUPTS

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BESIDE = {"update_weights": "sync_weights"}  # phases with another name beside a step


class OneStepAhead(RolloutSource):
    """Rollouts that are collected while the step before theirs learns.

    With `in_thread` a thread collects: the engines have a separate pool. If all of them are lost,
    the rollouts are collected in the step that learns from them.
    """

    def __init__(self, collection: CollectionSetup, *, in_thread: bool) -> None:
        self.collection = collection
        self.in_thread = in_thread
        self.clock = Clock(lambda _: None)
        self.ahead = collection.ahead
        self.seconds = {}
        self.quiet = nullcontext()
        self._next: Future[Collected] | None = None
        self._before: SourceState | None = None  # without the rollouts that are collected
        self._given_up: SourceState | None = None
        self._began = time.perf_counter()
        # Seconds of the trainer, and of the engines, for rollouts that were not generated ahead.
        self._waited = self._used = 0.0
        collection.publish()

    def take(self, step: int) -> tuple[Scored, dict[str, float]]:
        """Return the rollouts that `step` learns from; begin to collect for the next step."""
        self._began = time.perf_counter()
        self.seconds = {}
        now = self.ahead
        if now is None:
            with self.collection.clock.phase("wait_rollouts"):
                now = self._collect(step, weights=step - 1)
        assert now.step == step, f"rollouts of step {now.step} in step {step}"
        self.ahead = None
        self._used = sum(self.seconds.values())
        self.seconds = {}
        self._waited = time.perf_counter() - self._began
        self._before = state_of(self.collection.collector, self.collection.roles, None)
        if step < self.collection.last:
            collect = partial(self._collect, step + 1, weights=step - 1)
            self._next = result_of(collect, self.in_thread)
        scored, metrics = with_staleness(now.scored, step, now.weights, limit=1)
        return scored, now.metrics | metrics

    def end_step(self) -> dict[str, float]:
        learned = time.perf_counter()
        if self._next is not None:
            with self.collection.clock.phase("wait_rollouts"):
                self._wait_for(self._next)
            self._next = None
        now = time.perf_counter()
        total = max(now - self._began, 1e-9)
        used = self._used + sum(self.seconds.values())
        metrics = {
            "async/trainer_idle": (self._waited + now - learned) / total,
            "async/engines_idle": max(0.0, 1 - used / total),
        }
        return metrics | published_gb(self.collection.publish())

    def state(self) -> SourceState:
        collection = self.collection
        return self._given_up or state_of(collection.collector, collection.roles, self.ahead)

    def _wait_for(self, rollouts: Future[Collected]) -> None:
        """Wait for the next step's rollouts; give them up if a stop cannot wait any longer."""
        try:
            with INTERRUPTS.window(late=True):
                self.ahead = rollouts.result()
        except LostEnginesError as error:
            logger.warning("%s; rollouts are collected in their step", error)
        except KeyboardInterrupt:
            if not INTERRUPTS.raised:
                raise
            self._given_up = self._before
            logger.warning(
                "the next step's rollouts were not finished in time; a resumed run generates them "
                "under newer weights, so its metrics differ from those of this run"
            )

    def _collect(self, step: int, weights: int) -> Collected:
        collector = self.collection.collector
        state = collector.state_dict()
        try:
            with self.clock.running():
                scored, metrics = collector.collect(self.collection.roles, step)
        except LostEnginesError:  # the prompts are drawn again
            collector.load_state_dict(state, step)
            self.clock.take()
            raise
        seconds = self.clock.take()
        # The trainer's part of a weight sync is timed as `update_weights`, in its step.
        self.seconds = {_BESIDE.get(phase, phase): value for phase, value in seconds.items()}
        return Collected(step, weights, scored, metrics)


def published_gb(published: Published) -> dict[str, float]:
    """Return the metric of the weights that each engine loads, in GiB, if it loads any."""
    return {"async/weight_sync_gb": published.num_bytes / 2**30} if published.num_bytes else {}


def result_of(call: Callable[[], T], in_thread: bool = True) -> Future[T]:
    """Return the future result of `call`, which runs in a separate thread, or at once."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            if not in_thread and not isinstance(error, Exception):
                raise  # a signal
            result.set_exception(error)

    if in_thread:  # a daemon: after an error of the trainer nothing waits for it
        threading.Thread(target=run, name="rollouts", daemon=True).start()
    else:
        run()
    return result


def with_staleness(
    scored: Scored, step: int, weights: Tensor | int, limit: int
) -> tuple[Scored, dict[str, float]]:
    """Return B rows with the staleness of their tokens when `step` learns from them, and metrics.

    `weights` is the step that left the weights of a token: (T,), or one for all. Those that
    step − 1 left are the newest. A row is as stale as its oldest sampled token; the metrics have
    the share of each staleness from 0 to `limit`, and further ones that occur.
    """
    ids = scored.response_ids
    age = (step - 1 - torch.as_tensor(weights)).expand(len(ids.values))
    sampled = age * scored.response_mask.values.to(age)
    rows = torch.zeros(len(ids), dtype=age.dtype)
    rows = rows.scatter_reduce(0, ids.row_of_token, sampled, "amax")
    return replace(scored, staleness=ids.like(age.clone())), staleness_metrics(rows, limit)


def staleness_metrics(staleness: Tensor, limit: int) -> dict[str, float]:
    """Return mean and maximum of the staleness of rows (B,), and the share of each staleness."""
    shares = torch.bincount(staleness, minlength=limit + 1) / len(staleness)
    return {
        "async/staleness/mean": float(staleness.double().mean()),
        "async/staleness/max": float(staleness.max()),
    } | {f"async/staleness/share/{steps}": share for steps, share in enumerate(shares.tolist())}
