"""Policy losses against verl's golden numbers; values and gradients against plain Python."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlctl.plugins import names
from rlctl.runtime.algorithms.aggregate import aggregate, count
from rlctl.runtime.algorithms.policy_losses.base import (
    ClipRange,
    PolicyTokens,
    TokenLoss,
    load_policy_loss,
)
from tests.numerics import loss_formulas
from tests.numerics.batches import golden_tokens, random_tokens
from tests.numerics.loss_formulas import FORMULAS, SETTINGS, Plain
from tests.plugin_folders import of_plugins

CLIP = ClipRange(low=0.2, high=0.2, c=3.0)
POLICY_LOSSES = names("policy_losses")


def get_policy_loss(name: str, **settings: float) -> TokenLoss:
    """Load a loss with the settings of the formulas; `settings` replace them."""
    return load_policy_loss(name, SETTINGS.get(name, {}) | settings)


def loss_of(
    name: str, tokens: PolicyTokens, clip: ClipRange = CLIP, mode: str = "token-mean"
) -> tuple[Tensor, dict[str, float]]:
    function = get_policy_loss(name)
    losses, metrics = function(tokens, clip)
    mode = function.aggregation or mode
    part = (tokens.mask, tokens.row, tokens.num_rows, mode)
    return aggregate(losses, *part) / (count(*part) or 1.0), {
        key: metric.value for key, metric in metrics.items()
    }


# Computed with the wheel of verl 0.9.1 on `golden_tokens`, with token-mean. GSPO's loss with
# seq-mean-token-mean is -0.006306.
GOLDEN = {
    "vanilla": -0.012552,
    "gspo": -0.129779,
    "sapo": -0.159161,
    "gpg": 0.11,
    "cispo": 0.228760,
    "geo_mean": -0.116867,
    "dppo_tv": 0.238428,
    "dppo_kl": 0.238428,
}


@pytest.mark.parametrize("name", of_plugins("policy_losses", GOLDEN))
def test_golden(name: str) -> None:
    loss, metrics = loss_of(name, golden_tokens())
    assert float(loss) == pytest.approx(GOLDEN[name], abs=1e-6)
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.2)


@pytest.mark.plugin("objectives")
def test_gspo_is_averaged_as_configured() -> None:
    loss, _ = loss_of("gspo", golden_tokens(), mode="seq-mean-token-mean")
    assert float(loss) == pytest.approx(-0.006306, abs=1e-6)


def test_golden_metrics_and_gradient() -> None:
    log_probs = golden_tokens().log_probs.clone().requires_grad_()
    loss, metrics = loss_of("vanilla", golden_tokens(log_probs))
    loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx(
        [0, 0, -0.44207, 0, 0, -0.09048, 0, 0], abs=1e-5
    )
    assert metrics["actor/pg_clipfrac"] == pytest.approx(0.4)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(0.2)


@pytest.mark.plugin("objectives")
def test_golden_metric_of_cispo() -> None:
    assert loss_of("cispo", golden_tokens())[1]["actor/pg_clipfrac"] == pytest.approx(0.6)


def tokens_with_probs(seed: int) -> PolicyTokens:
    """Return random tokens with log-probs below 0: DPPO uses the probabilities."""
    tokens = random_tokens(seed)
    return replace(
        tokens,
        log_probs=tokens.log_probs.clamp(max=-0.01),
        old_log_probs=tokens.old_log_probs.clamp(max=-0.01),
    )


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("seed", range(2))
def test_value_and_gradient_of_each_token(name: str, seed: int) -> None:
    """Compare with the formulas. A new loss needs a formula in `FORMULAS`."""
    tokens = tokens_with_probs(seed)
    leaf = tokens.log_probs.clone().requires_grad_()
    losses, _ = get_policy_loss(name)(replace(tokens, log_probs=leaf), loss_formulas.CLIP)
    (losses * tokens.mask).sum().backward()
    assert leaf.grad is not None
    expected = FORMULAS[name](Plain(tokens))
    for t in range(len(leaf)):
        value, slope = expected.get(t, (0.0, 0.0))
        if tokens.mask[t]:
            assert float(losses[t].detach()) == pytest.approx(value, rel=2e-5, abs=1e-6), t
        assert float(leaf.grad[t]) == pytest.approx(slope, rel=2e-5, abs=1e-6), t


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_all_losses_follow_the_policy_gradient(name: str) -> None:
    """Check the gradient −A at π = π_old, with one advantage per row."""
    tokens = tokens_with_probs(0)
    advantages = torch.randn(tokens.num_rows)[tokens.row]
    leaf = tokens.old_log_probs.clone().requires_grad_()
    on_policy = replace(tokens, log_probs=leaf, advantages=advantages)
    untreated = {
        "clip_cov": {"clip_cov_lb": 1e9, "clip_cov_ub": 2e9},
        "kl_cov": {"ppo_kl_coef": 0.0},
    }
    function = get_policy_loss(name, **untreated.get(name, {}))
    losses, metrics = function(on_policy, loss_formulas.CLIP)
    (losses * tokens.mask).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, -advantages * tokens.mask, rtol=1e-5, atol=1e-6)
    assert metrics["actor/ppo_kl"].value == 0.0


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_losses_are_finite_far_off_policy(name: str) -> None:
    tokens = tokens_with_probs(1)
    far = replace(
        tokens,
        log_probs=tokens.old_log_probs
        + 100 * (tokens.old_log_probs - tokens.old_log_probs.mean()).sign(),
    )
    leaf = far.log_probs.requires_grad_()
    losses, _ = get_policy_loss(name)(far, loss_formulas.CLIP)
    losses.sum().backward()
    assert leaf.grad is not None
    assert bool(torch.isfinite(losses).all())
    assert bool(torch.isfinite(leaf.grad).all())


@pytest.mark.plugin("objectives")
def test_clip_cov_draws_its_share_of_tokens() -> None:
    torch.manual_seed(0)
    tokens = random_tokens(2, lengths=(50, 50))
    clip = ClipRange(low=10.0, high=10.0, c=3.0)
    clip_cov = get_policy_loss("clip_cov", clip_cov_ratio=0.1, clip_cov_lb=0.0, clip_cov_ub=1e9)
    losses, metrics = clip_cov(tokens, clip)
    num_tokens = int(tokens.mask.sum())
    assert metrics["actor/pg_clipfrac"].value == pytest.approx(int(0.1 * num_tokens) / num_tokens)
    assert int(((losses == 0) & (tokens.advantages != 0)).sum()) == int(0.1 * num_tokens)


@pytest.mark.plugin("objectives")
def test_kl_cov_treats_the_largest_covariances() -> None:
    tokens = random_tokens(2, lengths=(50, 50))
    few, none = (
        get_policy_loss("kl_cov", kl_cov_ratio=0.1, ppo_kl_coef=k)(tokens, CLIP)[0]
        for k in (0.3, 0.0)
    )
    covariance = Plain(tokens).covariance()
    expected = sorted(covariance, key=lambda t: -covariance[t])[: int(0.1 * len(covariance))]
    assert sorted((few != none).nonzero().squeeze(-1).tolist()) == sorted(expected)


def test_metrics_of_parts_join_to_those_of_the_batch() -> None:
    tokens = random_tokens(3)
    _, whole = get_policy_loss("vanilla")(tokens, loss_formulas.CLIP)
    first, second = tokens.row < 2, tokens.row >= 2
    fields = ("log_probs", "old_log_probs", "advantages", "mask", "row")
    parts = [
        get_policy_loss("vanilla")(
            replace(tokens, **{name: getattr(tokens, name)[rows] for name in fields}),
            loss_formulas.CLIP,
        )[1]
        for rows in (first, second)
    ]
    for name, metric in whole.items():
        assert parts[0][name].join(parts[1][name]).value == pytest.approx(metric.value, rel=1e-6)


@pytest.mark.plugin("objectives")
def test_weights_of_a_loss_per_row_are_averaged_geometrically() -> None:
    """Check rows of three and two unmasked tokens by hand; other losses weigh each token."""
    tokens, weights = golden_tokens(), torch.tensor([0.5, 2.0, 1.5, 9.0, 0.25, 4.0, 9.0, 9.0])
    losses = torch.arange(8.0)
    geometric = [(0.5 * 2.0 * 1.5) ** (1 / 3)] * 4 + [1.0] * 4
    by_row = get_policy_loss("geo_mean").weigh(losses, weights, tokens)
    assert by_row.tolist() == pytest.approx((losses * torch.tensor(geometric)).tolist())
    by_token = get_policy_loss("vanilla").weigh(losses, weights, tokens)
    assert torch.equal(by_token, losses * weights)
