"""Retention of checkpoints: which ones `max_ckpt_to_keep` and `keep_best` keep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlctl.recipes import schema
from rlctl.runtime.checkpoint.store import STATE


@dataclass(frozen=True)
class Retention:
    """Rule for the checkpoints to keep: the newest, and the best by a metric.

    `newest` is their number; None: all. `metric` is None where no best ones are kept.
    """

    newest: int | None
    metric: str | None
    largest: bool
    k: int

    @classmethod
    def from_config(cls, trainer: schema.Trainer) -> Retention:
        """Return the retention set by `trainer.max_ckpt_to_keep` and `trainer.keep_best`."""
        best = trainer.keep_best
        return cls(trainer.max_ckpt_to_keep, best.metric, best.mode == "max", best.k)

    def to_delete(self, metrics: Mapping[int, Mapping[str, float | None]]) -> list[int]:
        """Return the steps whose checkpoints may be deleted, never the newest.

        `metrics` maps each step with a checkpoint to its metrics. Of equal checkpoints the older
        one counts as better.
        """
        steps = sorted(metrics)
        if self.newest is None:
            return []
        values = {
            step: value
            for step in steps
            if (value := metrics[step].get(self.metric or "")) is not None
        }
        best = sorted(
            values, key=lambda step: (-values[step] if self.largest else values[step], step)
        )[: self.k]
        return [step for step in steps[: -self.newest] if step not in best]


def metrics_at(checkpoint: Path) -> Mapping[str, float | None]:
    """Return the metrics of a checkpoint's step; empty, so never best, if they cannot be read."""
    try:
        return metrics_in((checkpoint / STATE).read_bytes())
    except OSError:
        return {}


def metrics_in(state: bytes) -> Mapping[str, float | None]:
    """Return the metrics in the content of a checkpoint's `state.json`; empty if it is damaged."""
    try:
        return dict(json.loads(state)["metrics"])
    except (ValueError, TypeError, KeyError):
        return {}
