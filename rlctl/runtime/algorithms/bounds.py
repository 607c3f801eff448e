"""Bounds of rollout correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlctl.errors import ConfigError

_KEY = "algorithm.rollout_correction"
Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class Bounds:
    """Bounds 0 < low < high; `low` is None if there is only an upper bound."""

    low: float | None
    high: float

    @classmethod
    def parse(cls, given: str | float, key: str) -> Bounds:
        """Parse `2.0` or `"0.5_2.0"`. Raises ConfigError for anything else."""
        try:
            *low, high = [float(part) for part in str(given).split("_")]
        except ValueError:
            low = []
            high = 0.0
        lowest = low[0] if low else high / 2
        if len(low) > 1 or not 0 < lowest < high:
            raise ConfigError(
                f"{key}={given!r} is no bound",
                where=_KEY,
                hint='give one positive number, or two as in "0.5_2.0"',
            )
        return cls(low[0] if low else None, high)

    def around_one(self, key: str) -> Bounds:
        """Return these bounds. Raises ConfigError if they exclude 1, the ratio without mismatch.

        The usual cause is YAML, which reads 0.5_2 as the number 0.52.
        """
        if not (self.low or 0.0) <= 1 <= self.high:
            low = "" if self.low is None else f"{self.low:g}_"
            hint = (
                'write two bounds with a point in each, as in "0.5_2.0": YAML reads 0.5_2 as 0.52'
            )
            raise ConfigError(
                f"{key}={low}{self.high:g} leaves out a ratio of 1", where=_KEY, hint=hint
            )
        return self
