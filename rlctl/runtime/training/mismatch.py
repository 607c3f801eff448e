"""The guard between engine and trainer: a run does not learn from answers that another model gave. (Smaller drifts ring an alarm.)"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from rlctl.errors import RlctlError
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.algorithms.correction import SampledTokens, probs_diff
from rlctl.runtime.batch import LogProbs, Rollouts
from rlctl.runtime.roles import Actor, Roles

METRIC = "training/rollout_probs_diff_mean"


@dataclass
class MismatchGuard:
    """Compares the engine's log-probs with the trainer's as soon as an algorithm asks for them: before it learns from the batch."""

    halt: float | None
    run: RunDir
    step: int = 0  # set by the trainer

    def watch(self, roles: Roles) -> Roles:
        """The same roles; what the actor says of its own answers is checked."""
        return replace(roles, actor=cast(Actor, _WatchedActor(roles.actor, self)))

    def check(self, batch: Rollouts, old: LogProbs) -> None:
        """`old` are the trainer's log-probs under the weights that answered. `RlctlError` beyond `halt`; NaN is beyond everything."""
        diff = probs_diff(SampledTokens.from_rollouts(batch, old))
        value = float(diff.mean()) if len(diff) else 0.0
        if self.halt is not None and not value <= self.halt:
            self._halt(value, self.halt, batch, old)

    def _halt(self, value: float, limit: float, batch: Rollouts, old: LogProbs) -> None:
        dump = self.run.attempt / f"mismatch_step_{self.step:06d}.pt"
        torch.save({"batch": batch, "log_probs": old.log_probs}, dump)
        self.run.event(
            "mismatch_halt",
            step=self.step,
            metric=METRIC,
            value=value,
            limit=limit,
            batch=str(dump),
        )
        raise RlctlError(
            f"{METRIC} is {value:.3g} in step {self.step}, above trainer.mismatch.halt={limit:g}: "
            "the rollout engine does not answer with the weights that are trained, or computes something else with them",
            where=str(dump),
            hint="look at the batch with torch.load(…, weights_only=False): `batch.rollout_log_probs` are the engine's, `log_probs` the "
            "trainer's; rollout.name=hf is an engine to compare with, trainer.mismatch.halt=null goes on regardless",
        )


class _WatchedActor:
    """An actor whose log-probs are checked, as long as its weights are those that answered: after an update they are others."""

    def __init__(self, actor: Actor, guard: MismatchGuard) -> None:
        self._actor = actor
        self._guard = guard
        self._answered = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def generate_sequences(self, *args: Any, **kwargs: Any) -> Rollouts:
        self._answered = True
        return self._actor.generate_sequences(*args, **kwargs)

    def compute_log_probs(self, batch: Rollouts) -> LogProbs:
        old = self._actor.compute_log_probs(batch)
        if self._answered:
            self._guard.check(batch, old)
        return old

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self._answered = False
        return self._actor.update(*args, **kwargs)
