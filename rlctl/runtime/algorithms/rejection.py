"""Rejection of tokens or rows by an estimate of the divergence of rollout engine and trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.plugins import suggestion
from rlctl.runtime.algorithms.bounds import Bounds
from rlctl.runtime.algorithms.policy_losses.base import MAX_LOG_RATIO
from rlctl.runtime.algorithms.rejection_metrics import criterion_metrics
from rlctl.runtime.algorithms.sampled_tokens import SampledTokens
from rlctl.runtime.base.metrics import Mean, Metrics
from rlctl.runtime.base.ops import row_mean, row_sum

_KEY = "algorithm.rollout_correction"
CRITERIA = tuple(
    f"{scope}_k{k}"
    for scope in ("token", "seq_sum", "seq_mean", "seq_max")
    for k in (1, 2, 3)
    if (scope, k) != ("seq_max", 1)
)


@dataclass(frozen=True)
class Criterion:
    """Bounds of a divergence that a token or row must meet; `kind` is one of `CRITERIA`."""

    kind: str
    bounds: Bounds


def parse_criteria(kinds: str, thresholds: str | float) -> list[Criterion]:
    """Parse `rollout_rs` ("token_k1,seq_mean_k3") and `rollout_rs_threshold` ("0.5_2,0.01").

    There is one threshold per criterion, or one for all. For k1 it bounds the ratio
    π_rollout/π_train, and one number x means [1/x, x]; for k2 and k3 it is the largest allowed
    divergence. Raises ConfigError for an unknown kind, unequal numbers of entries, or a lower bound
    of k2 or k3.
    """
    names = [name.strip() for name in kinds.split(",")]
    entries = [entry.strip() for entry in str(thresholds).split(",")]
    if len(entries) == 1:
        entries = entries * len(names)
    if len(names) != len(entries):
        raise ConfigError(
            f"rollout_rs has {len(names)} criteria, rollout_rs_threshold has {len(entries)}",
            where=_KEY,
        )
    criteria: list[Criterion] = []
    for name, entry in zip(names, entries, strict=True):
        if name not in CRITERIA:
            raise ConfigError(
                f"unknown rejection criterion {name!r}",
                where=f"{_KEY}.rollout_rs",
                hint=suggestion(name, CRITERIA),
            )
        bounds = Bounds.parse(entry, "rollout_rs_threshold")
        if name.endswith("_k1"):
            bounds = bounds.around_one("rollout_rs_threshold")
            if bounds.low is None:
                bounds = Bounds(1 / bounds.high, bounds.high)
        elif bounds.low is not None:
            raise ConfigError(
                f"{name} takes one upper bound, given: {entry}",
                where=f"{_KEY}.rollout_rs_threshold",
            )
        criteria.append(Criterion(name, bounds))
    return criteria


def _divergence(kind: str, tokens: SampledTokens) -> Tensor:
    """Return the divergence that a criterion bounds: (T,). A row's value is on each of its tokens.

    With d = log π_train/π_rollout, k1 is −d, k2 is d²/2 and k3 is e^d − 1 − d.
    """
    d = tokens.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    scope, _, order = kind.rpartition("_k")
    each = {"1": -d, "2": d.square() / 2, "3": d.exp() - 1 - d}[order]
    row = tokens.row
    num_rows = tokens.num_rows
    mask = tokens.mask
    match scope:
        case "token":
            return each
        case "seq_sum":
            return row_sum(each * mask, row, num_rows)[row]
        case "seq_mean":
            return row_mean(each, mask, row, num_rows)[row]
        case _:  # seq_max; k2 and k3 are never negative, so 0 is neutral
            return each.new_zeros(num_rows).scatter_reduce(0, row, each * mask, "amax")[row]


@torch.no_grad()
def rejection_mask(tokens: SampledTokens, criteria: Sequence[Criterion]) -> tuple[Tensor, Metrics]:
    """Return the mask without the tokens or rows that fail a criterion, (T,), and metrics."""
    kept = torch.ones_like(tokens.mask)
    num_tokens = float(tokens.mask.sum())
    metrics = Metrics()
    for criterion in criteria:
        value = _divergence(criterion.kind, tokens)
        bounds = criterion.bounds
        if bounds.low is None:
            passed = (value <= bounds.high).to(kept)
        else:
            ratio = value.exp()
            passed = ((ratio >= bounds.low) & (ratio <= bounds.high)).to(kept)
        metrics |= criterion_metrics(criterion.kind, bounds, value, passed, tokens)
        kept = kept * passed
    rejected = (1 - kept) * tokens.mask
    hit_rows = row_sum(rejected, tokens.row, tokens.num_rows) > 0
    metrics["rollout_corr/rollout_rs_masked_fraction"] = Mean(float(rejected.sum()), num_tokens)
    metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = Mean(
        float(hit_rows.sum()), tokens.num_rows
    )
    return tokens.mask * kept, metrics


@torch.no_grad()
def veto_mask(tokens: SampledTokens, threshold: float) -> tuple[Tensor, Metrics]:
    """Return 1 for rows whose tokens all have a ratio of `threshold` or more: (T,), and metrics.

    One token that the trainer finds very unlikely rejects its row (verl 0.7's token veto).
    """
    unlikely = (tokens.log_ratio < math.log(threshold)) & (tokens.mask > 0)
    vetoed = row_sum(unlikely.to(tokens.mask), tokens.row, tokens.num_rows) > 0
    return 1 - vetoed[tokens.row].to(tokens.mask), {
        "rollout_corr/rollout_is_veto_fraction": Mean(float(vetoed.sum()), tokens.num_rows)
    }
