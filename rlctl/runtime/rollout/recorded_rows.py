"""Running responses of the engine `hf` whose experts are recorded, for router replay.

Axes: N tokens, L layers with a mixture, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlctl.runtime.model.routing import Routers
from rlctl.runtime.rollout.fused import Passes
from rlctl.runtime.rollout.graphs import StaticDecoder
from rlctl.runtime.rollout.hf_rows import Finished, Part
from rlctl.runtime.rollout.kv_cache import KVCache, num_saved
from rlctl.runtime.rollout.running import RunningRows


class RecordedRows(RunningRows):
    """`RunningRows` that keep the experts of every token that is computed.

    Tokens of a cache of an earlier request have been recorded then. A response that continues under
    new weights keeps the record of its first tokens.
    """

    def __init__(
        self,
        passes: Passes,
        static: StaticDecoder | None = None,
        cache: KVCache | None = None,
    ) -> None:
        super().__init__(passes, static, cache)
        self._routers = Routers.of(passes.model)
        self._records: dict[tuple[int, int], list[Tensor]] = {}  # (N, L, K), by key and index

    def join(self, parts: Sequence[Part]) -> None:
        with self._routers.recording() as recording:
            super().join(parts)
        # Contexts without a cache are computed first.
        parts = sorted(parts, key=lambda part: part.saved is not None)
        held = [0 if part.saved is None else num_saved(part.saved) for part in parts]
        new = [len(p.request.context_ids) - n for p, n in zip(parts, held, strict=True)]
        found = recording.choices().cpu().split(new)
        for part, num_held, routing in zip(parts, held, found, strict=True):
            context = torch.cat([self._routers.shape.none(num_held), routing])
            for index in part.indices:
                self._records[part.request.key, index] = [context]

    def advance(self) -> None:
        with self._routers.recording() as recording:
            super().advance()
        if self.rows:
            tokens = recording.choices().cpu().split(1)
            for row, token in zip(self.rows, tokens, strict=True):
                self._records[row.request.key, row.number].append(token)

    def step(self) -> list[Finished]:
        """See `RunningRows`. The last token of a response is not computed, and has no record."""
        finished = super().step()
        for place, response in enumerate(finished):
            record = self._records.pop((response.row.request.key, response.row.number))
            routing = torch.cat([*record, self._routers.shape.none(1)])
            completion = replace(response.completion, routing=routing)
            finished[place] = response._replace(completion=completion)
        return finished

    def cancel(self, keys: Collection[int]) -> None:
        super().cancel(keys)
        self._records = {row: tokens for row, tokens in self._records.items() if row[0] not in keys}
