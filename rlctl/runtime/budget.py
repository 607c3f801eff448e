"""How much is computed at a time, and what becomes of that where the device's memory does not suffice."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.errors import DeviceMemoryError
from rlctl.runtime.balance import micro_batches
from rlctl.runtime.ops import ceil_div

_MOST_HALVINGS = 3


@dataclass(frozen=True)
class OomRetry:
    """What a budget was, in `unit`s, when memory did not suffice, and what it is since."""

    key: str
    before: int
    after: int
    unit: str

    def __str__(self) -> str:
        return f"{self.before} {self.unit} at a time are too many for the device's memory: {self.key} is {self.after} from now on"


class Budget:
    """The most that is computed at a time, in tokens or in rows. It only ever shrinks.

    `key` of the configuration says what it is in the beginning: `value`.
    """

    def __init__(self, key: str, value: int, unit: str) -> None:
        self.key = key
        self.value = self.size = value
        self.unit = unit
        self.by_rows = unit == "rows"
        self.halvings = 0

    @classmethod
    def for_passes(cls, section: str, passes: str, max_tokens: int, max_rows: int | None) -> Budget:
        """The largest micro-batch of a role: in tokens, or in rows where a number of rows is given."""
        name, value, unit = (
            ("max_token_len", max_tokens, "tokens")
            if max_rows is None
            else ("micro_batch_size", max_rows, "rows")
        )
        return cls(f"{section}.{passes}_{name}_per_gpu", value, unit)

    def cut(self, lengths: Tensor, at_least: int = 1) -> list[Tensor]:
        """Index tensors of the rows of each micro-batch, for rows of `lengths` (B,) tokens."""
        if not self.by_rows:
            return micro_batches(lengths, self.size, at_least)
        parts = max(at_least, ceil_div(len(lengths), self.size))
        return list(lengths.argsort(stable=True).tensor_split(min(parts, len(lengths))))

    def halve(self, parts: Sequence[Tensor], failed: int, alone: bool, reason: str) -> OomRetry:
        """Memory did not suffice for `parts[failed]`, where `parts` are lengths: half of the largest of them is allowed from now on.

        Raises `DeviceMemoryError` for a single row, after three halvings, and where the rank is not `alone`: others wait in a
        collective for what this one will not do, so nothing can be agreed upon with them.
        """
        if len(parts[failed]) == 1:
            raise DeviceMemoryError(
                f"the device's memory does not suffice for a single row of {int(parts[failed].sum())} tokens, whatever {self.key} is",
                key=self.key,
                value=self.value,
                proposed=None,
                where=reason,
                hint="a shorter data.max_response_length, enable_gradient_checkpointing=true of the model, more ranks, or a larger device",
            )
        before = min(
            self.size, max(len(part) if self.by_rows else int(part.sum()) for part in parts)
        )
        after = before // 2
        if not alone or self.halvings == _MOST_HALVINGS:
            why = (
                f"it was halved {_MOST_HALVINGS} times"
                if alone
                else "while it runs on several ranks, nothing can be halved"
            )
            raise DeviceMemoryError(
                f"the device's memory does not suffice for {before} {self.unit} at a time ({self.key}={self.value}): {why}",
                key=self.key,
                value=self.value,
                proposed=after,
                where=reason,
                hint=f"rlctl resume @failed {self.key}={after}",
            )
        self.halvings += 1
        self.size = after
        return OomRetry(self.key, before, after, self.unit)


def is_oom(error: RuntimeError) -> bool:
    """Whether torch raised `error` because a device has no memory left. On a CPU it has no class of its own for it."""
    return isinstance(
        error, torch.OutOfMemoryError
    ) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def free_memory(device: str) -> None:
    """What nothing holds any longer is there for others."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
