"""Estimates of the KL divergence KL(π ‖ π_ref) from tokens drawn from π.

Schulman, "Approximating KL divergence" (2020). An estimator is a function of d = log π − log π_ref
(T,) that returns one estimate per token (T,). It is found by an entry point of the group
`rlctl.kl_estimators` or as `module:function`.

Estimators whose name ends with `+` have the value of the estimator and the gradient of k2. The
expectation of k2's gradient is that of the KL; those of k1 and k3 are not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlctl import plugins

KLEstimator = Callable[[Tensor], Tensor]


def load_kl_estimator(name: str) -> KLEstimator:
    """Load an estimator by name or `module:function`. Raises ConfigError for an unknown name."""
    return plugins.load("kl_estimators", name)


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
