"""Rollout correction for the difference between the log-probs of rollout engine and trainer.

Two parts: importance weights π_train/π_rollout, truncated (TIS: Yao et al., "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training", 2025) or set to 0 outside of bounds (IcePop:
arXiv 2510.18855), and rejection of tokens or rows by an estimate of the divergence. Names and
definitions are verl's. All functions take complete rows. They run on the controller with the global
batch, or in bypass mode on the workers with a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.runtime.algorithms.bounds import Bounds, Level
from rlctl.runtime.algorithms.sampled_tokens import SampledTokens, mismatch
from rlctl.runtime.base.metrics import Metrics

if TYPE_CHECKING:
    from rlctl.recipes.schema import RolloutCorrection
    from rlctl.runtime.algorithms.rejection import Criterion

_KEY = "algorithm.rollout_correction"


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
            threshold = config.rollout_rs_threshold
            low = config.rollout_rs_threshold_lower
            if low is not None:
                threshold = f"{low}_{threshold}"
            from rlctl.runtime.algorithms.rejection import parse_criteria

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
        """True if each micro-batch is corrected in the loss, with its forward pass."""
        return self.bypass and not self.needs_mini_batch

    def __call__(self, tokens: SampledTokens) -> tuple[Tensor, Tensor | None, Metrics]:
        """Return the mask of tokens to learn from (T,), loss weights (T,) or None, and metrics."""
        mask = tokens.mask
        weights = None
        metrics = mismatch(tokens)
        if self.interpolate:
            from rlctl.runtime.algorithms.proximal import proximal

            tokens = replace(tokens, old_log_probs=proximal(tokens))
        if self.level is not None:
            from rlctl.runtime.algorithms.importance_weights import importance_weights

            weights, of_weights = importance_weights(
                tokens, self.level, self.bounds, self.batch_normalize
            )
            metrics |= of_weights
        if self.criteria:
            from rlctl.runtime.algorithms.rejection import rejection_mask

            mask, rejected = rejection_mask(tokens, self.criteria)
            metrics |= rejected
        if self.veto is not None:
            from rlctl.runtime.algorithms.rejection import veto_mask

            kept, vetoed = veto_mask(tokens, self.veto)
            mask = mask * kept
            metrics = metrics | vetoed
        if self.bypass and not (self.interpolate or self.reinforce):
            weights = None
        return mask, weights, metrics
