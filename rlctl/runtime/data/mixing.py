"""Files with weights: the order of their prompts, and their samplers with a state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlctl.runtime.data.samplers import Order, StatefulSampler


@dataclass(frozen=True)
class Part:
    """Prompts `start` … `stop − 1` of a set, which are `share` of the prompts that are drawn."""

    start: int
    stop: int
    share: float  # of all parts together 1

    def __len__(self) -> int:
        """Return the number of prompts."""
        return self.stop - self.start


def mixed_order(parts: Sequence[Part], order: Order, epoch: int, seed: int) -> Tensor:
    """Return the prompts of an epoch, (N,) int64 for N prompts in all, each part by its share.

    Each part is a stream that continues in the next epoch: a part with a large share
    repeats within an epoch, one with a small share takes several. `order` is applied to each
    stream's epochs, and to the evenly interleaved streams.
    """
    length = parts[-1].stop
    indices = []
    places = []
    for part, quota in zip(parts, quotas(parts, length), strict=True):
        first = epoch * quota // len(part)
        last = ((epoch + 1) * quota - 1) // len(part)
        stream = torch.cat([order(len(part), n, seed) for n in range(first, max(first, last) + 1)])
        positions = torch.arange(epoch * quota, (epoch + 1) * quota) - first * len(part)
        indices.append(part.start + stream[positions])
        places.append((torch.arange(quota) + 0.5) / max(quota, 1))
    interleaved = torch.cat(indices)[torch.cat(places).argsort(stable=True)]
    return interleaved[order(length, epoch, seed)]


def quotas(parts: Sequence[Part], length: int) -> list[int]:
    """Return the number of prompts of each part in `length` prompts, by the largest remainder."""
    exact = [part.share * length for part in parts]
    counts = [int(share) for share in exact]
    rest = sorted(range(len(parts)), key=lambda i: counts[i] - exact[i])
    for index in rest[: length - sum(counts)]:
        counts[index] += 1
    return counts


class MixedSampler(StatefulSampler):
    """Stateful sampler over parts, each with a sampler, in the ratio of their shares."""

    def __init__(
        self, parts: Sequence[Part], make: Callable[[int, int], StatefulSampler], seed: int
    ) -> None:
        self.parts = parts
        self.samplers = [make(len(part), seed + number) for number, part in enumerate(parts)]
        self.drawn = [0] * len(parts)

    def draw(self, count: int, avoid: Collection[int] = ()) -> list[int]:
        counts = [0] * len(self.parts)
        for _ in range(count):  # the part that is furthest below its share
            total = sum(self.drawn) + 1
            lack = [part.share * total - n for part, n in zip(self.parts, self.drawn, strict=True)]
            chosen = lack.index(max(lack))
            counts[chosen] += 1
            self.drawn[chosen] += 1
        return [
            part.start + index
            for part, sampler, number in zip(self.parts, self.samplers, counts, strict=True)
            for index in self._draw(part, sampler, number, avoid)
        ]

    def observe(self, prompts: Sequence[int], scores: Sequence[float]) -> None:
        pairs = list(zip(prompts, scores, strict=True))
        for part, sampler in zip(self.parts, self.samplers, strict=True):
            inside = [(p - part.start, s) for p, s in pairs if part.start <= p < part.stop]
            sampler.observe([prompt for prompt, _ in inside], [score for _, score in inside])

    def metrics(self) -> dict[str, float]:
        """Return the means of the parts' metrics, weighted by their numbers of prompts."""
        total = self.parts[-1].stop
        every = [sampler.metrics() for sampler in self.samplers]
        pairs = list(zip(self.parts, every, strict=True))
        return {
            name: sum(len(part) * means[name] for part, means in pairs) / total for name in every[0]
        }

    def state_dict(self) -> dict[str, Any]:
        parts = [sampler.state_dict() for sampler in self.samplers]
        return {"drawn": list(self.drawn), "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = list(state["drawn"])
        for sampler, part in zip(self.samplers, state["parts"], strict=True):
            sampler.load_state_dict(part)

    @staticmethod
    def _draw(
        part: Part, sampler: StatefulSampler, count: int, avoid: Collection[int]
    ) -> list[int]:
        """Return indices within the part; a part smaller than `count` repeats prompts."""
        avoided = {row - part.start for row in avoid}
        found: list[int] = []
        while len(found) < count:
            found += sampler.draw(min(count - len(found), len(part)), avoided | set(found))
        return found
