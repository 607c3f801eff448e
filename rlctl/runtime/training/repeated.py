"""Validation metrics of several responses to each prompt: best, worst, most frequent, pass@k."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import comb

import torch
from torch import Tensor

from rlctl.tracking.tracker import Sample

# Of the bootstrap, as in verl.
_NUM_DRAWS = 1000
_DRAW_SEED = 42


def repeated_metrics(name: str, groups: list[list[Sample]], values: Tensor) -> dict[str, float]:
    """Return metrics of the N responses in each of P `groups`, whose scores are `values` (P, N).

    `val-core/<name>` has best, maj and, if all scores are 0 or 1, pass of N responses; `val-aux` of
    fewer, and the worst. best, worst and maj are means over draws with replacement, pass@k is the
    unbiased estimate of the share of prompts that k responses solve.
    """
    num_responses = values.shape[1]
    is_right = bool(((values == 0) | (values == 1)).all())
    metrics: dict[str, float] = {}
    for k in _sizes(num_responses):
        part = "val-core" if k == num_responses else "val-aux"
        drawn = values[:, draws(num_responses, k)]  # (P, D, k)
        metrics[f"{part}/{name}/best@{k}/mean"] = float(drawn.amax(-1).mean())
        metrics[f"val-aux/{name}/worst@{k}/mean"] = float(drawn.amin(-1).mean())
        if is_right:
            metrics[f"{part}/{name}/pass@{k}"] = pass_at(k, values)
    majority = majority_mean(groups, values, draws(num_responses, num_responses))
    metrics[f"val-core/{name}/maj@{num_responses}/mean"] = majority
    std = values.std(-1, correction=0)  # of the population, as in verl
    metrics[f"val-aux/{name}/std@{num_responses}"] = float(std.mean())
    return metrics


def _sizes(num_responses: int) -> Iterator[int]:
    """Yield 2, 4, 8, … and the number of responses."""
    k = 2
    while k < num_responses:
        yield k
        k *= 2
    yield num_responses


def draws(num_responses: int, size: int) -> Tensor:
    """Return the responses of each draw with replacement: (D, size) int64."""
    generator = torch.Generator().manual_seed(_DRAW_SEED)
    return torch.randint(num_responses, (_NUM_DRAWS, size), generator=generator)


def pass_at(k: int, values: Tensor) -> float:
    """Return the mean of 1 − C(N − c, k)/C(N, k) over prompts; c of `values` (P, N) are 1.

    arXiv 2107.03374, equation 1.
    """
    num_responses = values.shape[1]
    ways = comb(num_responses, k)
    missed = [comb(num_responses - int(c), k) / ways for c in values.sum(-1).tolist()]
    return 1 - sum(missed) / len(missed)


def majority_mean(groups: list[list[Sample]], values: Tensor, draws: Tensor) -> float:
    """Return the value of the most common final answer, averaged over draws (D, N) and prompts.

    `values` (P, N) belong to the responses in `groups`. As in verl, the value is that of the
    winning answer that was drawn first, and ties go to the answer that was drawn first.
    """
    total = 0.0
    for group, row in zip(groups, values.tolist(), strict=True):
        answers = [_vote(sample) for sample in group]
        for draw in draws.tolist():
            winner = Counter(answers[i] for i in draw).most_common(1)[0][0]
            total += next(row[i] for i in draw if answers[i] == winner)
    return total / len(groups) / len(draws)


def _vote(sample: Sample) -> tuple[str, str]:
    """Return the answer that a response votes for: its extracted answer, or else its text.

    Texts are equal if they differ only in white space and case.
    """
    if sample.pred is not None:
        return "pred", sample.pred
    return "text", " ".join(sample.response.split()).casefold()
