"""Policy losses of ratios: vanilla (PPO with dual clip), GSPO, CISPO, SAPO, GPG, GMPO, DRO; and the door to all policy losses.

d = clamp(log π − log π_old, ±20), ρ = e^d, A the advantage of a token. All give one loss a token, to be aggregated by `aggregate`; all
report `actor/ppo_kl`, the mean of −d. Names and definitions are verl's, so that results can be compared. `covariance_losses` and
`divergence_losses` hold the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl import plugins
from rlctl.runtime.algorithms.policy_losses import covariance, divergence  # noqa: F401  (their losses register themselves)
from rlctl.runtime.algorithms.policy_losses.base import (
    POLICY_LOSSES,
    ClipParams,
    PolicyLoss,
    PolicyTokens,
    clipped,
    policy_loss,
    token_means,
)
from rlctl.tracking.metrics import Metrics

__all__ = [
    "POLICY_LOSSES",
    "ClipParams",
    "PolicyLoss",
    "PolicyTokens",
    "get_policy_loss",
    "policy_loss",
]


def get_policy_loss(name: str) -> PolicyLoss:
    """The policy loss of that name, or a user's function `module:name`; `ConfigError` with the nearest name and the list otherwise."""
    if ":" not in name:
        return POLICY_LOSSES.look_up(name)
    function = plugins.load("policy losses", name)
    return next(
        (known for known in POLICY_LOSSES.values() if known.compute is function),
        PolicyLoss(name, None, function),
    )


@policy_loss("vanilla")
def vanilla(tokens: PolicyTokens, params: ClipParams) -> tuple[Tensor, Metrics]:
    """M = max(−Aρ, −A·clip(ρ, 1 − low, 1 + high)); where A < 0: min(M, −A·c).

    PPO, arXiv 1707.06347, equation 7; two bounds: DAPO, arXiv 2503.14476 (Clip-Higher); dual clip: arXiv 1912.09729, with c > 1.
    """
    d = tokens.log_ratio
    bound, is_clipped = clipped(d.exp(), tokens, params)
    ceiling = -tokens.advantages * params.c
    is_lower = (tokens.advantages < 0) & (bound > ceiling)
    metrics = {
        "actor/pg_clipfrac": is_clipped,
        "actor/pg_clipfrac_lower": is_lower,
        "actor/ppo_kl": -d,
    }
    return torch.where(is_lower, ceiling, bound), token_means(tokens.mask, metrics)


@policy_loss("gspo")
def gspo(tokens: PolicyTokens, params: ClipParams) -> tuple[Tensor, Metrics]:
    """PPO's clip on the ratio of the sequence, exp(mean_t d), with a gradient for each token. GSPO-token, arXiv 2507.18071.

    The token's weight is exp(min(lp − sg(lp) + sg(s), 10)), s = mean_t d of its row; no dual clip. The paper averages over
    rows: `loss_agg_mode: seq-mean-token-mean`.
    """
    d = tokens.log_ratio
    log_weight = tokens.log_probs - tokens.log_probs.detach() + tokens.mean_of_row(d).detach()
    losses, is_clipped = clipped(log_weight.clamp(max=10.0).exp(), tokens, params)
    return losses, token_means(tokens.mask, {"actor/pg_clipfrac": is_clipped, "actor/ppo_kl": -d})


@policy_loss("cispo")
def cispo(tokens: PolicyTokens, params: ClipParams) -> tuple[Tensor, Metrics]:
    """−sg(clip(ρ, 1 − low, 1 + high))·A·log π: every token keeps a gradient. MiniMax-M1, arXiv 2506.13585.

    The paper has no lower bound in its experiments; here it is `low`, as in verl.
    """
    d = tokens.log_ratio
    ratio = d.exp().detach()
    weight = ratio.clamp(1 - params.low, 1 + params.high)
    metrics = {"actor/pg_clipfrac": weight != ratio, "actor/ppo_kl": -d}
    return -weight * tokens.advantages * tokens.log_probs, token_means(tokens.mask, metrics)


@policy_loss("sapo", aggregation="seq-mean-token-mean")
def sapo(tokens: PolicyTokens, params: ClipParams) -> tuple[Tensor, Metrics]:
    """−A·(4/τ)·sigmoid(τ(ρ − 1)): a soft gate in the place of the clip, with slope 1 at ρ = 1. SAPO, arXiv 2511.20347.

    τ is `tau_positive` for A > 0 and `tau_negative` otherwise. Averaged over rows, as in the paper.
    """
    d = tokens.log_ratio
    tau = torch.where(tokens.advantages > 0, params.tau_positive, params.tau_negative)
    gate = torch.sigmoid(tau * (d.exp() - 1)) * (4 / tau)
    return -tokens.advantages * gate, token_means(tokens.mask, {"actor/ppo_kl": -d})


@policy_loss("gpg")
def gpg(tokens: PolicyTokens, params: ClipParams) -> tuple[Tensor, Metrics]:  # noqa: ARG001
    """−A·log π, the plain policy gradient. GPG, arXiv 2504.02546."""
    return -tokens.advantages * tokens.log_probs, token_means(
        tokens.mask, {"actor/ppo_kl": -tokens.log_ratio}
    )


@policy_loss("geo_mean", aggregation="seq-mean-token-mean")
def geo_mean(tokens: PolicyTokens, params: ClipParams) -> tuple[Tensor, Metrics]:
    """−mean_t(A)·exp(mean_t d'), d' the pessimistic one of d and clamp(d, −low, high). GMPO, arXiv 2507.20673.

    low and high bound the *logarithm* of the ratio (0.4 in the paper). The row's loss stands on each of its tokens, so that the mean over
    tokens and rows is the mean over rows. Weights of rollout correction are therefore averaged arithmetically (verl: geometrically).
    """
    d = tokens.log_ratio
    held = d.clamp(-params.low, params.high)
    sign = tokens.advantages.sign()
    pessimistic = sign * torch.minimum(sign * d, sign * held)  # 0 where A = 0, as in verl
    losses = -tokens.mean_of_row(tokens.advantages) * tokens.mean_of_row(pessimistic).exp()
    is_clipped = d != held
    high, low = is_clipped & (tokens.advantages > 0), is_clipped & (tokens.advantages < 0)
    return losses, token_means(
        tokens.mask, {"actor/pg_clipfrac": high, "actor/pg_clipfrac_lower": low, "actor/ppo_kl": -d}
    )


@policy_loss("dro")
def dro(tokens: PolicyTokens, params: ClipParams) -> tuple[Tensor, Metrics]:
    """−(A·log π − β/2·d²): no ratio and no clip, a quadratic leash to π_old. DRO, arXiv 2405.19107, with A in the place of r − V."""
    d = tokens.log_ratio
    losses = -(tokens.advantages * tokens.log_probs - params.beta / 2 * d.square())
    return losses, token_means(tokens.mask, {"actor/ppo_kl": -d})
