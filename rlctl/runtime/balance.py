"""Which rows go where: over ranks by cost, into micro-batches by tokens. All deterministic; B is the number of rows."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor


def row_cost(lengths: Tensor, hidden_size: int) -> Tensor:
    """The relative cost of training on each row of L tokens: 6·hidden·L + L², (B,) -> (B,) float64.

    A transformer layer takes about 24·hidden²·L operations for its matrices and 4·hidden·L² for its attention; both divided by 4·hidden.
    (verl: 24576·L + L², which is this formula for a hidden size of 4096.)
    """
    exact = lengths.double()
    return 6 * hidden_size * exact + exact.square()


# A partial solution: the cost of each of the parts, heaviest first, and the rows of each.
_Partition = list[tuple[float, list[int]]]


def _merge(first: _Partition, second: _Partition) -> _Partition:
    """Put the heaviest part of one on the lightest of the other, and so on."""
    joined = [(a + b, rows + more) for (a, rows), (b, more) in zip(first, reversed(second), strict=True)]
    return sorted(joined, key=lambda part: -part[0])


def balance(costs: Tensor, parts: int, equal_size: bool) -> list[Tensor]:
    """Share B rows among `parts` so that the largest total of `costs` (B,) is small: their indices, ascending, one int64 tensor a part.

    Karmarkar and Karp's largest differencing method (1982) for several parts: start with one row to a solution and merge, again and again,
    the two solutions that are the most uneven. With `equal_size` a solution starts with one row in every part, so sizes differ by one at
    most, and not at all when B is a multiple of `parts`.
    """
    order = costs.argsort(descending=True, stable=True).tolist()
    cost = costs.tolist()
    step = parts if equal_size else 1
    heap: list[tuple[float, int, _Partition]] = []
    for number, start in enumerate(range(0, len(order), step)):
        partition: _Partition = [(cost[i], [i]) for i in order[start : start + step]]
        partition += [(0.0, []) for _ in range(parts - len(partition))]
        heap.append((partition[-1][0] - partition[0][0], number, partition))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        merged = _merge(first, heapq.heappop(heap)[2])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    rows = [sorted(part) for _, part in heap[0][2]] if heap else [[] for _ in range(parts)]
    return [torch.tensor(part, dtype=torch.int64) for part in rows]


def micro_batches(lengths: Tensor, token_budget: int, at_least: int = 1) -> list[Tensor]:
    """Cut B rows of `lengths` (B,) into micro-batches: their indices, longest rows first, one int64 tensor each.

    A micro-batch holds at most `token_budget` tokens, unless it is a single longer row. Rows of like length stay together, so that
    padding, where there is any, is little; the longest come first, so that a lack of memory shows at once. At least `at_least`
    micro-batches (for ranks that must run as many as others), none empty: fewer only when there are fewer rows.
    """
    order = lengths.argsort(descending=True, stable=True)
    cuts: list[list[int]] = []
    room = 0
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if not cuts or length > room:
            cuts.append([])
            room = token_budget
        cuts[-1].append(row)
        room -= length
    while len(cuts) < min(at_least, len(order)):
        largest = max(range(len(cuts)), key=lambda i: len(cuts[i]))
        half = (len(cuts[largest]) + 1) // 2
        cuts[largest : largest + 1] = [cuts[largest][:half], cuts[largest][half:]]
    return [torch.tensor(rows, dtype=torch.int64) for rows in cuts]
