"""Engine on several devices: its ranks make the same calls, and the first one says which.

vLLM divides a model over ranks, which each have a scheduler and must take the same steps. Calls
travel over gloo, and weights from device to device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.errors import InternalError
from rlctl.plugins import load
from rlctl.recipes import schema
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.rollout.engine import (
    EngineSpec,
    Responses,
    RolloutEngine,
    SamplingParams,
    generate_by_requests,
)
from rlctl.runtime.rollout.exchange import InFlightEngine
from rlctl.runtime.rollout.requests import Completion, Request

# The others wait for the next call without a limit: they end with the process of rank 0.
_FOREVER = timedelta(days=365)


class _IncompleteWeightsError(Exception):
    """Rank 0 could not receive all weights."""


class _Calls:
    """Calls of rank 0 to the engines of the other ranks, in the default process group."""

    def __init__(self) -> None:
        self.group: Any = dist.new_group(backend="gloo", timeout=_FOREVER)

    def send(self, *call: Any) -> None:
        """Send the name of a method and its arguments, or a part of its input."""
        dist.broadcast_object_list([call], 0, self.group)

    def receive(self) -> Any:
        """Return what `send` sends."""
        calls: list[Any] = [None]
        dist.broadcast_object_list(calls, 0, self.group)
        return calls[0]

    def send_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield full parameters (N, ...), each of which the other ranks have got."""
        complete = False
        try:
            for name, value in weights:
                value = value.contiguous()
                self.send(name, value.dtype, tuple(value.shape))
                dist.broadcast(value, 0)
                yield name, value
            complete = True
        finally:
            self.send(None, complete, ())

    def receive_weights(self, device: str) -> Iterator[tuple[str, Tensor]]:
        """Yield what `send_weights` sends. Raises `_IncompleteWeightsError` if it has failed."""
        while (received := self.receive())[0] is not None:
            name, dtype, shape = received
            dist.broadcast(value := torch.empty(shape, dtype=dtype, device=device), 0)
            yield name, value
        if not received[1]:
            raise _IncompleteWeightsError


class SharedEngine(RolloutEngine):
    """Engine of one rank; rank 0 gets the calls, and the other ranks `follow`.

    Collective: every rank builds one around its `engine`.
    """

    @classmethod
    def check(cls, rollout: schema.Rollout, device: str, num_ranks: int) -> None:
        load("engines", rollout.name).check(rollout, device, num_ranks)

    @classmethod
    def from_spec(cls, spec: EngineSpec, policy: PreTrainedModel | None) -> Self:
        return cls(load("engines", spec.rollout.name).from_spec(spec, policy), spec)

    def __init__(self, engine: RolloutEngine, spec: EngineSpec) -> None:
        if not isinstance(engine, InFlightEngine):
            raise InternalError(f"{type(engine).__name__} cannot be divided over several devices")
        self.engine = engine
        self.device = spec.rank_info.device
        self.max_length = spec.max_length
        self.calls = _Calls()

    def follow(self) -> None:
        """Make the calls of rank 0 until it closes the engine."""
        method = ""
        while method != "close":
            method, *arguments = self.calls.receive()
            if method == "load_weights":
                with suppress(_IncompleteWeightsError):
                    self.engine.load_weights(self.calls.receive_weights(self.device))
            else:
                getattr(self.engine, method)(*arguments)

    def generate(self, prompt_ids: Ragged, sampling: SamplingParams) -> Responses:
        return generate_by_requests(self, prompt_ids, sampling, self.max_length)

    @property
    def num_open(self) -> int:
        return self.engine.num_open

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit(requests)  # first: the others must not get what it refuses
        self.calls.send("submit", requests)

    def step(self) -> list[Completion]:
        self.calls.send("step")
        return self.engine.step()

    def cancel(self, keys: Collection[int]) -> None:
        self.calls.send("cancel", list(keys))
        self.engine.cancel(keys)

    def progress(self) -> dict[tuple[int, int], int]:
        """See `InFlightEngine`."""
        assert isinstance(self.engine, InFlightEngine)
        return self.engine.progress()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.calls.send("load_weights")
        self.engine.load_weights(self.calls.send_weights(weights))

    def sleep(self) -> bool:
        self.calls.send("sleep")
        return self.engine.sleep()

    def wake(self) -> None:
        self.calls.send("wake")
        self.engine.wake()

    def close(self) -> None:
        self.calls.send("close")
        self.engine.close()
