"""Policy losses: their inputs, what they declare, and how they are loaded.

A policy loss is a function `(tokens, clip) -> (losses, metrics)`, or `(tokens, clip, params)` if it
has settings. It returns one loss per token (T,), not aggregated, and reports
`actor/ppo_kl`, the mean of −d. It is found by an entry point of the group `rlctl.policy_losses` or
as `module:function`. Names and definitions are verl's.

In all formulas d = clamp(log π − log π_old, ±20), ρ = e^d, and A is the advantage of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from rlctl import plugins
from rlctl.plugins.result_check import check_result
from rlctl.runtime.base.metrics import Mean, Metrics
from rlctl.runtime.base.ops import row_mean

if TYPE_CHECKING:
    from rlctl.recipes.schema import Actor, Config

_ACTOR = "actor_rollout_ref.actor"
# Bound of |log-ratio| before exp(): e^20 is 5e8.
MAX_LOG_RATIO = 20.0
# Added to weights of 0 before their logarithm, as in verl.
_LOG_EPS = 1e-10


@dataclass(frozen=True, eq=False)
class PolicyTokens:
    """The response tokens of complete rows, concatenated: (T,) each.

    Only `log_probs` carries a gradient.
    """

    log_probs: Tensor  # under the weights in training
    old_log_probs: Tensor  # under the weights at the start of the step
    advantages: Tensor
    mask: Tensor  # float, 1 on tokens that the policy wrote
    row: Tensor  # int64, the row of each token
    num_rows: int

    @property
    def log_ratio(self) -> Tensor:
        """d = log π/π_old, clamped to ±20: (T,)."""
        return (self.log_probs - self.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def mean_of_row(self, x: Tensor) -> Tensor:
        """Return the mean of x (T,) over the unmasked tokens of each token's row: (T,)."""
        return row_mean(x, self.mask, self.row, self.num_rows)[self.row]


@dataclass(frozen=True)
class ClipRange:
    """Bounds of the ratio, which most losses share."""

    low: float  # the ratio is clipped to [1 − low, 1 + high]; a divergence for DPPO
    high: float
    c: float  # dual clip: bound of the ratio for negative advantages, > 1

    @classmethod
    def from_config(cls, config: Actor) -> Self:
        """Build from `actor_rollout_ref.actor`; `clip_ratio` replaces a bound that is null."""
        low = config.clip_ratio_low
        high = config.clip_ratio_high
        return cls(
            low=config.clip_ratio if low is None else low,
            high=config.clip_ratio if high is None else high,
            c=config.clip_ratio_c,
        )


LossFunction = Callable[..., tuple[Tensor, Metrics]]
F = TypeVar("F", bound=LossFunction)


@dataclass(frozen=True)
class TokenLoss:
    """A policy loss with its settings. Calling it returns losses (T,) and metrics."""

    function: LossFunction
    params: plugins.Params | None = None

    @property
    def aggregation(self) -> str | None:
        """The only aggregation mode that the loss is defined for; None: any mode."""
        return getattr(self.function, "aggregation", None)

    @property
    def advised(self) -> str | None:
        """The aggregation mode that the loss was published with; None: none."""
        return getattr(self.function, "advised_aggregation", None)

    def aggregates_apart(self, config: Actor) -> bool:
        """Return True if `config` has terms beside the loss that are aggregated in another way."""
        others = config.use_kl_loss or bool(config.entropy_coeff)
        return others and self.aggregation not in (None, config.loss_agg_mode)

    def weigh(self, losses: Tensor, weights: Tensor, tokens: PolicyTokens) -> Tensor:
        """Return `losses` times the `weights` of rollout correction, (T,) each.

        A loss that is defined per row is multiplied by the geometric mean of the row's weights.
        """
        if getattr(self.function, "per_row", False):
            weights = tokens.mean_of_row((weights + _LOG_EPS).log()).exp()
        return losses * weights

    def __call__(self, tokens: PolicyTokens, clip: ClipRange) -> tuple[Tensor, Metrics]:
        """Return one loss per token (T,) and metrics."""
        more = () if self.params is None else (self.params,)
        result = self.function(tokens, clip, *more)
        is_pair = isinstance(result, tuple) and len(result) == 2
        shape = tokens.log_probs.shape
        is_right = is_pair and getattr(result[0], "shape", None) == shape
        is_right = is_right and isinstance(result[1], Mapping)
        expected = f"losses, a tensor of {tuple(shape)}, and a dict of metrics"
        check_result(self.function, is_right, result, expected)
        return result


def policy_loss(
    aggregation: str | None = None,
    params: type[plugins.Params] | None = None,
    per_row: bool = False,
    advised: str | None = None,
    uses: Sequence[str] | None = None,
) -> Callable[[F], F]:
    """Declare the only aggregation mode of a policy loss, if any, and the class of its settings.

    `per_row`: the loss is that of a row, with the same value on each of its tokens. `advised`: the
    aggregation mode that the loss was published with; others give a warning. `uses` are the fields
    of its `ClipRange` that it reads; None = all. Keys without effect are reported.
    """
    return plugins.declare(
        aggregation=aggregation,
        Params=params,
        per_row=per_row,
        advised_aggregation=advised,
        unused_keys=partial(_unused_keys, aggregation, uses),
    )


def _unused_keys(
    aggregation: str | None, uses: Sequence[str] | None, config: Config
) -> dict[str, str | plugins.Unused]:
    correction = config.algorithm.rollout_correction
    actor = config.actor_rollout_ref.actor
    if correction.bypass_mode is True and correction.loss_type == "reinforce":
        return {}  # another loss has its place
    found: dict[str, str | plugins.Unused] = {}
    if uses is not None:
        names = [name for name in ("low", "high", "c") if name not in uses]
        found = {f"{_ACTOR}.clip_ratio_{name}": "" for name in names}
        if not {"low", "high"} & set(uses):
            found[f"{_ACTOR}.clip_ratio"] = ""
    if aggregation and not (actor.use_kl_loss or actor.entropy_coeff):
        causes = f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.entropy_coeff"
        reason = f"it is aggregated by {aggregation}, and there is no other term"
        for name in ("loss_agg_mode", "loss_scale_factor"):
            found[f"{_ACTOR}.{name}"] = plugins.Unused(reason, causes)
    return found


def load_policy_loss(name: str, settings: Mapping[str, Any]) -> TokenLoss:
    """Load a policy loss by name or `module:function` and validate its settings.

    Raises ConfigError for an unknown name or wrong settings.
    """
    function = plugins.load("policy_losses", name)
    key = "actor_rollout_ref.actor.policy_loss.params"
    return TokenLoss(function, plugins.parse_params(function, name, settings, key))


def token_means(mask: Tensor, values: Mapping[str, Tensor]) -> Metrics:
    """Return the mean of each of `values` (T,) over the unmasked tokens, as mergeable metrics.

    `mask`: (T,). Waits for the device once in all.
    """
    names = list(values)
    stacked = torch.stack(
        [torch.where(mask > 0, values[name].detach().to(mask), 0.0) for name in names]
        + [torch.ones_like(mask)]
    )
    *totals, num_tokens = (stacked @ mask).tolist()
    return {name: Mean(total, num_tokens) for name, total in zip(names, totals, strict=True)}


def clipped(ratio: Tensor, tokens: PolicyTokens, clip: ClipRange) -> tuple[Tensor, Tensor]:
    """Return PPO's pessimistic bound max(−A·ρ, −A·clip(ρ, 1 − low, 1 + high)) for `ratio` (T,).

    The second tensor is True where the clipped side is the larger. (T,) each.
    """
    free = -tokens.advantages * ratio
    held = -tokens.advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    return torch.maximum(free, held), held > free
