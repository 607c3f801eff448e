"""What a policy loss is: its inputs, its parameters, its metrics, and where it is registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlctl.runtime.algorithms.registry import Registry
from rlctl.runtime.ops import row_mean
from rlctl.tracking.metrics import Mean, Metrics

if TYPE_CHECKING:
    from rlctl.recipes.schema import Actor

# |log-ratio| beyond which exp() is not worth computing: e^20 is 5e8.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, eq=False)
class PolicyTokens:
    """The response tokens of whole rows, end to end: (T,) each. Only `log_probs` carries a gradient."""

    log_probs: Tensor  # under the weights that learn
    old_log_probs: Tensor  # under the weights at the start of the step
    advantages: Tensor
    mask: Tensor  # float, 1 where the policy wrote the token
    row: Tensor  # int64, the row of each token
    num_rows: int

    @property
    def log_ratio(self) -> Tensor:
        """d = log π/π_old, between −20 and 20: (T,)."""
        return (self.log_probs - self.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def mean_of_row(self, x: Tensor) -> Tensor:
        """The mean of x (T,) over the unmasked tokens of each row, on each token of the row: (T,)."""
        return row_mean(x, self.mask, self.row, self.num_rows)[self.row]


@dataclass(frozen=True)
class ClipParams:
    """The numbers of policy losses. A run sets them all from its recipe (`of`); the values here are those of single losses' papers, for
    callers that have no recipe.
    """

    low: float  # the ratio is clipped to [1 − low, 1 + high]; a divergence for dppo_*
    high: float
    c: float  # dual clip: the ratio above which a negative advantage stops counting, > 1
    tau_positive: float = 1.0  # sapo: temperature of the gate for A > 0
    tau_negative: float = 1.05  # sapo: for A ≤ 0
    clip_cov_ratio: float = 2e-4  # clip_cov: share of tokens that is treated
    kl_cov_ratio: float = 2e-4  # kl_cov: likewise
    cov_low: float = 1.0  # clip_cov: bounds of the covariance of a token that may be treated
    cov_high: float = 5.0
    kl_coef: float = 0.1  # kl_cov: weight of |d| on the treated tokens
    beta: float = 0.05  # dro: weight of d²/2

    @classmethod
    def of(cls, config: Actor) -> ClipParams:
        """From the section `actor_rollout_ref.actor`: `clip_ratio` where a side of its own is not set."""
        low, high, loss = config.clip_ratio_low, config.clip_ratio_high, config.policy_loss
        return cls(
            low=config.clip_ratio if low is None else low,
            high=config.clip_ratio if high is None else high,
            c=config.clip_ratio_c,
            tau_positive=config.tau_pos,
            tau_negative=config.tau_neg,
            clip_cov_ratio=loss.clip_cov_ratio,
            kl_cov_ratio=loss.kl_cov_ratio,
            cov_low=loss.clip_cov_lb,
            cov_high=loss.clip_cov_ub,
            kl_coef=loss.ppo_kl_coef,
            beta=loss.dro_beta,
        )


Compute = Callable[[PolicyTokens, ClipParams], tuple[Tensor, Metrics]]


@dataclass(frozen=True)
class PolicyLoss:
    """A registered loss: tokens in, unaggregated losses (T,) and metrics out. `aggregation` is the only mode it is defined for, if any."""

    name: str
    aggregation: str | None
    compute: Compute

    def __call__(self, tokens: PolicyTokens, params: ClipParams) -> tuple[Tensor, Metrics]:
        return self.compute(tokens, params)


POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss", "actor_rollout_ref.actor.policy_loss.loss_mode"
)


def policy_loss(name: str, aggregation: str | None = None) -> Callable[[Compute], Compute]:
    """Register a function as the policy loss `name`; it stays the plain function that it is."""

    def register(compute: Compute) -> Compute:
        POLICY_LOSSES.add(name, PolicyLoss(name, aggregation, compute))
        return compute

    return register


def token_means(mask: Tensor, values: Mapping[str, Tensor]) -> Metrics:
    """The mean of each of `values` (T,) over the unmasked tokens, as metrics that join. One wait for the device in all."""
    names = list(values)
    stacked = torch.stack(
        [torch.where(mask > 0, values[name].detach().to(mask), 0.0) for name in names]
        + [torch.ones_like(mask)]
    )
    *totals, num_tokens = (stacked @ mask).tolist()
    return {name: Mean(total, num_tokens) for name, total in zip(names, totals, strict=True)}


def clipped(ratio: Tensor, tokens: PolicyTokens, params: ClipParams) -> tuple[Tensor, Tensor]:
    """max(−A·ρ, −A·clip(ρ, 1 − low, 1 + high)), PPO's pessimistic bound, and where the clipped side is the larger: (T,) each."""
    free = -tokens.advantages * ratio
    held = -tokens.advantages * ratio.clamp(1 - params.low, 1 + params.high)
    return torch.maximum(free, held), held > free
