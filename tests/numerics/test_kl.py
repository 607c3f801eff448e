"""KL estimators, the controllers of the KL penalty, and the loss of values."""

from __future__ import annotations

import math

import pytest
import torch

from rlctl.errors import ConfigError
from rlctl.plugins import names
from rlctl.recipes import schema
from rlctl.runtime.algorithms.aggregate import aggregate, count
from rlctl.runtime.algorithms.kl import (
    AdaptiveKL,
    KLController,
    load_kl_estimator,
    make_kl_controller,
)
from rlctl.runtime.algorithms.value_loss import value_loss
from rlctl.runtime.base.metrics import Std, merge
from tests.numerics.batches import golden_rows

REF = [-1.1, -1, -0.5, -3, -4.2, -1.5, -9, -9]


def expected(kind: str, d: float) -> tuple[float, float]:
    """Return value and slope by log π of an estimate at d = log π − log π_ref."""
    match kind.removesuffix("+"):
        case "k1" | "kl":
            value, slope = d, 1.0
        case "abs":
            value, slope = abs(d), math.copysign(1.0, d)
        case "k2" | "mse":
            value, slope = d * d / 2, d
        case "k3" | "low_var_kl":
            value, slope = math.exp(-d) + d - 1, 1 - math.exp(-d)
        case _:
            raise AssertionError(kind)
    return value, d if kind.endswith("+") else slope


@pytest.mark.parametrize("kind", names("kl_estimators"))
def test_value_and_gradient(kind: str) -> None:
    ref = torch.tensor([-1.0, -2.0, -0.3])
    d = [0.4, -1.2, -0.05]
    leaf = (ref + torch.tensor(d)).requires_grad_()
    kl = load_kl_estimator(kind)(leaf - ref)
    kl.sum().backward()
    assert leaf.grad is not None
    assert kl.tolist() == pytest.approx([expected(kind, x)[0] for x in d], abs=1e-6)
    assert leaf.grad.tolist() == pytest.approx([expected(kind, x)[1] for x in d], abs=1e-6)


def test_k3_is_bounded() -> None:
    kl = load_kl_estimator("k3")(torch.tensor([-1000.0, 1000.0, 5.0]))
    assert kl.tolist() == pytest.approx([10.0, 10.0, math.exp(-5) + 4])


@pytest.mark.parametrize("kind", ["k4", "k3++", "full", ""])
def test_unknown_kind(kind: str) -> None:
    with pytest.raises(ConfigError, match="unknown kl estimator"):
        load_kl_estimator(kind)


def test_every_kind_has_a_variant_with_the_gradient_of_k2() -> None:
    kinds = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
    assert set(names("kl_estimators")) >= {kind + end for kind in kinds for end in ("", "+")}


def test_golden_adaptive_controller() -> None:
    config = schema.KLControl(type="adaptive", kl_coef=0.001, target_kl=0.1, horizon=10000)
    controller = make_kl_controller(config)
    controller.update(0.5, 256)
    assert controller.coef == pytest.approx(0.00100512, rel=1e-12)
    controller.update(0.05, 256)
    assert controller.coef == pytest.approx(0.0009999737856, rel=1e-12)
    controller.update(0.1, 256)
    assert controller.coef == pytest.approx(0.0009999737856, rel=1e-12)
    fixed = make_kl_controller(config.model_copy(update={"type": "fixed", "kl_coef": 0.02}))
    fixed.update(5.0, 1000)
    assert fixed == KLController(0.02)


def test_state_of_a_controller_is_restored_exactly() -> None:
    controller = AdaptiveKL(0.001, target=0.1, horizon=100)
    controller.update(0.11, 10)
    other = AdaptiveKL(0.001, target=0.1, horizon=100)
    other.load_state_dict(controller.state_dict())
    controller.update(0.3, 10)
    other.update(0.3, 10)
    assert other.coef == controller.coef


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_kl_that_is_not_finite_changes_nothing(kl: float) -> None:
    controller = AdaptiveKL(0.001, target=0.1, horizon=100)
    controller.update(kl, 10)
    assert controller.coef == 0.001


def test_golden() -> None:
    rows = golden_rows()
    old, mask = rows.given("values").flatten(), rows.mask.flatten()
    losses, metrics = value_loss(3 * old, old, rows.rewards.flatten(), mask, cliprange=0.5)
    row = torch.arange(3).repeat_interleave(4)
    divisor = count(mask, row, 3, "token-mean")
    assert divisor is not None
    assert float(aggregate(losses, mask, row, 3, "token-mean")) / divisor == pytest.approx(0.314375)
    assert metrics["critic/vf_clipfrac"].value == pytest.approx(0.25)


def test_value_and_gradient_of_each_token() -> None:
    rng = torch.Generator().manual_seed(0)
    old, new, returns = (torch.randn(40, generator=rng) for _ in range(3))
    leaf = new.clone().requires_grad_()
    losses, metrics = value_loss(leaf, old, returns, torch.ones(40), cliprange=0.5)
    losses.sum().backward()
    assert leaf.grad is not None
    clips = 0
    for t in range(40):
        v, o, r = float(new[t]), float(old[t]), float(returns[t])
        held = min(max(v, o - 0.5), o + 0.5)
        clipped = (held - r) ** 2 > (v - r) ** 2
        clips += clipped
        assert float(losses[t].detach()) == pytest.approx(
            0.5 * max((v - r) ** 2, (held - r) ** 2), rel=1e-5
        )
        assert float(leaf.grad[t]) == pytest.approx(0.0 if clipped else v - r, rel=1e-5)
    assert metrics["critic/vf_clipfrac"].value == clips / 40
    assert metrics["critic/vpred_mean"].value == pytest.approx(float(new.mean()), rel=1e-6)


def test_explained_variance_joins_exactly() -> None:
    """Join uneven parts with an offset that needs float64; masked tokens do not count."""
    rng = torch.Generator().manual_seed(1)
    returns = 1000 + torch.randn(50, generator=rng)
    old = returns + 0.5 * torch.randn(50, generator=rng)
    mask = (torch.rand(50, generator=rng) < 0.7).float()
    cuts = [slice(0, 3), slice(3, 4), slice(4, 50)]
    joined = merge(value_loss(old[c], old[c], returns[c], mask[c], 0.5)[1] for c in cuts)
    kept_returns, kept_error = returns[mask > 0].double(), (returns - old)[mask > 0].double()
    expected = 1 - float(kept_error.var()) / (float(kept_returns.var()) + 1e-5)
    assert joined["critic/vf_explained_var"].value == pytest.approx(expected, rel=1e-6)


def test_explained_variance_of_one_token_is_nan() -> None:
    one = torch.ones(1)
    assert math.isnan(value_loss(one, one, one, one, 0.5)[1]["critic/vf_explained_var"].value)


def test_std_joins_exactly() -> None:
    values = [0.1, 0.4, 0.35, 0.8]
    parts = [Std(len(p), sum(p), sum(x * x for x in p)) for p in (values[:1], values[1:])]
    assert parts[0].join(parts[1]).value == pytest.approx(
        float(torch.tensor(values).double().std())
    )
    assert math.isnan(parts[0].value)
