"""Micro-batch limits, and their reduction after out-of-memory errors."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.causes import is_cpu_oom
from rlctl.errors import DeviceMemoryError
from rlctl.recipes import schema
from rlctl.runtime.base.balance import TokenCounts, micro_batches
from rlctl.runtime.base.ops import ceil_div

_MAX_RETRIES = 3


@dataclass(frozen=True)
class OomRetry:
    """Reduction of a micro-batch limit after an out-of-memory error."""

    key: str  # config key of the limit
    before: int
    after: int
    unit: str  # "tokens" or "rows"

    def __str__(self) -> str:
        """Describe the reduction in one sentence."""
        return (
            f"out of memory with {self.before} {self.unit} at a time: "
            f"retrying with {self.key}={self.after}"
        )


class Budget:
    """Micro-batch limit in tokens or rows; halved after an out-of-memory error.

    Args:
        key: config key that sets the limit, for messages.
        value: initial limit, ≥ 1.
        unit: "tokens" or "rows".
        ranks_per_row: ranks that each compute a part of a row's tokens; a limit in tokens is that
            of one rank.
    """

    def __init__(self, key: str, value: int, unit: str, ranks_per_row: int = 1) -> None:
        self.ranks_per_row = ranks_per_row
        self.key = key
        self.value = self.size = value
        self.unit = unit
        self.by_rows = unit == "rows"
        self.num_retries = 0

    @classmethod
    def of_updates(cls, section: str, settings: schema.Updates, ranks_per_row: int) -> Budget:
        """Build the limit of a role that learns, whose settings are those of `section`."""
        rows = settings.ppo_micro_batch_size_per_gpu
        if settings.use_dynamic_bsz or rows is None:
            key = f"{section}.ppo_max_token_len_per_gpu"
            return cls(key, settings.ppo_max_token_len_per_gpu, "tokens", ranks_per_row)
        return cls(f"{section}.ppo_micro_batch_size_per_gpu", rows, "rows", ranks_per_row)

    @classmethod
    def of_log_probs(
        cls, section: str, settings: schema.Rollout | schema.Ref, ranks_per_row: int
    ) -> Budget:
        """Build the limit of passes for log-probs, whose settings are those of `section`."""
        rows = settings.log_prob_micro_batch_size_per_gpu
        if settings.log_prob_use_dynamic_bsz or rows is None:
            key = f"{section}.log_prob_max_token_len_per_gpu"
            return cls(key, settings.log_prob_max_token_len_per_gpu, "tokens", ranks_per_row)
        return cls(f"{section}.log_prob_micro_batch_size_per_gpu", rows, "rows", ranks_per_row)

    def cut(self, counts: TokenCounts, at_least: int = 1) -> list[Tensor]:
        """Split B rows into micro-batches: (N,) int64 indices each.

        Returns at least `at_least` of them, or B if there are fewer rows.
        """
        if not self.by_rows:
            return micro_batches(counts, self.size * self.ranks_per_row, at_least)
        order = counts.order().flip(0)
        parts = max(at_least, ceil_div(len(order), self.size))
        return list(order.tensor_split(min(parts, len(order))))

    def halve(self, parts: Sequence[Tensor], failed: int, alone: bool, reason: str) -> OomRetry:
        """Halve the limit after an out-of-memory error in `parts[failed]`.

        `parts` are the tokens of each micro-batch's rows, (N,) int64. The new limit is half of the
        largest micro-batch.

        Raises:
            DeviceMemoryError: for a single row, after three retries, or unless the rank is `alone`:
                other ranks wait in a collective, so the retry cannot be coordinated.
        """
        if len(parts[failed]) == 1:
            raise DeviceMemoryError(
                f"out of memory with a single row of {int(parts[failed].sum())} tokens; "
                f"a smaller {self.key} does not help",
                key=self.key,
                value=self.value,
                proposed=None,
                where=reason,
                hint="set a shorter data.max_response_length or the model's "
                "enable_gradient_checkpointing=true, or use more ranks or a larger device: "
                "`rlctl fit --run @failed` finds settings that fit",
            )
        sizes = (
            len(part) if self.by_rows else ceil_div(int(part.sum()), self.ranks_per_row)
            for part in parts
        )
        before = min(self.size, max(sizes))
        after = before // 2
        if not alone or self.num_retries == _MAX_RETRIES:
            why = "it cannot be halved while running on several ranks"
            if alone:
                why = f"already halved {_MAX_RETRIES} times"
            raise DeviceMemoryError(
                f"out of memory with {before} {self.unit} at a time "
                f"({self.key}={self.value}): {why}",
                key=self.key,
                value=self.value,
                proposed=after,
                where=reason,
                hint=f"rlctl resume @failed {self.key}={after} (`--retries 3` does it by itself); "
                "`rlctl fit --run @failed` finds settings that fit",
            )
        self.num_retries += 1
        self.size = after
        return OomRetry(self.key, before, after, self.unit)


def is_oom(error: RuntimeError) -> bool:
    """Return True if `error` is an out-of-memory error of torch (a plain RuntimeError on a CPU)."""
    return isinstance(error, torch.OutOfMemoryError) or is_cpu_oom(error)


def free_memory(device: str) -> None:
    """Collect garbage and release torch's cached memory back to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
