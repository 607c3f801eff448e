"""Requests of single responses that an engine still owes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from rlctl.runtime.rollout.requests import Completion
from rlctl.runtime.rollout.requests import Request as TurnRequest


@dataclass(eq=False)
class OpenTurn:
    """A request with responses that an engine still owes.

    `numbers` are those of its responses in the request of the caller.
    """

    request: TurnRequest
    numbers: tuple[int, ...]
    arrived: set[int] = field(default_factory=set)  # indices into `numbers`

    @classmethod
    def of(cls, request: TurnRequest) -> Self:
        """Open a request of the caller."""
        return cls(request, tuple(range(len(request.seeds))))

    def receive(self, completion: Completion) -> Completion:
        """Return a response as one of the caller's request."""
        self.arrived.add(completion.index)
        return replace(completion, index=self.numbers[completion.index])

    @property
    def is_complete(self) -> bool:
        """True once all responses have arrived."""
        return len(self.arrived) == len(self.numbers)

    def missing(self) -> Self:
        """Return the rest for another engine, which lacks the cache of an episode's turns."""
        left = [i for i in range(len(self.numbers)) if i not in self.arrived]
        request = replace(
            self.request,
            previous=None,
            max_tokens=tuple(self.request.max_tokens[i] for i in left),
            seeds=tuple(self.request.seeds[i] for i in left),
        )
        return type(self)(request, tuple(self.numbers[i] for i in left))
