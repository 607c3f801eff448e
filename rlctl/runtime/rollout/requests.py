"""Requests to a rollout engine, and the responses that it completes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rlctl.runtime.base.image_processor import Images


_keys = count()


def next_key() -> int:
    """Return a key for a request that no other request of this process has."""
    return next(_keys)


@dataclass(frozen=True)
class Decoding:
    """Choice of the next token, and the tokens that end a response.

    `temperature` 0 is greedy decoding and ignores `top_p` and `top_k`. `top_k` ≤ 0 and `top_p` 1
    mean no restriction. If both restrict, `top_p` applies to the renormalized `top_k` tokens.
    """

    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        given = [
            f"{name}={getattr(self, name)}" for name, bad in self._out_of_range().items() if bad
        ]
        if given:
            raise ValueError(f"sampling parameters out of range: {', '.join(given)}")

    def _out_of_range(self) -> dict[str, bool]:
        """Return the fields that are checked: True if the value is not allowed."""
        return {"temperature": self.temperature < 0, "top_p": not 0 < self.top_p <= 1}


@dataclass(frozen=True, eq=False)
class Request:
    """A context to continue with n responses.

    A request whose context begins with the context and the response of a finished one names it as
    `previous`: an engine that still holds that cache computes the rest only.
    """

    key: int  # unique among the requests of an engine since its last `load_weights`
    context_ids: Tensor  # (P,) int64 on the CPU, P ≥ 1
    decoding: Decoding
    max_tokens: tuple[int, ...]  # n: limit of each response, ≥ 1
    seeds: tuple[int, ...]  # n: random stream of each response, ≥ 0
    previous: int | None = None
    keep: bool = False  # a request with this one as `previous` may follow; needs n = 1
    # Requests with equal numbers go to the same engine while it lives; -1: to the least busy one.
    affinity: int = 0
    images: Images = ()  # files of the images of the context
    num_top: int = 0  # most probable tokens that are reported in place of each token


@dataclass(frozen=True)
class Slice:
    """End of a call of `exchange`: after `steps` of the engine, or after `seconds` of time."""

    steps: int | None
    seconds: float | None = None


@dataclass(frozen=True, eq=False)
class Completion:
    """A finished response of a request."""

    key: int  # of the request
    index: int  # of the response among the request's n
    response_ids: Tensor  # (T,) int64 on the CPU, including the stop token, if any
    log_probs: Tensor  # (T,) float32 on the CPU: see `RolloutEngine.generate`
    finish: str  # "stop" = stop token, "length" = limit
    # Runs of tokens by the weights that wrote them: version (updates of the policy since the run
    # began) and number of tokens.
    spans: tuple[tuple[int, int], ...] = ()
    # (P + T, L, K): experts of the tokens of context and response, where the engine records them;
    # `OWN` for tokens that this request did not compute, such as the last.
    routing: Tensor | None = None
    # T: ids and log-probs of the `num_top` most probable tokens; none if not asked for, or from an
    # engine that does not report them.
    top: tuple[tuple[tuple[int, float], ...], ...] = ()

    @classmethod
    def of(
        cls,
        request: Request,
        index: int,
        ids: Sequence[int],
        log_probs: Sequence[float],
        top: Iterable[Iterable[tuple[int, float]]] = (),
    ) -> Self:
        """Return response `index` of `request`: T ≥ 1 tokens with their log-probs."""
        finish = "stop" if ids[-1] in request.decoding.stop_token_ids else "length"
        return cls(
            request.key,
            index,
            torch.tensor(ids, dtype=torch.int64),
            torch.tensor(log_probs, dtype=torch.float32),
            finish,
            top=tuple(map(tuple, top)) if request.num_top else (),
        )

    def shortened(self, num_tokens: int) -> Self:
        """Return the completion that a stop after `num_tokens` ≥ 1 tokens would have given."""
        spans: list[tuple[int, int]] = []
        left = num_tokens
        for version, length in self.spans:
            spans.append((version, min(length, left)))
            left -= spans[-1][1]
        dropped = len(self.response_ids) - num_tokens
        return replace(
            self,
            response_ids=self.response_ids[:num_tokens],
            log_probs=self.log_probs[:num_tokens],
            finish="stop",
            spans=tuple(span for span in spans if span[1]),
            routing=None if self.routing is None else self.routing[: len(self.routing) - dropped],
            top=self.top[:num_tokens],
        )

    @property
    def versions(self) -> list[int]:
        """Version of the weights that wrote each token."""
        return [version for version, num_tokens in self.spans for _ in range(num_tokens)]

    @property
    def version(self) -> int:
        """Version of the weights that wrote the last token."""
        return self.spans[-1][0] if self.spans else 0
