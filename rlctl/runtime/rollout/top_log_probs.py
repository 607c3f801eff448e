"""Most probable tokens of each step of running responses, for requests that ask for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from rlctl.runtime.rollout.hf_rows import Row

Top = tuple[tuple[int, float], ...]  # ids and log-probs of tokens


class TopLogProbs:
    """Tokens with the largest log-probs under `log_softmax(logits / temperature)`, by response."""

    def __init__(self) -> None:
        self._tops: dict[tuple[int, int], list[Top]] = defaultdict(list)
        self._is_used = False

    def join(self, rows: Sequence[Row]) -> None:
        """Record steps from now on if one of the new `rows` asks for them."""
        self._is_used = self._is_used or any(row.request.num_top for row in rows)

    def add(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Record a step of `rows` from their logits (R, V)."""
        if not self._is_used:
            return
        for number, row in enumerate(rows):
            if not row.request.num_top:
                continue
            scaled = logits[number].float() / (row.request.decoding.temperature or 1.0)
            best = scaled.log_softmax(-1).topk(min(row.request.num_top, len(scaled)))
            top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            self._tops[row.request.key, row.number].append(tuple(top))

    def pop(self, row: Row) -> tuple[Top, ...]:
        """Remove and return the steps of a response."""
        return tuple(self._tops.pop((row.request.key, row.number), ()))
