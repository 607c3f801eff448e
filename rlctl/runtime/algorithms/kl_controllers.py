"""Controllers of the weight β of the KL penalty in the reward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rlctl.recipes import schema


@dataclass
class KLController:
    """A constant weight β of a KL penalty in the reward.

    `coef` is used for a batch first, then updated with that batch's KL.
    """

    coef: float

    def update(self, kl: float, num_rows: int) -> None:
        """Adapt `coef` to `kl`, the mean over the `num_rows` rows of the mean over tokens."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: a resumed run uses the β of its configuration."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


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
