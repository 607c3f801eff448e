"""Staleness of rollouts: steps between the weights that generated them and the newest."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlctl.runtime.batch import Scored


def with_staleness(
    scored: Scored, step: int, weights: Tensor | int, limit: int
) -> tuple[Scored, dict[str, float]]:
    """Return B rows with the staleness of their tokens when `step` learns from them, and metrics.

    `weights` is the step that left the weights of a token: (T,), or one for all. Those that
    step − 1 left are the newest. A row is as stale as its oldest sampled token; the metrics have
    the share of each staleness from 0 to `limit`, and further ones that occur.
    """
    ids = scored.response_ids
    age = (step - 1 - torch.as_tensor(weights)).expand(len(ids.values))
    sampled = age * scored.response_mask.values.to(age)
    rows = torch.zeros(len(ids), dtype=age.dtype)
    rows = rows.scatter_reduce(0, ids.row_of_token, sampled, "amax")
    return replace(scored, staleness=ids.like(age.clone())), staleness_metrics(rows, limit)


def staleness_metrics(staleness: Tensor, limit: int) -> dict[str, float]:
    """Return mean and maximum of the staleness of rows (B,), and the share of each staleness."""
    shares = torch.bincount(staleness, minlength=limit + 1) / len(staleness)
    return {
        "async/staleness/mean": float(staleness.double().mean()),
        "async/staleness/max": float(staleness.max()),
    } | {f"async/staleness/share/{steps}": share for steps, share in enumerate(shares.tolist())}
