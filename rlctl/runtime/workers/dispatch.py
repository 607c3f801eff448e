"""How one call on a group of workers becomes N calls, and N answers become one.

`@dispatch(Dispatch.SPLIT)` on a worker's method is all a worker says about it; `split` and `join` are used by the group. Nothing here knows
how a call travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from rlctl.errors import InternalError
from rlctl.runtime.balance import balance, row_cost
from rlctl.runtime.batch import Batch, Ragged, Rollouts
from rlctl.tracking.metrics import merge

P = ParamSpec("P")
R = TypeVar("R")

_ATTRIBUTE = "__dispatch__"
_HIDDEN_SIZE = 1024  # of a typical small model: it weighs linear layers against attention in the cost of a row, and need not be exact


class Dispatch(Enum):
    """SPLIT: the first argument, a batch, is shared out by rows. BROADCAST: all get the same. RANK_ZERO: only the first is asked."""

    SPLIT = "split"
    BROADCAST = "broadcast"
    RANK_ZERO = "rank_zero"


def dispatch(mode: Dispatch) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Say how a group calls this method. Called on a worker itself, the method is unchanged."""

    def mark(method: Callable[P, R]) -> Callable[P, R]:
        setattr(method, _ATTRIBUTE, mode)
        return method

    return mark


def mode_of(worker: type, method: str) -> Dispatch:
    """The mode that `worker.method` was marked with."""
    mode = getattr(getattr(worker, method, None), _ATTRIBUTE, None)
    if mode is None:
        raise InternalError(
            f"{worker.__name__}.{method} cannot be called on a group: it carries no @dispatch"
        )
    return mode


def split(batch: Batch, num_parts: int, balanced: bool) -> list[Tensor]:
    """Which rows each of `num_parts` workers gets, as index tensors.

    Rows that have been answered are shared out by their cost if `balanced`, the same number to each, because training waits for the
    slowest. Prompts are cut in order: nobody knows yet how long the answers will be.
    """
    if num_parts > 1 and balanced and isinstance(batch, Rollouts):
        return balance(row_cost(batch.num_tokens, _HIDDEN_SIZE), num_parts, equal_size=True)
    return list(torch.arange(len(batch)).tensor_split(num_parts))


def join(results: Sequence[Any], parts: Sequence[Tensor], batch: Batch) -> Any:
    """One answer of N: rows come back in the order of `batch`, metrics are merged.

    An answer may hold k rows for each row it was given (n responses to a prompt). A `Batch` takes back the fields that stayed with the
    controller.
    """
    first = results[0]
    if isinstance(first, dict):
        return merge(results)
    if isinstance(first, Ragged):
        joined = Ragged(
            torch.cat([r.values for r in results]), torch.cat([r.lengths for r in results])
        )
        return joined if len(parts) == 1 else joined.select(_inverse(parts))
    if isinstance(first, Batch):
        whole = first if len(parts) == 1 else Batch.concat(results)
        times = len(whole) // max(len(batch), 1)
        if len(parts) > 1:
            whole = whole.select(_each(_inverse(parts), times))
        return whole.with_local_from(batch if times == 1 else batch.repeat(times))
    raise InternalError(
        f"a split call answered {type(first).__name__}: only a batch, a ragged field or metrics can be joined"
    )


def _inverse(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)).argsort()


def _each(index: Tensor, times: int) -> Tensor:
    return (index[:, None] * times + torch.arange(times)).reshape(-1)
