"""Estimates of the KL divergence from samples, and what sets the weight of the penalty.

The estimators of Schulman, "Approximating KL divergence" (2020), for tokens drawn from π: d = log π − log π_ref.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlctl.runtime.algorithms.registry import unknown_name


def _k3(d: Tensor) -> Tensor:
    x = (-d).clamp(-20.0, 20.0)
    return (x.exp() - x - 1).clamp(-10.0, 10.0)


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "abs": torch.abs,
    "k2": lambda d: d.square() / 2,
    "k3": _k3,
}
_OTHER_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KL_KINDS = (*_KINDS, *_OTHER_NAMES)


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """An estimate of KL(π ‖ π_ref) for each token, of the shape of its inputs.

    k1 (kl): d · abs: |d| · k2 (mse): d²/2 · k3 (low_var_kl): e^−d + d − 1, with d clamped to ±20 and the result to ±10. A "+" behind the
    name keeps the value and takes the gradient of k2, whose expectation is that of the KL itself (those of k1 and k3 are not).
    `ConfigError` for another `kind`.
    """
    base = kind.removesuffix("+")
    base = _OTHER_NAMES.get(base, base)
    if base not in _KINDS:
        raise unknown_name(
            "KL estimate",
            kind,
            [*KL_KINDS, *(f"{name}+" for name in KL_KINDS)],
            "kl_penalty or kl_loss_type",
        )
    d = log_probs - ref_log_probs
    value = _KINDS[base](d)
    if not kind.endswith("+"):
        return value
    k2 = _KINDS["k2"](d)
    return k2 + (value - k2).detach()


class KLController(Protocol):
    """The weight β of a KL penalty in the reward. `coef` is used for a batch first, then updated with that batch's KL."""

    coef: float

    def update(self, kl: float, num_rows: int) -> None:
        """`kl`: mean over rows of the mean over tokens; `num_rows`: rows of the batch."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class FixedKL:
    """β stays what it is."""

    coef: float

    def update(self, kl: float, num_rows: int) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, Any]:
        """None: β is the configuration's, also of a run that goes on with another one."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take up."""


@dataclass
class AdaptiveKL(FixedKL):
    """β ×= 1 + clip(kl/target − 1, ±0.2)·rows/horizon. Ziegler et al., arXiv 1909.08593, section 2.2."""

    target: float
    horizon: float

    def update(self, kl: float, num_rows: int) -> None:
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_rows / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef = state.get("coef", self.coef)  # none when β was fixed before


def make_kl_controller(type: str, kl_coef: float, target_kl: float, horizon: float) -> KLController:
    """The controller that `algorithm.kl_ctrl` describes, fixed or adaptive; `ConfigError` for another type."""
    match type:
        case "fixed":
            return FixedKL(kl_coef)
        case "adaptive":
            return AdaptiveKL(kl_coef, target_kl, horizon)
        case _:
            raise unknown_name(
                "KL controller", type, ["fixed", "adaptive"], "algorithm.kl_ctrl.type"
            )
