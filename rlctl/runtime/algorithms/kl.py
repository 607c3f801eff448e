"""Estimates of KL(π ‖ π_ref) from tokens drawn from π, and controllers of its weight in the reward.

Schulman, "Approximating KL divergence" (2020). An estimator is a function of d = log π − log π_ref
(T,) that returns one estimate per token (T,). It is found by an entry point of the group
`rlctl.kl_estimators` or as `module:function`.

Estimators whose name ends with `+` have the value of the estimator and the gradient of k2. The
expectation of k2's gradient is that of the KL; those of k1 and k3 are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlctl import plugins
from rlctl.plugins.result_check import check_result
from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import Stateless

KLEstimator = Callable[[Tensor], Tensor]


def load_kl_estimator(name: str) -> KLEstimator:
    """Load an estimator by name or `module:function`. Raises ConfigError for an unknown name."""
    function = plugins.load("kl_estimators", name)
    return partial(_checked, function) if ":" in name else function


def _checked(function: KLEstimator, d: Tensor) -> Tensor:
    """Return the estimate of a user's function; raise ConfigError unless it is (T,)."""
    result = function(d)
    is_right = getattr(result, "shape", None) == d.shape
    check_result(function, is_right, result, f"a tensor of {tuple(d.shape)}")
    return result


def k1(d: Tensor) -> Tensor:
    """Return d: (T,). Unbiased, high variance."""
    return d


def absolute(d: Tensor) -> Tensor:
    """Return |d|: (T,)."""
    return torch.abs(d)


def k2(d: Tensor) -> Tensor:
    """Return d²/2: (T,)."""
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """Return e^−d + d − 1: (T,), with d clamped to ±20 and the result to ±10."""
    x = (-d).clamp(-20.0, 20.0)
    return (x.exp() - x - 1).clamp(-10.0, 10.0)


def k1_plus(d: Tensor) -> Tensor:
    """Return k1 with the gradient of k2: (T,)."""
    return _with_k2_gradient(k1(d), d)


def absolute_plus(d: Tensor) -> Tensor:
    """Return |d| with the gradient of k2: (T,)."""
    return _with_k2_gradient(absolute(d), d)


def k2_plus(d: Tensor) -> Tensor:
    """Return k2: (T,). It has the gradient of k2 already."""
    return _with_k2_gradient(k2(d), d)


def k3_plus(d: Tensor) -> Tensor:
    """Return k3 with the gradient of k2: (T,)."""
    return _with_k2_gradient(k3(d), d)


def _with_k2_gradient(value: Tensor, d: Tensor) -> Tensor:
    """Return `value` (T,) with the gradient of k2 at d (T,)."""
    gradient = k2(d)
    return gradient + (value - gradient).detach()


@dataclass
class KLController(Stateless):
    """A constant weight β of a KL penalty in the reward; a resumed run uses its configuration's.

    `coef` is used for a batch first, then updated with that batch's KL.
    """

    coef: float

    def update(self, kl: float, num_rows: int) -> None:
        """Adapt `coef` to `kl`, the mean over the `num_rows` rows of the mean over tokens."""


@dataclass
class AdaptiveKL(KLController):
    """A β that follows the KL: β ×= 1 + clip(kl/target − 1, ±0.2)·rows/horizon.

    Ziegler et al., arXiv 1909.08593, section 2.2.
    """

    target: float
    horizon: float

    def update(self, kl: float, num_rows: int) -> None:
        """Raise β if `kl` is above the target, lower it otherwise; NaN and infinities keep it."""
        if not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_rows / self.horizon

    def state_dict(self) -> dict[str, Any]:
        """Return the present β."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore β; keep the configuration's if it was fixed in the checkpoint."""
        self.coef = state.get("coef", self.coef)


def make_kl_controller(config: schema.KLControl) -> KLController:
    """Build the controller that `algorithm.kl_ctrl` describes."""
    if config.type == "adaptive":
        return AdaptiveKL(config.kl_coef, config.target_kl, config.horizon)
    return KLController(config.kl_coef)
