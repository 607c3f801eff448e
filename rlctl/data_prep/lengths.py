"""How long prompts are, in tokens of the model that will read them, and dropping those that are too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlctl.data_prep.rows import PromptRow

NUM_BINS = 10


@dataclass(frozen=True)
class Lengths:
    """The lengths of all prompts, and how many of them were dropped for being longer than `limit` (None: nothing is too long)."""

    values: Sequence[int]  # one a row, sorted
    limit: int | None

    @property
    def num_dropped(self) -> int:
        return sum(self.limit is not None and value > self.limit for value in self.values)

    def quantile(self, share: float) -> int:
        """The length that `share` (0 to 1) of the prompts do not exceed."""
        return self.values[round(share * (len(self.values) - 1))]

    def histogram(self) -> list[tuple[int, int, int]]:
        """(first, last, count) of at most ten bins of equal width that cover all lengths; bounds are inclusive."""
        low, high = self.values[0], self.values[-1]
        width = (high - low) // NUM_BINS + 1
        starts = range(low, high + 1, width)
        return [
            (start, start + width - 1, sum(start <= value < start + width for value in self.values))
            for start in starts
        ]


def drop_overlong(
    rows: Sequence[PromptRow], num_tokens: Callable[[list[dict[str, str]]], int], limit: int | None
) -> tuple[list[PromptRow], Lengths]:
    """The rows whose prompt has at most `limit` tokens, as `num_tokens` counts a chat, and the lengths of all."""
    lengths = [num_tokens(row.prompt) for row in rows]
    kept = [
        row for row, length in zip(rows, lengths, strict=True) if limit is None or length <= limit
    ]
    return kept, Lengths(sorted(lengths), limit)
