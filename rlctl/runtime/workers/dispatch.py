"""Routing of one call on a worker handle to N workers, and of N results back to one.

`@dispatch(mode)` decorates the methods of a `Worker` that may be called from the controller. On a
worker the method runs as written. On a handle (see `bind`) the call goes to the handle's transport,
which sends it to the workers; `split` and `join` divide its batch and combine the results.
`@dispatch(dispatch_fn=…, collect_fn=…)` divides and combines with functions of the caller instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from rlctl.errors import InternalError, UsageError
from rlctl.runtime.base.balance import balance, row_cost
from rlctl.runtime.base.batch import Batch, Prompts, Ragged, Rollouts
from rlctl.runtime.base.clock import timed
from rlctl.runtime.base.metrics import merge
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.workers.interrupts import INTERRUPTS

_MARK = "__dispatch__"
# Typical of a small model: weighs linear layers against attention in a row's approximate cost.
_HIDDEN_SIZE = 1024
# Groups per worker that make complete groups nearly as balanced as rows.
_MIN_GROUPS = 8


class Dispatch(Enum):
    """Distribution of one call over the workers of a group."""

    SPLIT = "split"  # the first argument is a batch; each worker gets some of its rows
    GROUPS = "groups"  # the same in order, and the rows of a group go to one worker
    RANKS = "ranks"  # as SPLIT, and no workers share rows, whatever `Worker.ranks_per_row` says
    BROADCAST = "broadcast"  # all workers get the same arguments; the first one's result is used
    RANK_ZERO = "rank_zero"  # only the first worker is called
    EACH = "each"  # the first argument is a list with one item per worker, as is the result


# Arguments of one worker's call: positional, and by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Transport(Protocol):
    """Connection from a worker handle to its workers."""

    world_size: int  # number of workers

    def send(
        self, method: str, mode: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `method` on the workers that `mode` selects and return the combined result."""
        ...

    def send_each(self, method: str, calls: Sequence[Arguments]) -> list[Any]:
        """Call `method` on each worker with the arguments for it; return the results by rank."""
        ...


class Worker:
    """One role on one rank, or a handle: an instance without state whose calls go to a group."""

    transport: Transport | None = None  # set on handles only
    rank_info: RankInfo  # set on workers only
    before_change: Callable[[], object] | None = None  # called before a call that not only reads

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank_info = rank_info

    @classmethod
    def ranks_per_row(cls, *args: Any, **kwargs: Any) -> int:
        """Return the number of adjacent ranks that compute the same rows of a split batch.

        Takes the arguments of the constructor but the first. The results of the first of these
        ranks are used.
        """
        del args, kwargs
        return 1

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        if self.transport is not None:
            return self.transport.world_size
        return self.rank_info.world_size

    def close(self) -> None:
        """Release what the worker has started. Does nothing by default."""


W = TypeVar("W", bound=Worker)
P = ParamSpec("P")
R = TypeVar("R")


DispatchFn = Callable[[Any, Any], Sequence[Any]]  # (handle, first argument) -> one part per worker
CollectFn = Callable[[Any, list[Any]], Any]  # (handle, results by rank) -> result of the call


@dataclass(frozen=True)
class Routing:
    """Distribution of one call by functions."""

    dispatch_fn: DispatchFn | None  # None: every worker gets the same arguments
    collect_fn: CollectFn | None  # None: the call returns the list of results

    def send(
        self, group: Worker, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `method` on every worker of the handle `group` and combine the results.

        Raises UsageError if `dispatch_fn` does not return one part per worker.
        """
        transport = group.transport
        calls = [(args, kwargs)] * group.world_size
        assert transport is not None, "workers run their methods themselves"
        if self.dispatch_fn is not None:
            name = f"{type(group).__name__}.{method}"
            if not args:
                raise UsageError(
                    f"{name} divides its first argument, which was not given by position"
                )
            first, *rest = args
            parts = self.dispatch_fn(group, first)
            if len(parts) != group.world_size:
                raise UsageError(
                    f"dispatch_fn of {name} returned {len(parts)} parts for {group.world_size} "
                    "workers",
                    hint="return one part per worker; the handle has `world_size`",
                )
            calls = [((part, *rest), kwargs) for part in parts]
        results = transport.send_each(method, calls)
        return results if self.collect_fn is None else self.collect_fn(group, results)


def dispatch(
    mode: Dispatch | None = None,
    *,
    dispatch_fn: DispatchFn | None = None,
    collect_fn: CollectFn | None = None,
    phase: str | Callable[..., str] | None = None,
    reads: bool = False,
) -> Callable[[Callable[Concatenate[W, P], R]], Callable[Concatenate[W, P], R]]:
    """Make a worker's method callable on a handle.

    `mode` distributes the call over the workers. Instead of a mode, `dispatch_fn` takes the handle
    and the first argument and returns one part per worker (None: all get the same arguments);
    `collect_fn` takes the handle and the results by rank and returns that of the call (None: the
    list). Raises UsageError for neither or both.

    `phase` names the time of a call in the metrics `timing_s/*`, or returns the name for its
    arguments; None: it is part of another phase. A call that only `reads` leaves weights and
    optimizer as they are: a request to stop may interrupt it, and the calls before the first other
    one of a step.
    """
    if (mode is None) == (dispatch_fn is None and collect_fn is None):
        raise UsageError(
            "@dispatch needs either a mode, or dispatch_fn, collect_fn or both",
            hint="@dispatch(Dispatch.BROADCAST), or @dispatch(collect_fn=function)",
        )
    routing = Routing(dispatch_fn, collect_fn)

    def decorate(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
        @wraps(method)
        def call(worker: W, *args: P.args, **kwargs: P.kwargs) -> R:
            name = method.__name__
            if not reads:
                INTERRUPTS.close()
                if worker.before_change is not None:
                    worker.before_change()
            named = phase(*args, **kwargs) if callable(phase) else phase
            with timed(named), INTERRUPTS.held():
                if worker.transport is None:
                    with torch.profiler.record_function(f"{type(worker).__name__}.{name}"):
                        return method(worker, *args, **kwargs)
                if mode is None:
                    return routing.send(worker, name, args, kwargs)
                return worker.transport.send(name, mode, args, kwargs)

        setattr(call, _MARK, mode or routing)
        return call

    return decorate


def bind(worker: type[W], transport: Transport) -> W:
    """Return a handle whose `@dispatch` methods call `transport`; others raise InternalError."""
    handle = object.__new__(worker)
    handle.transport = transport
    for name, method in inspect.getmembers(worker, inspect.isfunction):
        if not name.startswith("__") and _MARK not in vars(method):
            vars(handle)[name] = _refusal(f"{worker.__name__}.{name}")
    return handle


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise InternalError(f"{name} has no @dispatch: it cannot be called on a group of workers")

    return refuse


def split(batch: Batch, num_parts: int, balanced: bool) -> list[Tensor]:
    """Return the row indices (N,) of each of `num_parts` workers, int64.

    With `balanced`, rollouts are distributed by compute cost with equal row counts, because
    training waits for the slowest worker. Where there are enough groups, each stays on one worker,
    which computes its prompt once. Prompts are cut in order: their response lengths are not known
    yet.
    """
    if num_parts == 1 or not balanced or not isinstance(batch, Rollouts) or not len(batch):
        return list(torch.arange(len(batch)).tensor_split(num_parts))
    group, num_tokens = (column.numpy().tobytes() for column in (batch.group, batch.num_tokens))
    return list(_by_cost(group, num_tokens, num_parts))


@lru_cache(maxsize=4)
def _by_cost(group: bytes, num_tokens: bytes, num_parts: int) -> list[Tensor]:
    """Distribute rows of so many tokens, int64 as bytes; each call of a step asks for the same."""
    numbers, lengths = (
        torch.frombuffer(bytearray(column), dtype=torch.int64) for column in (group, num_tokens)
    )
    costs = row_cost(lengths, _HIDDEN_SIZE)
    groups, sizes = numbers.unique_consecutive(return_counts=True)
    per_part, rest = divmod(len(groups), num_parts)
    if per_part < _MIN_GROUPS or rest or (sizes != sizes[0]).any():
        return balance(costs, num_parts, equal_size=True)
    size = int(sizes[0])
    return [
        _each(part, size)
        for part in balance(costs.view(-1, size).sum(1), num_parts, equal_size=True)
    ]


def split_groups(batch: Prompts, num_parts: int) -> list[Tensor]:
    """Return the row indices (N,) of each of `num_parts` workers, in order, int64.

    The rows of a group, which are adjacent, stay together; some parts may be empty.
    """
    num_rows = len(batch)
    is_start = torch.ones(num_rows + 1, dtype=torch.bool)
    is_start[1:-1] = batch.group[1:] != batch.group[:-1]
    starts = is_start.nonzero().flatten()
    ideal = torch.arange(1, num_parts) * num_rows // num_parts
    cuts = starts[torch.searchsorted(starts, ideal)]
    return list(torch.arange(num_rows).tensor_split(cuts))


def join(results: Sequence[Any], parts: Sequence[Tensor], batch: Batch) -> Any:
    """Combine the workers' results: rows return to the order of `batch`, metrics are merged.

    `parts` are the row indices (N,) that `split` gave each worker. A result may hold k rows
    for each row of its part (k responses to a prompt). A `Batch` gets back the fields that stayed
    on the controller. Raises InternalError for any other type of result.
    """
    first = results[0]
    if isinstance(first, dict):
        return merge(results)
    if isinstance(first, tuple):
        return tuple(join(values, parts, batch) for values in zip(*results, strict=True))
    if isinstance(first, Ragged):
        if len(parts) == 1:
            return first
        return first.joined(results[1:]).select(_inverse(parts))
    if isinstance(first, Batch):
        if len(parts) == 1:
            return first.with_local_from(batch)
        rows = Batch.concat(results)
        times = len(rows) // max(len(batch), 1)
        return rows.select(_each(_inverse(parts), times)).with_local_from(batch)
    raise InternalError(
        f"a split call returned {type(first).__name__}: only a batch, a ragged field or metrics "
        "or a tuple of them can be joined"
    )


def _inverse(parts: Sequence[Tensor]) -> Tensor:
    """Return the permutation (B,) that undoes a split into `parts`."""
    return torch.cat(list(parts)).argsort()


def _each(index: Tensor, times: int) -> Tensor:
    """Return the indices (B·times,) of `times` adjacent rows for each of `index` (B,)."""
    return (index[:, None] * times + torch.arange(times)).reshape(-1)
