"""Tests of the KL estimators and of the controllers of the KL penalty."""

from __future__ import annotations

import math

import pytest
import torch

from rlctl.errors import ConfigError
from rlctl.plugins import names
from rlctl.recipes import schema
from rlctl.runtime.algorithms.kl import (
    AdaptiveKL,
    KLController,
    load_kl_estimator,
    make_kl_controller,
)

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
