"""Normalization of a model's scores: a mean is subtracted, a deviation divides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

_EPSILON = 1e-6


@dataclass
class Scale:
    """Mean and sum of squared deviations of `count` scores.

    With `running`, the scores of each batch are included before it is normalized (Chan, Golub and
    LeVeque 1979, equations 2.1).
    """

    count: float
    mean: float
    squares: float
    running: bool

    @classmethod
    def fixed(cls, mean: float, std: float) -> Scale:
        """Return a scale that does not change."""
        return cls(1.0, mean, std**2, running=False)

    @property
    def std(self) -> float:
        """Standard deviation; 1 until scores differ."""
        return (self.squares / self.count) ** 0.5 if self.squares > 0 else 1.0

    def update(self, scores: Tensor) -> None:
        """Include `scores` (N,)."""
        if not self.running or not len(scores):
            return
        values, number = scores.double(), len(scores)
        mean, total = float(values.mean()), self.count + number
        difference = mean - self.mean
        self.squares += float((values - mean).square().sum())
        self.squares += difference**2 * self.count * number / total
        self.mean += difference * number / total
        self.count = total

    def normalize(self, scores: Tensor) -> Tensor:
        """Return (scores - mean) / std, (N,) float32."""
        return ((scores.double() - self.mean) / (self.std + _EPSILON)).float()

    def state_dict(self) -> dict[str, Any]:
        """Return what changes between steps."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state and self.running:
            self.count, self.mean, self.squares = (
                state[name] for name in ("count", "mean", "squares")
            )


def running_scale() -> Scale:
    """Return a scale without scores."""
    return Scale(0.0, 0.0, 0.0, running=True)
