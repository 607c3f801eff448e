"""CUDA graphs of decoding steps in the engine `hf`.

A step of a small model is limited by the start of its kernels, not by their work. A graph starts
them all at once, with the shapes and addresses of its capture. So a step runs on padded rows and
slots of the KV cache (`StaticSlots`), and reads tokens, positions and slots from buffers that are
filled before each replay. Weights are read where they are: weight sync writes them
in place, and a tensor that has moved invalidates all graphs.

All graphs share one memory pool, in which nothing outlives a replay: buffers, cache and logits are
allocated outside of it. Axes: R rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.runtime.base.budget import is_oom
from rlctl.runtime.base.ops import to_device
from rlctl.runtime.rollout.decoding import Decode, next_logits
from rlctl.runtime.rollout.kv_cache import KVCache
from rlctl.runtime.rollout.kv_slots import Grid, OwnSlots, StepShape, outside_window

_log = logging.getLogger(__name__)


class Capturer(Protocol):
    """Recorder of the work of a device."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work`, which has run before; return a call that repeats it.

        Raises:
            RuntimeError: the device cannot record it.
        """
        ...

    def clear(self) -> None:
        """Forget all records, whose calls are not used again."""
        ...


class CudaGraphs:
    """Recorder of CUDA graphs with a shared memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Capturer`. Other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # `torch.cuda.graph` would also collect garbage and empty the cache, for each graph.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # of a capture that has failed
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    def clear(self) -> None:
        """See `Capturer`. Waits for replays that are running."""
        torch.cuda.synchronize()
        self._pool = torch.cuda.graph_pool_handle()


class StaticSlots:
    """Slots of a step of fixed shapes, with its inputs in buffers; implements `Slots`.

    Rows beyond the real ones compute what nobody reads: their tokens are in separate slots, and
    they attend to the first prompt.
    """

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        self.shape = shape
        options = {"dtype": torch.int64, "device": device}
        self.tokens = torch.zeros(shape.rows, **options)
        self.positions = torch.zeros(shape.rows, **options)
        self.num_own = torch.zeros(shape.rows, **options)
        self._grids: dict[tuple[int, int], Grid] = {}
        self._layout: int | None = None  # of the cache when the grids were filled
        self._cache: KVCache | None = None  # of the last `fill`
        self._own: dict[int, OwnSlots] = {}  # by KV heads
        self._outside: dict[int, Tensor] = {}

    def fill(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> None:
        """Copy the inputs of a step, (R,) int64 each, and the slots of the cache's rows."""
        num_own = to_device(cache.num_own, self.num_own.device)
        for buffer, value in (
            (self.tokens, tokens),
            (self.positions, positions),
            (self.num_own, num_own),
        ):
            buffer[: len(value)].copy_(value)
            buffer[len(value) :].zero_()
        if self._layout != cache.layout:
            for heads, grid in self._grids.items():
                grid.copy_(cache.build_grid(heads, grid.bias, self.shape))
            self._layout = cache.layout
        self._cache = cache

    def begin(self) -> None:
        """Drop what the layers of the previous pass had in common."""
        self._own.clear()
        self._outside.clear()

    def grid(self, heads: tuple[int, int], like: Tensor) -> Grid:
        """See `Slots`; `like` (R, H, D). Built in the first pass, and then only refilled."""
        if heads not in self._grids:
            assert self._cache is not None, "`fill` comes first"
            self._grids[heads] = self._cache.build_grid(heads, like, self.shape)
        return self._grids[heads]

    def own_slots(self, like: Tensor) -> OwnSlots:
        """See `Slots`; `like` (R, K, D)."""
        if like.shape[1] not in self._own:
            assert self._cache is not None, "`fill` comes first"
            capacity = self._cache.any_layer.keys.shape[2]
            slots = OwnSlots.build(self.num_own, like, capacity, self.shape.response)
            self._own[like.shape[1]] = slots
        return self._own[like.shape[1]]

    def outside(self, window: int, num_prompt: int, num_own: int, like: Tensor) -> Tensor:
        """See `Slots`; `like` (R·H, D)."""
        del like
        if window not in self._outside:
            contexts = self.positions - self.num_own
            self._outside[window] = outside_window(
                window, contexts, self.num_own, (num_prompt, num_own)
            )
        return self._outside[window]


@dataclass(frozen=True, eq=False)
class _Step:
    """Captured step: its inputs, its logits (≥ R, V) and the call that computes them."""

    slots: StaticSlots
    logits: Tensor
    replay: Callable[[], None]


class StaticDecoder:
    """Decoding steps of `model` in fixed shapes, captured once per shape and storage.

    Weights may be written at any time, but move only between batches, which have a cache each. If a
    step cannot be captured, that is logged once, and `decode` returns None from then on.
    """

    def __init__(self, model: PreTrainedModel, capturer: Capturer) -> None:
        self.model = model
        self._capturer = capturer
        self._steps: dict[StepShape, _Step] = {}
        self._cache: KVCache | None = None  # of this batch
        self._weights: tuple[int, ...] = ()  # their addresses at its beginning
        self._storage: Hashable = None  # of cache and weights at the capture
        self._logits: Tensor | None = None  # (≥ R, V), shared by the steps
        self.reason: str | None = None  # why nothing is captured

    def __len__(self) -> int:
        """Return the number of captured steps."""
        return len(self._steps)

    def clear(self) -> None:
        """Free the graphs and their memory, and forget the cache."""
        self._free()
        self._cache = None

    def _free(self) -> None:
        self._capturer.clear()
        self._steps.clear()
        self._storage = self._logits = None

    def decode(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor | None:
        """Return the logits (R, V) of one token (R,) per row; None if nothing is captured.

        They are valid until the next call. `cache` is `padded`.
        """
        if self.reason is not None:
            return None
        if cache is not self._cache:  # of a new batch
            self._cache = cache
            self._weights = self._addresses()
        storage = (cache.storage, self._weights)
        if storage != self._storage:
            self._free()
            self._storage = storage
        shape = cache.step_shape()
        step = self._steps.get(shape)
        if step is None:
            step = self._capture(StaticSlots(shape, tokens.device), tokens, positions, cache)
            if step is None:
                return None
            self._steps[shape] = step
        step.slots.fill(tokens, positions, cache)
        step.replay()
        return step.logits[: len(tokens)]

    def _addresses(self) -> tuple[int, ...]:
        """Return the addresses of all weights and buffers."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return tuple(tensor.data_ptr() for tensor in tensors)

    def _capture(
        self, slots: StaticSlots, tokens: Tensor, positions: Tensor, cache: KVCache
    ) -> _Step | None:
        """Run a step once, which builds its buffers, and capture it; None if that fails."""
        slots.fill(tokens, positions, cache)
        attention = Decode(cache, slots)

        def run() -> Tensor:
            slots.begin()
            return next_logits(self.model, slots.tokens, slots.positions, attention)

        found = run()
        if self._logits is None or len(self._logits) < len(found):
            self._logits = torch.empty_like(found)
        logits = self._logits[: len(found)]

        def work() -> None:
            logits.copy_(run())

        try:
            replay = self._capturer.capture(work)
        except RuntimeError as error:
            if is_oom(error):
                raise
            self.reason = str(error).splitlines()[0]
            _log.warning("decoding without CUDA graphs, which the model prevents: %s", self.reason)
            self.clear()
            return None
        finally:
            slots.begin()  # tensors of the capture's pool
        return _Step(slots, logits, replay)
