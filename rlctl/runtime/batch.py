"""Ragged per-token fields and the stages of a batch.

`Prompts → Rollouts → Scored → Experience`: each stage is a frozen dataclass that adds fields to the one before. Per-token fields are
`Ragged`: one flat tensor of values and the lengths of the rows, so that memory and transfers follow the tokens that exist. B is the
number of rows, T the number of tokens of all rows together, R the length of the longest row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from rlctl.data_prep.rows import PromptRow


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths, end to end: `values` (T, ...) and `lengths` (B,) int64 with `lengths.sum() == T`."""

    values: Tensor
    lengths: Tensor

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Sequence[int] | Sequence[float] | Tensor],
        dtype: torch.dtype | None = None,
    ) -> Ragged:
        """From one list or tensor a row."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        parts = [torch.as_tensor(row, dtype=dtype) for row in rows if len(row)]
        return cls(
            torch.cat(parts) if parts else torch.empty(0, dtype=dtype or torch.float32), lengths
        )

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> Ragged:
        """From a right-padded (B, R, ...): what stands behind a row's length is dropped."""
        keep = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]  # (B, R)
        return cls(padded[keep], lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def offsets(self) -> Tensor:
        """Where each row starts, and the end of the last: (B + 1,)."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @cached_property
    def row_of_token(self) -> Tensor:
        """The row each token belongs to: (T,)."""
        return torch.arange(len(self), device=self.lengths.device).repeat_interleave(self.lengths)

    def rows(self) -> list[Tensor]:
        """One view a row."""
        return list(self.values.split(self.lengths.tolist()))

    def like(self, values: Tensor) -> Ragged:
        """Other values for the same rows; `values` is (T, ...)."""
        if len(values) != len(self.values):
            raise ValueError(f"{len(values)} values for {len(self.values)} tokens")
        return Ragged(values, self.lengths)

    def padded(self, fill: float = 0.0, width: int | None = None) -> Tensor:
        """The rectangle (B, R, ...), padded on the right with `fill`."""
        longest = int(self.lengths.max()) if len(self) else 0
        out = self.values.new_full(
            (len(self), longest if width is None else width, *self.values.shape[1:]), fill
        )
        out[self.mask(out.shape[1])] = self.values
        return out

    def mask(self, width: int | None = None) -> Tensor:
        """True where the rectangle of `padded` holds a token: (B, R)."""
        width = (int(self.lengths.max()) if len(self) else 0) if width is None else width
        return torch.arange(width, device=self.lengths.device) < self.lengths[:, None]

    def sums(self) -> Tensor:
        """The sum of each row: (B,). Rows without tokens give 0."""
        return self.values.new_zeros(len(self)).index_add_(0, self.row_of_token, self.values)

    def select(self, index: Tensor) -> Ragged:
        """The rows at `index` (int64), in that order, as a copy."""
        lengths = self.lengths[index]
        starts = self.offsets[:-1][index]
        shift = starts - torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1]
        positions = torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)
        return Ragged(self.values[positions], lengths)

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(self.values.to(device), self.lengths.to(device))


def concat_ragged(first: Ragged, second: Ragged) -> Ragged:
    """Row by row, `first` then `second`: prompt and response as one sequence."""
    both = Ragged(
        torch.cat([first.values, second.values]), torch.cat([first.lengths, second.lengths])
    )
    num_rows = len(first)
    order = (
        torch.arange(2 * num_rows).view(2, num_rows).T.reshape(-1)
    )  # row 0 of first, row 0 of second, row 1 of first, ...
    return Ragged(both.select(order).values, first.lengths + second.lengths)


B = TypeVar("B", bound="Batch")
N = TypeVar("N", bound="Batch")

_LOCAL: dict[str, bool] = {
    "local": True
}  # marks a field that stays with the controller: workers get an empty one


def _take(value: Any, index: Tensor) -> Any:
    if value is None:
        return None
    if isinstance(value, Ragged):
        return value.select(index)
    if isinstance(value, Tensor):
        return value[index]
    if isinstance(value, dict):
        return {name: _take(part, index) for name, part in value.items()}
    return [value[i] for i in index.tolist()] if value else value


def _join(values: Sequence[Any]) -> Any:
    first = values[0]
    if first is None:
        return None
    if isinstance(first, Ragged):
        return Ragged(torch.cat([v.values for v in values]), torch.cat([v.lengths for v in values]))
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first, dict):
        return {name: _join([v[name] for v in values]) for name in first}
    return [item for value in values for item in value]


def _to(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, dict):
        return {name: _to(part, device) for name, part in value.items()}
    return value.to(device) if isinstance(value, Ragged | Tensor) else value


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows. A field is Ragged (per token), a Tensor (B, ...), a dict of those, or a list of B; None where a config has no use for it."""

    def __len__(self) -> int:
        raise NotImplementedError

    def select(self, index: Tensor) -> Self:
        """The rows at `index` (int64), in that order. Always a copy: a pickled view would carry its whole storage."""
        return type(self)(
            **{f.name: _take(getattr(self, f.name), index) for f in dataclasses.fields(self)}
        )

    def repeat(self, times: int) -> Self:
        """Each row `times` times, one behind the other."""
        return self.select(torch.arange(len(self)).repeat_interleave(times))

    @staticmethod
    def concat(batches: Sequence[B]) -> B:
        """The rows of all, in order."""
        cls = type(batches[0])
        return cls(
            **{
                f.name: _join([getattr(b, f.name) for b in batches])
                for f in dataclasses.fields(cls)
            }
        )

    def chunk(self, parts: Sequence[Tensor]) -> list[Self]:
        """One batch for each index tensor in `parts`."""
        return [self.select(index) for index in parts]

    def grow(self, into: type[N], **fields: Any) -> N:
        """The same rows one stage later: the fields there are, and `fields` new ones."""
        present = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return into(**present, **fields)

    def without_local(self) -> Self:
        """Without what only the controller needs; this is what is sent to workers."""
        empty = {f.name: [] for f in dataclasses.fields(self) if f.metadata.get("local")}
        return dataclasses.replace(self, **empty)

    def with_local_from(self, owner: Batch) -> Self:
        """With the controller's own fields taken back from `owner`, whose rows are the same."""
        own = {
            f.name: getattr(owner, f.name)
            for f in dataclasses.fields(self)
            if f.metadata.get("local") and hasattr(owner, f.name)
        }
        return dataclasses.replace(self, **own)

    def to(self, device: torch.device | str) -> Self:
        return type(self)(
            **{f.name: _to(getattr(self, f.name), device) for f in dataclasses.fields(self)}
        )


@dataclass(frozen=True, eq=False)
class Prompts(Batch):
    """What is asked. Rows of one prompt share a `group` and stand side by side."""

    prompt_ids: Ragged  # (B rows) int64
    group: Tensor  # (B,) int64: the prompt's number in its batch
    rows: list[PromptRow] = dataclasses.field(metadata=_LOCAL)  # B

    def __len__(self) -> int:
        return len(self.group)


@dataclass(frozen=True, eq=False)
class Rollouts(Prompts):
    """What was answered. `response_mask` is 1 where the policy wrote the token, 0 where a tool did."""

    response_ids: Ragged  # (B rows) int64
    response_mask: Ragged  # (B rows) float32
    rollout_log_probs: Ragged  # (B rows) float32, by the engine that sampled them
    finish: list[str]  # B: "stop" or "length"

    @cached_property
    def num_tokens(self) -> Tensor:
        """Prompt and response tokens of each row: (B,)."""
        return self.prompt_ids.lengths + self.response_ids.lengths


@dataclass(frozen=True, eq=False)
class Scored(Rollouts):
    """What it was worth: one score a row, and the components it was made of."""

    scores: Tensor  # (B,) float32
    components: dict[str, Tensor]  # name -> (B,) float32
    failed: (
        Tensor  # (B,) bool: the reward function raised, hung or answered nonsense; the score is 0
    )
    greedy_scores: Tensor | None = dataclasses.field(
        default=None, kw_only=True
    )  # (B,) of a greedy answer to the row's prompt


@dataclass(frozen=True, eq=False)
class Experience(Scored):
    """What a worker learns from. `response_mask` is 0 also where rollout correction leaves a token out. The last four are None where the
    algorithm has no use for them.
    """

    rewards: Ragged  # (B rows) float32, per token
    old_log_probs: Ragged  # (B rows) float32
    advantages: Ragged  # (B rows) float32
    ref_log_probs: Ragged | None = None
    values: Ragged | None = None
    returns: Ragged | None = None
    is_weights: Ragged | None = None  # importance weights of rollout correction


@dataclass(frozen=True, eq=False)
class LogProbs(Batch):
    """What a policy says of the response tokens."""

    log_probs: Ragged  # (B rows) float32
    entropy: Ragged | None  # (B rows) float32, nats
    sum_pi_squared: Ragged | None = None  # (B rows) float32

    def __len__(self) -> int:
        return len(self.log_probs)


@dataclass(frozen=True, eq=False)
class Scores(Batch):
    """What the reward functions say of the answers: the fields that make `Rollouts` into `Scored`."""

    scores: Tensor
    components: dict[str, Tensor]
    failed: Tensor

    def __len__(self) -> int:
        return len(self.scores)

    def to_scored(self, rollouts: Rollouts) -> Scored:
        return rollouts.grow(
            Scored, scores=self.scores, components=self.components, failed=self.failed
        )
