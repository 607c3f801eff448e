"""Rollout correction for the difference between the log-probs of rollout engine and trainer.

Two parts: importance weights π_train/π_rollout, truncated (TIS: Yao et al., "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training", 2025) or set to 0 outside of bounds (IcePop:
arXiv 2510.18855), and rejection of tokens or rows by an estimate of the divergence. Names and
definitions are verl's. All functions take complete rows. They run on the controller with the global
batch, or in bypass mode on the workers with a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.plugins import suggestion
from rlctl.runtime.algorithms.importance_weights import (
    Bounds,
    Level,
    SampledTokens,
    importance_weights,
    mismatch,
)
from rlctl.runtime.algorithms.policy_losses.base import MAX_LOG_RATIO
from rlctl.runtime.ops import row_mean, row_sum
from rlctl.tracking.metrics import Mean, Metrics

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
    entries = entries * len(names) if len(entries) == 1 else entries
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
    from rlctl.runtime.algorithms.rejection_metrics import criterion_metrics

    kept = torch.ones_like(tokens.mask)
    num_tokens, metrics = float(tokens.mask.sum()), Metrics()
    for criterion in criteria:
        value, bounds = _divergence(criterion.kind, tokens), criterion.bounds
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


@torch.no_grad()
def proximal(tokens: SampledTokens) -> Tensor:
    """Return the log-probs of an approximate proximal policy: (T,), without a graph.

    log π_prox = log π_rollout + α·(log π_train − log π_rollout) with α = s/(s + 1), where s is the
    staleness of a token and π_train the policy in training (A-3PO: arXiv 2512.06547, and AReaL's
    `loglinear`). It takes the update as one step: the weights before it are s of s + 1 steps from
    those of the engine to those in training. A token of the newest weights (s = 0) has π_rollout.
    """
    assert tokens.staleness is not None
    alpha = tokens.staleness / (tokens.staleness + 1)
    return tokens.rollout_log_probs + alpha * tokens.log_ratio


@dataclass(frozen=True)
class Correction:
    """The correction that `algorithm.rollout_correction` configures; `level` None = no weights.

    With `bypass` the engine's log-probs are the old ones of the update, and the correction compares
    them with the policy in training. Its losses contain that ratio themselves, except REINFORCE's.
    With `interpolate` too, an approximate proximal policy has both places: see `proximal`.
    """

    level: Level | None
    bounds: Bounds
    batch_normalize: bool
    criteria: tuple[Criterion, ...]
    bypass: bool
    interpolate: bool
    reinforce: bool  # the loss of bypass mode is −w·A·log π
    veto: float | None  # smallest ratio π_train/π_rollout of a token; None = no veto

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
            threshold, low = config.rollout_rs_threshold, config.rollout_rs_threshold_lower
            if low is not None:
                threshold = f"{low}_{threshold}"
            criteria = parse_criteria(config.rollout_rs, threshold)
        return cls(
            level=config.rollout_is,
            bounds=Bounds.parse(config.rollout_is_threshold, "rollout_is_threshold").around_one(
                "rollout_is_threshold"
            ),
            batch_normalize=config.rollout_is_batch_normalize,
            criteria=tuple(criteria),
            bypass=bool(config.bypass_mode),
            interpolate=config.bypass_mode == "loglinear",
            reinforce=config.loss_type == "reinforce" and bool(config.bypass_mode),
            veto=config.rollout_token_veto_threshold,
        )

    @property
    def rejects(self) -> bool:
        """True if tokens may be left out of the loss."""
        return bool(self.criteria) or self.veto is not None

    @property
    def needs_batch(self) -> bool:
        """True if old log-probs of all rows are needed before an update, or are the engine's."""
        return self.bypass or (self.level is not None and self.batch_normalize)

    @property
    def needs_mini_batch(self) -> bool:
        """True if weights depend on all rows of a mini-batch under the policy in training."""
        return self.reinforce and self.level is not None and self.batch_normalize

    @property
    def in_loss(self) -> bool:
        """True if each micro-batch is corrected in the loss, with its own forward pass."""
        return self.bypass and not self.needs_mini_batch

    def __call__(self, tokens: SampledTokens) -> tuple[Tensor, Tensor | None, Metrics]:
        """Return the mask of tokens to learn from (T,), loss weights (T,) or None, and metrics."""
        mask, weights, metrics = tokens.mask, None, mismatch(tokens)
        if self.interpolate:
            tokens = replace(tokens, old_log_probs=proximal(tokens))
        if self.level is not None:
            weights, of_weights = importance_weights(
                tokens, self.level, self.bounds, self.batch_normalize
            )
            metrics |= of_weights
        if self.criteria:
            mask, rejected = rejection_mask(tokens, self.criteria)
            metrics |= rejected
        if self.veto is not None:
            kept, vetoed = veto_mask(tokens, self.veto)
            mask, metrics = mask * kept, metrics | vetoed
        if self.bypass and not (self.interpolate or self.reinforce):
            weights = None
        return mask, weights, metrics
