"""Running responses of the engine `hf`: rows (R) that join, decode one token a step, and leave."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.model.attention import Packing
from rlctl.runtime.rollout.decoding import Decode, Extension, Prefill
from rlctl.runtime.rollout.fused import Passes
from rlctl.runtime.rollout.hf_rows import Finished, Part, Row, rows_of
from rlctl.runtime.rollout.kv_cache import KVCache, num_saved
from rlctl.runtime.rollout.requests import Completion, Decoding
from rlctl.runtime.rollout.sampling import sample
from rlctl.runtime.rollout.top_log_probs import TopLogProbs

if TYPE_CHECKING:
    from rlctl.runtime.model.vision import SeenPrompt, Vision
    from rlctl.runtime.rollout.graphs import StaticDecoder

# Approximate limit of a forward pass over prompts: more tokens cost memory and save no time.
_PREFILL_TOKENS = 8192
_FIRST_CAPACITY = 64


class _SameDecoding(NamedTuple):
    """Rows that decode alike."""

    decoding: Decoding
    rows: Tensor  # (N,) int64
    stops: Tensor  # (S,) int64: stop tokens


class RunningRows:
    """Rows that are being decoded by passes of a model, and their KV cache.

    All tensors have one row per running response, in the order of the cache; which rows are active
    is tracked on the CPU. Random numbers depend on the row's seed and the position only. `static`
    runs steps of fixed shapes; an empty `cache` lends its memory.
    """

    def __init__(
        self,
        passes: Passes,
        static: StaticDecoder | None = None,
        cache: KVCache | None = None,
    ) -> None:
        self._passes = passes
        self._static = static
        self.device = next(passes.model.parameters()).device
        self.rows: list[Row] = []
        self.cache = cache or KVCache(padded=static is not None)
        self._limits = torch.empty(0, dtype=torch.int64)  # (R,) on the CPU
        self._contexts = torch.empty(0, dtype=torch.int64, device=self.device)  # (R,) next position
        self._groups: list[_SameDecoding] = []
        self._uniforms = torch.empty(0, 0)  # (R, longest limit)
        self._tokens = torch.empty(0, 0, dtype=torch.int64, device=self.device)  # (R, capacity)
        self._log_probs = torch.empty(0, 0, device=self.device)  # (R, capacity)
        self._last = self._contexts  # (R,) last token of each row
        self._logits: Tensor | None = None  # (R, V) of each row's next token
        self._tops = TopLogProbs()

    def __len__(self) -> int:
        """Return the number of running rows."""
        return len(self.rows)

    def join(self, parts: Sequence[Part]) -> None:
        """Prefill the contexts of `parts` and add their rows, in that order."""
        parts = sorted(parts, key=lambda part: part.saved is not None)  # stable
        num_fresh = sum(part.saved is None for part in parts)
        first_row = len(self.rows)
        rows = rows_of(parts)
        lengths = torch.tensor([len(part.request.context_ids) for part in parts])
        per_part = torch.tensor([len(part.indices) for part in parts])
        limits = torch.tensor([row.max_tokens for row in rows])
        first = self.cache.join(lengths, per_part, int(limits.max()))
        seen = [self._passes.seen(part.request) for part in parts]
        logits = self._prefill(parts[:num_fresh], first, seen)
        logits += self._extend(parts[num_fresh:], first + num_fresh)
        joined = torch.cat(logits).repeat_interleave(per_part.to(self.device), 0)
        self._logits = joined if self._logits is None else torch.cat([self._logits, joined])
        self.rows += rows
        self._tops.join(rows)
        self._limits = torch.cat([self._limits, limits])
        # Positions go on after those of images, which may be fewer than their tokens.
        ends = lengths if not any(seen) else torch.tensor([s.next_position for s in seen if s])
        contexts = ends.repeat_interleave(per_part).to(self.device)
        self._contexts = torch.cat([self._contexts, contexts])
        self._add_tables(rows, first_row)

    def step(self) -> list[Finished]:
        """Sample a token for each row; remove and return finished rows. `advance` comes next."""
        assert self._logits is not None
        num_own = self.cache.num_own
        tokens, log_probs = self._sample(self._logits, num_own)
        self._tops.add(self.rows, self._logits)
        self._logits = None
        self._record(tokens, log_probs, num_own)
        stopped = self._stopped(tokens).cpu()
        active = ~stopped & (self._limits > num_own + 1)
        finished: list[Finished] = []
        if not active.all():
            finished = self._finish(~active, stopped)
            tokens = tokens[self._compact(active).to(self.device)]
        self._last = tokens
        return finished

    def advance(self) -> None:
        """Compute the logits of the next token of each row."""
        if self.rows:
            positions = self._contexts + self.cache.num_own.to(self.device)
            self._logits = self._decode(self._last, positions)
            self.cache.advance()

    def progress(self) -> dict[tuple[int, int], int]:
        """Return the number of tokens of each response, by key and index.

        This includes the next one, whose logits are computed.
        """
        counts = zip(self.rows, self.cache.num_own.tolist(), strict=True)
        return {(row.request.key, row.number): count + 1 for row, count in counts}

    def cancel(self, keys: Collection[int]) -> None:
        """Remove the rows of the requests with these keys."""
        active = torch.tensor([row.request.key not in keys for row in self.rows], dtype=torch.bool)
        if active.all():
            return
        assert self._logits is not None, "rows that joined have logits"
        for number in (~active).nonzero().squeeze(1).tolist():
            self._tops.pop(self.rows[number])
        kept = self._compact(active)
        self._logits = self._logits[kept.to(self.device)] if self.rows else None

    def _prefill(
        self, parts: Sequence[Part], first: int, seen: Sequence[SeenPrompt | None]
    ) -> list[Tensor]:
        """Run contexts through the model into groups `first`, …; return logits (G, V) in pieces.

        `seen` are the contexts with their images.
        """
        if not parts:
            return []
        lengths = torch.tensor([len(part.request.context_ids) for part in parts])
        chunk_of_part = (lengths.cumsum(0) - 1).div(_PREFILL_TOKENS, rounding_mode="floor")
        sizes = torch.unique_consecutive(chunk_of_part, return_counts=True)[1].tolist()
        logits = []
        done = 0
        for size in sizes:
            packing = Packing.from_lengths(lengths[done : done + size], self.device)
            attention = Prefill(self.cache, packing, first + done)
            ids = [part.request.context_ids for part in parts[done : done + size]]
            keep = (packing.lengths.cumsum(0) - 1).to(self.device)
            tokens = torch.cat(ids).to(self.device)
            vision = _joined(seen[done : done + size], self.device)
            logits.append(
                self._passes.logits(tokens, packing.position_ids, attention, keep, vision)
            )
            done += size
        return logits

    def _extend(self, parts: Sequence[Part], first: int) -> list[Tensor]:
        """Run the rest of contexts that begin with a saved cache; return logits (G, V)."""
        if not parts:
            return []
        held = []
        chunks = []
        for group, part in enumerate(parts, first):
            assert part.saved is not None
            self.cache.restore(group, part.saved)
            held.append(num_saved(part.saved))
            chunks.append(part.request.context_ids[held[-1] :])
        attention = Extension(self.cache, first, held, [len(chunk) for chunk in chunks])
        keep = (torch.tensor(attention.chunks).cumsum(0) - 1).to(self.device)
        positions = attention.positions().to(self.device)
        ids = torch.cat(chunks).to(self.device)
        return [self._passes.logits(ids, positions, attention, keep)]

    def _decode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits (R, V) of the next token of each row, from its last one (R,)."""
        if self._static is not None:
            logits = self._static.decode(tokens, positions, self.cache)
            if logits is not None:
                return logits
        return self._passes.logits(tokens, positions, Decode(self.cache, self.cache))

    def _add_tables(self, rows: Sequence[Row], first: int) -> None:
        """Add `rows` from row `first` on to the tables of random numbers and of responses."""
        self._groups = _by_decoding(self.rows, self.device)
        longest = max(row.max_tokens for row in rows)
        self._uniforms = _with_shape(self._uniforms, len(self.rows), longest)
        generator = torch.Generator()
        for number, row in enumerate(rows, first):
            if row.request.decoding.temperature > 0:
                generator.manual_seed(row.request.seeds[row.number])
                self._uniforms[number, : row.max_tokens].uniform_(generator=generator)
        width = max(self._tokens.shape[1], min(_FIRST_CAPACITY, longest))
        self._tokens = _with_shape(self._tokens, len(self.rows), width)
        self._log_probs = _with_shape(self._log_probs, len(self.rows), width)

    def _sample(self, logits: Tensor, num_own: Tensor) -> tuple[Tensor, Tensor]:
        """Sample the next token of each row: logits (R, V) -> (R,) int64, (R,) float32."""
        draws = self._uniforms[torch.arange(len(num_own)), num_own].to(self.device)
        if len(self._groups) == 1:
            return sample(logits, draws, self._groups[0].decoding)
        tokens = torch.empty(len(draws), dtype=torch.int64, device=self.device)
        log_probs = torch.empty(len(draws), device=self.device)
        for decoding, rows, _ in self._groups:
            tokens[rows], log_probs[rows] = sample(logits[rows], draws[rows], decoding)
        return tokens, log_probs

    def _stopped(self, tokens: Tensor) -> Tensor:
        """Return a mask (R,) of the rows whose new token (R,) is one of their stop tokens."""
        if len(self._groups) == 1:
            return (tokens[:, None] == self._groups[0].stops).any(1)
        stopped = torch.zeros(len(tokens), dtype=torch.bool, device=self.device)
        for _, rows, stops in self._groups:
            stopped[rows] = (tokens[rows, None] == stops).any(1)
        return stopped

    def _record(self, tokens: Tensor, log_probs: Tensor, num_own: Tensor) -> None:
        """Append a token (R,) and its log-prob (R,) to each response."""
        longest = int(num_own.max()) + 1
        capacity = self._tokens.shape[1]
        if longest > capacity:
            self._tokens = _with_shape(self._tokens, len(tokens), 2 * capacity)
            self._log_probs = _with_shape(self._log_probs, len(tokens), 2 * capacity)
        rows = torch.arange(len(tokens), device=self.device)
        column = num_own.to(self.device)
        self._tokens[rows, column] = tokens
        self._log_probs[rows, column] = log_probs

    def _finish(self, done: Tensor, stopped: Tensor) -> list[Finished]:
        """Return the finished rows, where `done` (R,) is True."""
        numbers = done.nonzero().squeeze(1)
        lengths = self.cache.num_own[numbers] + 1
        on_device = numbers.to(self.device)
        width = int(lengths.max())
        tokens = Ragged.from_padded(self._tokens[on_device, :width].cpu(), lengths)
        log_probs = Ragged.from_padded(self._log_probs[on_device, :width].cpu(), lengths)
        finished = []
        for number, stop, ids, log_prob in zip(
            numbers.tolist(),
            stopped[numbers].tolist(),
            tokens.rows(),
            log_probs.rows(),
            strict=True,
        ):
            row = self.rows[number]
            keeps = row.request.keep and not self.cache.has_states
            saved = self.cache.save(number) if keeps else None
            reason = "stop" if stop else "length"
            top = self._tops.pop(row)
            completion = Completion(row.request.key, row.number, ids, log_prob, reason, top=top)
            finished.append(Finished(row, completion, saved))
        return finished

    def _compact(self, active: Tensor) -> Tensor:
        """Keep the rows where `active` (R,) is True; return their old indices (R',)."""
        kept, free, moved = self.cache.compact(active)
        on_device, from_device = free.to(self.device), moved.to(self.device)
        for table in (self._tokens, self._log_probs):
            table[on_device] = table[from_device]
        self._uniforms[free] = self._uniforms[moved]
        self._limits = self._limits[kept]
        self._contexts = self._contexts[kept.to(self.device)]
        self.rows = [self.rows[i] for i in kept.tolist()]
        if len(self._groups) > 1:
            self._groups = _by_decoding(self.rows, self.device)
        return kept


def _by_decoding(rows: Sequence[Row], device: torch.device) -> list[_SameDecoding]:
    """Group the numbers of `rows` by their way of decoding."""
    numbers: dict[Decoding, list[int]] = {}
    for number, row in enumerate(rows):
        numbers.setdefault(row.request.decoding, []).append(number)
    return [
        _SameDecoding(
            decoding,
            torch.tensor(same, device=device),
            torch.tensor(decoding.stop_token_ids, dtype=torch.int64, device=device),
        )
        for decoding, same in numbers.items()
    ]


def _with_shape(table: Tensor, rows: int, width: int) -> Tensor:
    """Return a table (≥ rows, ≥ width) that begins with the values of `table`."""
    if table.shape[0] >= rows and table.shape[1] >= width:
        return table
    if table.numel() and table.shape[0] < rows:
        rows += rows // 4
    larger = table.new_empty(max(rows, table.shape[0]), max(width, table.shape[1]))
    larger[: table.shape[0], : table.shape[1]] = table
    return larger


def _joined(seen: Sequence[SeenPrompt | None], device: torch.device) -> Vision | None:
    """Return the images of the contexts `seen`, None without any."""
    with_tower = [prompt for prompt in seen if prompt is not None]
    if not with_tower:
        return None
    from rlctl.runtime.model.vision import join_vision

    return join_vision(with_tower, None, device)
