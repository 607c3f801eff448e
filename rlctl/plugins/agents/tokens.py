"""Tokens of one episode, to which its turns and replies are appended."""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlctl.runtime.model.routing import OWN, RoutingShape
from rlctl.runtime.rollout.requests import Completion


@dataclass
class Tokens:
    """Tokens of an episode so far: P of the prompt, and T of what follows."""

    prompt_ids: list[int]  # P
    response_ids: list[int] = field(default_factory=list)  # T
    finish: str = "stop"  # or "length": of the last turn, or of a reply that has no room
    mask: list[float] = field(default_factory=list)  # T: 1 = written by the policy
    log_probs: list[float] = field(default_factory=list)  # T: 0 where the mask is 0
    turn: list[int] = field(default_factory=list)  # T: number of the policy's turn, or of the last
    rewards: dict[int, float] = field(default_factory=dict)  # by position in the response
    versions: list[int] = field(default_factory=list)  # T: of the weights that wrote it
    seen: list[tuple[int, int]] = field(default_factory=list)  # per turn: its end, and a checksum
    images: tuple[bytes, ...] = ()  # files, in the order of their tokens
    routing: Tensor | None = None  # (≤ P + T, L, K): see `Completion`; of tokens so far

    def context(self) -> Tensor:
        """Join prompt and response: (N,) int64, N = P + T."""
        # Ten times as fast as `torch.tensor` of a list.
        return torch.frombuffer(array("q", self.prompt_ids + self.response_ids), dtype=torch.int64)

    def append_turn(self, context_ids: Tensor, completion: Completion, turn: int) -> None:
        """Append a turn that the engine completed after `context_ids` (N,), N = P + T."""
        written = completion.response_ids.tolist()
        self.response_ids += written
        self.mask += [1.0] * len(written)
        self.log_probs += completion.log_probs.tolist()
        self.turn += [turn] * len(written)
        self.versions += completion.versions
        self.finish = completion.finish
        if completion.routing is not None:
            self._add_routing(completion.routing)
        seen = _checksum(completion.response_ids, _checksum(context_ids))
        self.seen.append((len(self.response_ids), seen))

    def _add_routing(self, routing: Tensor) -> None:
        """Add the experts (N, L, K) of a request's tokens; earlier records of tokens stay."""
        if self.routing is not None:
            first = self.routing
            routing = routing.clone()
            again = routing[: len(first)]
            again[:] = torch.where(first == OWN, again, first)
        self.routing = routing

    def whole_routing(self, shape: RoutingShape) -> Tensor:
        """Return the experts (N, L, K) of all tokens; the model chooses for those without any."""
        first = shape.none(0) if self.routing is None else self.routing
        num_tokens = len(self.prompt_ids) + len(self.response_ids)
        return torch.cat([first, shape.none(num_tokens - len(first))])

    def append_reply(self, ids: list[int], turn: int, images: tuple[bytes, ...] = ()) -> None:
        """Append the ids of a reply and its images, which are not trained on."""
        self.response_ids += ids
        self.images += images
        self.mask += [0.0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.turn += [turn] * len(ids)
        self.versions += self.versions[-1:] * len(ids)

    def num_retokenized(self) -> int:
        """Return the tokens of turns whose context or text is not what the engine saw."""
        ids = self.context()
        done = len(self.prompt_ids)
        checksum = _checksum(ids[:done])
        start = 0
        wrong = 0
        for end, seen in self.seen:
            length = end - start
            checksum = _checksum(ids[done : done + length], checksum)
            if checksum != seen:
                wrong += length
            start = end
            done += length
        return wrong


def _checksum(ids: Tensor, start: int = 0) -> int:
    return zlib.crc32(ids.contiguous().numpy().data, start)
