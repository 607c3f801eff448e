"""Rollout correction for the difference between the log-probs of rollout engine and trainer.

Two parts: importance weights π_train/π_rollout, truncated (TIS: Yao et al., "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training", 2025) or set to 0 outside of bounds (IcePop:
arXiv 2510.18855), and rejection of tokens or rows by an estimate of the divergence. Names and
definitions are verl's. All functions take the complete global batch and run on the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.plugins import suggestion
from rlctl.runtime.algorithms.policy_losses.base import MAX_LOG_RATIO
from rlctl.runtime.algorithms.rollout_mismatch import SampledTokens
from rlctl.runtime.ops import row_mean, row_sum
from rlctl.tracking.metrics import Max, Mean, Metrics, Min

if TYPE_CHECKING:
    from rlctl.recipes.schema import RolloutCorrection

_KEY = "algorithm.rollout_correction"
CRITERIA = tuple(
    f"{scope}_k{k}"
    for scope in ("token", "seq_sum", "seq_mean", "seq_max")
    for k in (1, 2, 3)
    if (scope, k) != ("seq_max", 1)
)


@dataclass(frozen=True)
class Bounds:
    """Bounds 0 < low < high; `low` is None if there is only an upper bound."""

    low: float | None
    high: float

    @classmethod
    def parse(cls, given: str | float, key: str) -> Bounds:
        """Parse `2.0` or `"0.5_2.0"`. Raises ConfigError for anything else."""
        try:
            *low, high = [float(part) for part in str(given).split("_")]
        except ValueError:
            low, high = [], 0.0
        if len(low) > 1 or not 0 < (low[0] if low else high / 2) < high:
            raise ConfigError(
                f"{key}={given!r} is no bound",
                where=_KEY,
                hint='give one positive number, or two as in "0.5_2.0"',
            )
        return cls(low[0] if low else None, high)

    def around_one(self, key: str) -> Bounds:
        """Return these bounds. Raises ConfigError if they exclude 1, the ratio without mismatch.

        The usual cause is YAML, which reads 0.5_2 as the number 0.52.
        """
        if not (self.low or 0.0) <= 1 <= self.high:
            low = "" if self.low is None else f"{self.low:g}_"
            hint = (
                'write two bounds with a point in each, as in "0.5_2.0": YAML reads 0.5_2 as 0.52'
            )
            raise ConfigError(
                f"{key}={low}{self.high:g} leaves out a ratio of 1", where=_KEY, hint=hint
            )
        return self


@dataclass(frozen=True)
class Criterion:
    """Bounds of a divergence that a token or row must meet; `kind` is one of `CRITERIA`."""

    kind: str
    bounds: Bounds


def parse_criteria(kinds: str, thresholds: str | float) -> list[Criterion]:
    """Parse `rollout_rs` ("token_k1,seq_mean_k3") and `rollout_rs_threshold` ("0.5_2,0.01").

    There is one threshold per criterion. For k1 it bounds the ratio π_rollout/π_train, and one
    number x means [1/x, x]; for k2 and k3 it is the largest allowed divergence. Raises ConfigError
    for an unknown kind, unequal numbers of entries, or a lower bound of k2 or k3.
    """
    names = [name.strip() for name in kinds.split(",")]
    entries = [entry.strip() for entry in str(thresholds).split(",")]
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
            bounds = Bounds(1 / bounds.high, bounds.high) if bounds.low is None else bounds
        elif bounds.low is not None:
            raise ConfigError(
                f"{name} takes one upper bound, given: {entry}",
                where=f"{_KEY}.rollout_rs_threshold",
            )
        criteria.append(Criterion(name, bounds))
    return criteria


@torch.no_grad()
def importance_weights(
    tokens: SampledTokens, level: Literal["token", "sequence"], bounds: Bounds
) -> tuple[Tensor, Metrics]:
    """Return weights w = π_train/π_rollout of unmasked tokens, 0 elsewhere: (T,), without a graph.

    At level "sequence", w is the product over the row. With an upper bound only: min(w, high), TIS.
    With two bounds: 0 where w is outside, IcePop. The log-ratio is clamped to ±20 first.
    """
    mask, log_ratio = tokens.mask, tokens.log_ratio
    if level == "sequence":
        log_ratio = row_sum(log_ratio * mask, tokens.row, tokens.num_rows)[tokens.row]
    raw = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    is_high = raw > bounds.high
    is_low = raw < (1 / bounds.high if bounds.low is None else bounds.low)
    if bounds.low is None:
        weights = raw.clamp(max=bounds.high)
    else:
        weights = raw.masked_fill(is_high | is_low, 0.0)
    keep = mask > 0
    return weights * mask, _weight_metrics(weights[keep].double(), is_high[keep], is_low[keep])


def _weight_metrics(weights: Tensor, high: Tensor, low: Tensor) -> Metrics:
    """Return metrics of the weights (N,) of N unmasked tokens; an empty dict if N = 0.

    `weights` are bounded; `high` and `low` (N,) are True where a weight was outside the bounds.
    """
    n = len(weights)
    if not n:
        return {}
    mean, mean_square = float(weights.mean()), float(weights.square().mean())
    return {
        "rollout_corr/rollout_is_mean": Mean(mean * n, n),
        "rollout_corr/rollout_is_max": Max(float(weights.max())),
        "rollout_corr/rollout_is_min": Min(float(weights.min())),
        "rollout_corr/rollout_is_std": Mean(max(mean_square - mean * mean, 0.0) ** 0.5),
        "rollout_corr/rollout_is_eff_sample_size": Mean(
            mean * mean / mean_square if mean_square else 0.0
        ),  # as a share of N
        "rollout_corr/rollout_is_ratio_fraction_high": Mean(float(high.sum()), n),
        "rollout_corr/rollout_is_ratio_fraction_low": Mean(float(low.sum()), n),
    }


def _divergence(kind: str, tokens: SampledTokens) -> Tensor:
    """Return the divergence that a criterion bounds: (T,). A row's value is on each of its tokens.

    With d = log π_train/π_rollout, k1 is −d, k2 is d²/2 and k3 is e^d − 1 − d.
    """
    d = tokens.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    scope, _, order = kind.rpartition("_k")
    each = {"1": -d, "2": d.square() / 2, "3": d.exp() - 1 - d}[order]
    row, num_rows, mask = tokens.row, tokens.num_rows, tokens.mask
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
    num_tokens, metrics = float(tokens.mask.sum()), Metrics()
    for criterion in criteria:
        value, bounds = _divergence(criterion.kind, tokens), criterion.bounds
        if bounds.low is None:
            passed = (value <= bounds.high).to(kept)
        else:
            ratio = value.exp()
            passed = ((ratio >= bounds.low) & (ratio <= bounds.high)).to(kept)
        metrics[f"rollout_corr/rollout_rs_{criterion.kind}_masked_fraction"] = Mean(
            float(((1 - passed) * tokens.mask).sum()), num_tokens
        )
        kept = kept * passed
    rejected = (1 - kept) * tokens.mask
    hit_rows = row_sum(rejected, tokens.row, tokens.num_rows) > 0
    metrics["rollout_corr/rollout_rs_masked_fraction"] = Mean(float(rejected.sum()), num_tokens)
    metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = Mean(
        float(hit_rows.sum()), tokens.num_rows
    )
    return tokens.mask * kept, metrics


@dataclass(frozen=True)
class Correction:
    """The correction that `algorithm.rollout_correction` configures; `level` None = no weights."""

    level: Literal["token", "sequence"] | None
    bounds: Bounds
    criteria: tuple[Criterion, ...]

    @classmethod
    def from_config(cls, config: RolloutCorrection) -> Self:
        """Build from the config section. Raises ConfigError for wrong or missing settings."""
        criteria: list[Criterion] = []
        if config.rollout_rs is not None:
            if config.rollout_rs_threshold is None:
                hint = (
                    f"set {_KEY}.rollout_rs_threshold, one entry per criterion: "
                    "2.0 bounds a ratio (k1), 0.01 a divergence (k2, k3)"
                )
                raise ConfigError(
                    f"rollout_rs={config.rollout_rs} has no threshold", where=_KEY, hint=hint
                )
            criteria = parse_criteria(config.rollout_rs, config.rollout_rs_threshold)
        bounds = Bounds.parse(config.rollout_is_threshold, "rollout_is_threshold").around_one(
            "rollout_is_threshold"
        )
        return cls(config.rollout_is, bounds, tuple(criteria))

    def __call__(self, tokens: SampledTokens) -> tuple[Tensor, Tensor | None, Metrics]:
        """Return the mask of tokens to learn from (T,), loss weights (T,) or None, and metrics."""
        mask, weights, metrics = tokens.mask, None, Metrics()
        if self.level is not None:
            weights, metrics = importance_weights(tokens, self.level, self.bounds)
        if self.criteria:
            mask, rejected = rejection_mask(tokens, self.criteria)
            metrics |= rejected
        return mask, weights, metrics
