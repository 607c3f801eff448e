"""Data model of a training step: ragged per-token fields and the stages of a batch.

`Prompts → Rollouts → Scored → Experience`: each stage is a frozen dataclass that adds fields to the
previous one. Per-token fields are `Ragged`, so memory and transfers scale with actual tokens.
Axes: B rows (responses, or prompts before generation), T tokens of all rows, R of the longest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from rlctl.data_prep.rows import PromptRow
from rlctl.runtime.base.ops import to_device
from rlctl.runtime.base.ragged import Packed
from rlctl.runtime.base.ragged import Ragged as Ragged

if TYPE_CHECKING:
    from rlctl.episodes import Episode

B = TypeVar("B", bound="Batch")
N = TypeVar("N", bound="Batch")

# Metadata of a field that stays on the controller: workers receive an empty list instead.
_LOCAL: dict[str, bool] = {"local": True}


def _take(value: Any, index: Tensor) -> Any:
    """Copy the rows at `index` (N,) of a field of B rows."""
    if isinstance(value, Ragged):
        return value.select(index)
    if isinstance(value, Tensor):
        return value[index]
    if isinstance(value, dict):
        return {name: _take(part, index) for name, part in value.items()}
    return [value[i] for i in index.tolist()] if value else value


def _join(values: Sequence[Any]) -> Any:
    """Concatenate the rows of one field of several batches."""
    if (first := values[0]) is None:
        return None
    if isinstance(first, Ragged):
        return first.joined(values[1:])
    if isinstance(first, Tensor):
        return torch.cat(list(values))
    if isinstance(first, dict):
        return {name: _join([v[name] for v in values]) for name in first}
    return [item for value in values for item in value]


def _to(value: Any, device: torch.device | str) -> Any:
    """Move a field to `device`; lists and None stay."""
    if isinstance(value, dict):
        return {name: _to(part, device) for name, part in value.items()}
    if isinstance(value, Tensor):
        return to_device(value, device)
    return value.to(device) if isinstance(value, Ragged) else value


@dataclass(frozen=True, eq=False)
class Batch:
    """Base class of frozen batches of B rows, in the same order in every field.

    A field is a Ragged of B rows, a Tensor (B, ...), a dict of those, a list of length B, or None.
    """

    def __len__(self) -> int:
        """Return the number of rows B."""
        return len(getattr(self, dataclasses.fields(self)[0].name))

    def select(self, index: Tensor) -> Self:
        """Copy the rows at `index` (N,) int64; pickling a view would send the entire batch."""
        return type(self)(**{name: _take(value, index) for name, value in self._fields().items()})

    def repeat(self, times: int) -> Self:
        """Repeat each row `times` times; copies of a row are adjacent: (B,) -> (B·times,)."""
        return self.select(torch.arange(len(self)).repeat_interleave(times))

    @staticmethod
    def concat(batches: Sequence[B]) -> B:
        """Concatenate the rows of batches of the same class, in order."""
        kind = type(batches[0])
        fields = dataclasses.fields(batches[0])
        return kind(**{f.name: _join([getattr(b, f.name) for b in batches]) for f in fields})

    def chunk(self, parts: Sequence[Tensor]) -> list[Self]:
        """Return one batch per index tensor (N,) int64 in `parts`; each is a copy."""
        return [self.select(index) for index in parts]

    def grow(self, into: type[N], **fields: Any) -> N:
        """Create the next stage: the same rows as class `into`, with new `fields` added."""
        return into(**self._fields(), **fields)

    def without_local(self) -> Self:
        """Return a copy to send to workers, with controller-only fields (`rows`) emptied."""
        empty = {f.name: [] for f in dataclasses.fields(self) if f.metadata.get("local")}
        return dataclasses.replace(self, **empty)

    def with_local_from(self, owner: Batch) -> Self:
        """Restore controller-only fields from `owner`; k adjacent rows may have one of its rows."""
        times = len(self) // max(len(owner), 1)
        local = {
            f.name: [item for item in getattr(owner, f.name) for _ in range(times)]
            for f in dataclasses.fields(self)
            if f.metadata.get("local") and hasattr(owner, f.name)
        }
        return dataclasses.replace(self, **local)

    def to(self, device: torch.device | str) -> Self:
        """Return the same batch with all tensors on `device`."""
        return type(self)(**{name: _to(value, device) for name, value in self._fields().items()})

    @property
    def is_stored(self) -> bool:
        """True if the values of any ragged field are stored elsewhere; see `batch.stored`."""
        values = self._fields().values()
        return any(isinstance(value, Ragged) and type(value) is not Ragged for value in values)

    def _fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle tensors in the smallest exact type, as arrays: torch's way is slower."""
        return _rebuilt, (type(self), {name: _pack(v) for name, v in self._fields().items()})


def _rebuilt(kind: type[B], fields: dict[str, Any]) -> B:
    return kind(**{name: _unpack(value) for name, value in fields.items()})


def _pack(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _pack(part) for name, part in value.items()}
    return Packed.from_tensor(value) if isinstance(value, Tensor) else value


def _unpack(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _unpack(part) for name, part in value.items()}
    return value.tensor() if isinstance(value, Packed) else value


@dataclass(frozen=True, eq=False)
class Prompts(Batch):
    """Stage 1: prompts. Rows of the same prompt share a `group` and are adjacent."""

    prompt_ids: Ragged  # (B rows) int64
    group: Tensor  # (B,) int64: index of the prompt in its batch
    rows: list[PromptRow] = dataclasses.field(metadata=_LOCAL)  # B; empty on workers
    # B: files of the images of each prompt, which rows share; no entries: no prompt has any.
    images: list[tuple[bytes, ...]] = dataclasses.field(default_factory=list, kw_only=True)


@dataclass(frozen=True, eq=False)
class Rollouts(Prompts):
    """Stage 2: sampled responses; that of an episode has its turns and the replies between them."""

    response_ids: Ragged  # (B rows) int64
    response_mask: Ragged  # (B rows) float32: 1 = sampled by the policy, 0 = tool output
    rollout_log_probs: Ragged  # (B rows) float32, as reported by the rollout engine
    finish: list[str] = dataclasses.field(metadata=_LOCAL)  # B: "stop" or "length"; not on workers
    # (B rows) int64: weights that wrote each token, in updates of the policy since the run began.
    versions: Ragged | None = dataclasses.field(default=None, kw_only=True)
    # Of episodes: turn of each token, int64; rewards of turns.
    turn: Ragged | None = dataclasses.field(default=None, kw_only=True)
    step_rewards: Ragged | None = dataclasses.field(default=None, kw_only=True)
    candidates: Ragged | None = dataclasses.field(default=None, kw_only=True)  # (T, K) token ids
    # Of asynchronous runs: steps that the weights of each token are older than the newest, int64.
    staleness: Ragged | None = dataclasses.field(default=None, kw_only=True)
    # Of mixtures: experts of each token of prompt and response, (N, L, K), for router replay.
    routing: Ragged | None = dataclasses.field(default=None, kw_only=True)
    episodes: list[Episode] = dataclasses.field(default_factory=list, kw_only=True, metadata=_LOCAL)

    @cached_property
    def num_tokens(self) -> Tensor:
        """Prompt plus response tokens of each row: (B,) int64."""
        return self.prompt_ids.lengths + self.response_ids.lengths

    @cached_property
    def episode_of_row(self) -> Tensor:
        """Number of each row's episode, from 0: (B,) int64. A plain response is an episode."""
        if not self.episodes:
            return torch.arange(len(self))
        # The rows of an episode share its record.
        numbers: dict[int, int] = {}
        return torch.tensor(
            [numbers.setdefault(id(episode), len(numbers)) for episode in self.episodes]
        )


@dataclass(frozen=True, eq=False)
class Scored(Rollouts):
    """Stage 3: one score per response, its components, and the answers extracted (B, or none)."""

    scores: Tensor  # (B,) float32
    components: dict[str, Tensor]  # name -> (B,) float32; NaN: the row has no such component
    failed: Tensor  # (B,) bool: the reward function raised, timed out or returned no number
    greedy_scores: Tensor | None = dataclasses.field(default=None, kw_only=True)  # (B,), ReMax
    preds: list[str | None] = dataclasses.field(default_factory=list, kw_only=True, metadata=_LOCAL)


@dataclass(frozen=True, eq=False)
class Experience(Scored):
    """Stage 4: input of an update. Optional fields are None if the algorithm does not use them.

    Rollout correction also sets `response_mask` to 0 for the tokens that it rejects. Without
    `old_log_probs` an update compares the policy with itself: its pass computes them.
    """

    rewards: Ragged  # (B rows) float32
    old_log_probs: Ragged | None  # (B rows) float32
    advantages: Ragged  # (B rows) float32
    ref_log_probs: Ragged | None = None  # (B rows) float32
    values: Ragged | None = None  # (B rows) float32
    returns: Ragged | None = None  # (B rows) float32
    is_weights: Ragged | None = None  # (B rows) float32: importance weights of rollout correction
    # (B, 2) float64, equal rows: number of rows and of unmasked tokens of the mini-batch that these
    # rows are a part of; None: it has no others, or the loss does not need them.
    sizes: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LogProbs(Batch):
    """Log-probs of the response tokens under a policy."""

    log_probs: Ragged  # (B rows) float32
    entropy: Ragged | None  # (B rows) float32, nats
    sum_pi_squared: Ragged | None = None  # (B rows) float32: Σ_v π(v)²
    candidates: Ragged | None = None  # (T, K) int64: the most probable tokens, best first
    candidate_log_probs: Ragged | None = None  # (T, K) float32
    routing: Ragged | None = None  # (N, L, K): experts of all tokens, where they are recorded


@dataclass(frozen=True, eq=False)
class Scores(Batch):
    """Output of the reward functions: the fields that turn `Rollouts` into `Scored`."""

    scores: Tensor  # (B,) float32
    components: dict[str, Tensor]  # name -> (B,) float32; NaN: the row has no such component
    failed: Tensor  # (B,) bool
    preds: list[str | None] = dataclasses.field(default_factory=list)  # B, or empty
    # (B rows) float32: rewards of turns as parts of the scores; None: those of the rollouts.
    step_rewards: Ragged | None = None

    def to_scored(self, rollouts: Rollouts) -> Scored:
        """Attach the scores to the B `rollouts` that they were computed for."""
        fields = self._fields()
        step_rewards = fields.pop("step_rewards") or rollouts.step_rewards
        return dataclasses.replace(rollouts, step_rewards=step_rewards).grow(Scored, **fields)
