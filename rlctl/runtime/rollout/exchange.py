"""Exchange of requests and responses with an engine, and weights that change in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from rlctl.runtime.rollout.engine import RolloutEngine
from rlctl.runtime.rollout.requests import Completion, Request, Slice

# Seconds of generation between looks at what has finished: engines are idle during one.
_ALONE_S = 2.0
_WATCHED_S = 0.1  # if a caller gets the responses as they finish


class WeightVersions:
    """Version of an engine's weights, and those that wrote the tokens of open responses."""

    def __init__(self) -> None:
        self.now = 0  # version of the loaded weights
        self._spans: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by key and index
        self._dropped = dict[tuple[int, int], list[tuple[int, int]]]()  # by a restart in this step

    def switch(self, version: int, progress: Mapping[tuple[int, int], int]) -> None:
        """Note that weights of `version` are loaded while responses are open.

        `progress` is the number of tokens of each open response so far, by key and index.
        """
        for place, num_tokens in progress.items():
            spans = self._spans.setdefault(place, [])
            if new := num_tokens - sum(count for _, count in spans):
                spans.append((self.now, new))
        self.now = version

    def restart(self) -> None:
        """Note that all open responses begin again: the engine has dropped their tokens.

        Responses that the current step has completed before are stamped as without the restart.
        """
        self._dropped = self._spans
        self._spans = {}

    def forget(self, keys: Collection[int]) -> None:
        """Forget the responses of dropped requests."""
        self._spans = {place: spans for place, spans in self._spans.items() if place[0] not in keys}

    def stamped(self, completions: Sequence[Completion]) -> list[Completion]:
        """Return the responses that a step of the engine completed, with their tokens' versions."""
        result = [self._with_spans(completion) for completion in completions]
        self._dropped = {}
        return result

    def _with_spans(self, completion: Completion) -> Completion:
        place = (completion.key, completion.index)
        spans = self._dropped.pop(place, None) or self._spans.pop(place, [])
        rest = len(completion.response_ids) - sum(count for _, count in spans)
        if rest:
            spans.append((self.now, rest))
        return replace(completion, spans=tuple(spans))


@runtime_checkable
class InFlightEngine(Protocol):
    """`RolloutEngine` whose `load_weights` may be called while responses are open.

    They continue under the new weights; log-probs are those of the weights that sampled a token.
    """

    def progress(self) -> dict[tuple[int, int], int]:
        """Return the number of tokens of each open response, by key and index."""
        ...


def complete(
    requests: Sequence[Request],
    exchange: Callable[[Sequence[Request], Slice], Sequence[Completion]],
    on_completion: Callable[[Completion], object] | None = None,
) -> list[Completion]:
    """Return all responses to `requests`, each of which `on_completion` gets once it has come.

    `exchange` is that of engines: see `TurnEngines`.
    """
    limit = Slice(steps=None, seconds=_ALONE_S if on_completion is None else _WATCHED_S)
    num_left = sum(len(request.seeds) for request in requests)
    completions: list[Completion] = []
    while num_left > 0:
        finished = exchange(requests, limit)
        if on_completion is not None:
            for completion in finished:
                on_completion(completion)
        completions += finished
        num_left -= len(finished)
        requests = ()
    return completions


def divide(requests: Sequence[Request], num_ranks: int, ranks_per_engine: int = 1) -> list[Request]:
    """Return the requests with their engines as affinities, those with the longest contexts first.

    Each rank has its part of the batch: these are the engines and the order of `generate`.
    """
    parts = torch.arange(len(requests)).tensor_split(max(1, num_ranks))
    engine = {i: rank // ranks_per_engine for rank, part in enumerate(parts) for i in part.tolist()}
    placed = [replace(request, affinity=engine[i]) for i, request in enumerate(requests)]
    return sorted(placed, key=lambda request: -len(request.context_ids))


def exchange(
    engine: RolloutEngine,
    requests: Sequence[Request],
    limit: Slice,
    cancelled: Collection[int],
    versions: WeightVersions,
) -> list[Completion]:
    """Submit requests and advance the engine until `limit`, or until no response is open.

    Requests with `cancelled` keys are dropped before. Returns the responses that finished, with the
    `versions` of the weights that wrote their tokens.
    """
    if cancelled:
        engine.cancel(cancelled)
        versions.forget(cancelled)
    engine.submit(requests)
    end = None if limit.seconds is None else time.monotonic() + limit.seconds
    completions: list[Completion] = []
    steps = 0
    while engine.num_open and steps != limit.steps and (end is None or time.monotonic() < end):
        # At once: a later step may restart the open responses.
        completions += versions.stamped(engine.step())
        steps += 1
    return completions
