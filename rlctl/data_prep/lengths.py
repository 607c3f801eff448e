"""Prompt lengths in tokens, and removal of prompts that are too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

from rlctl.data_prep.datasets import StreamedRows
from rlctl.data_prep.rows import PromptRow, RowSource

NUM_BINS = 10


@dataclass(frozen=True)
class Lengths:
    """Lengths of all prompts; those longer than `limit` were dropped (None keeps all)."""

    values: Sequence[int]  # one per row, sorted
    limit: int | None

    @property
    def num_dropped(self) -> int:
        """Number of prompts that were dropped."""
        return sum(self.limit is not None and value > self.limit for value in self.values)

    def quantile(self, share: float) -> int:
        """Return the length that a `share` (0 to 1) of the prompts does not exceed."""
        return self.values[round(share * (len(self.values) - 1))]

    def histogram(self) -> list[tuple[int, int, int]]:
        """Return (first, last, count) of at most ten bins of equal width, both bounds inclusive."""
        low = self.values[0]
        high = self.values[-1]
        width = (high - low) // NUM_BINS + 1
        starts = range(low, high + 1, width)
        return [
            (start, start + width - 1, sum(start <= value < start + width for value in self.values))
            for start in starts
        ]


def drop_overlong(
    rows: RowSource, num_tokens: Callable[[PromptRow], int], limit: int | None
) -> tuple[RowSource, Lengths]:
    """Return the rows with at most `limit` prompt tokens, and the lengths of all prompts.

    `num_tokens` counts the tokens of a prompt.
    """
    lengths = [num_tokens(row) for row in rows]
    marks = [limit is None or length <= limit for length in lengths]
    kept = StreamedRows(sum(marks), lambda: compress(rows, marks))
    return kept, Lengths(sorted(lengths), limit)
