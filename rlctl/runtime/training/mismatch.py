"""Check that the rollout engine and the trainer compute the same probabilities.

A difference above `trainer.mismatch.halt` ends the run before it learns from the batch; smaller
ones only raise the alarm `rollout_mismatch`.
"""

from __future__ import annotations

import torch

from rlctl.errors import RlctlError
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.agents.delegating import DelegatingActor
from rlctl.runtime.algorithms.rollout_mismatch import SampledTokens, probs_diff
from rlctl.runtime.batch import LogProbs, Prompts, Rollouts
from rlctl.runtime.roles import Actor
from rlctl.tracking.metrics import Metrics

METRIC = "training/rollout_probs_diff_mean"


class RolloutMismatch(Exception):
    """Engine and trainer differ by `value`, more than `limit`, on the tokens of `batch`."""

    def __init__(self, value: float, limit: float, batch: Rollouts, log_probs: LogProbs) -> None:
        super().__init__(f"{METRIC} is {value:.3g}, above {limit:g}")
        self.value = value
        self.limit = limit
        self.batch = batch
        self.log_probs = log_probs


class CheckedActor(DelegatingActor):
    """Actor that compares its log-probs with the engine's until the first update of the step.

    `compute_log_probs` raises RolloutMismatch where they differ by more than `limit`. After an
    update the policy is not the one that generated the responses, so nothing is compared.
    """

    def __init__(self, actor: Actor, limit: float) -> None:
        super().__init__(actor)
        self.limit = limit
        self._is_sampling_policy = False

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        """See `Actor`."""
        self._is_sampling_policy = True
        return self.actor.generate_sequences(prompts, seed=seed, validate=validate, greedy=greedy)

    def compute_log_probs(self, batch: Rollouts) -> LogProbs:
        """See `Actor`."""
        log_probs = self.actor.compute_log_probs(batch)
        if self._is_sampling_policy:
            check_rollout(batch, log_probs, self.limit)
        return log_probs

    def update(self, batch: Rollouts, lr: float) -> Metrics:
        """See `Actor`."""
        self._is_sampling_policy = False
        return self.actor.update(batch, lr)


def check_rollout(batch: Rollouts, log_probs: LogProbs, limit: float) -> None:
    """Raise RolloutMismatch if the mean of |π_engine − π_trainer| over tokens exceeds `limit`.

    NaN counts as exceeding it.
    """
    diff = probs_diff(SampledTokens.from_rollouts(batch, log_probs.log_probs.values))
    value = float(diff.mean()) if len(diff) else 0.0
    if not value <= limit:
        raise RolloutMismatch(value, limit, batch, log_probs)


def record_mismatch(error: RolloutMismatch, step: int, run: RunDir) -> RlctlError:
    """Write the batch to the attempt's folder and an event; return the error that ends the run."""
    dump = run.attempt / f"mismatch_step_{step:06d}.pt"
    torch.save({"batch": error.batch, "log_probs": error.log_probs.log_probs}, dump)
    run.event(
        "mismatch_halt",
        step=step,
        metric=METRIC,
        value=error.value,
        limit=error.limit,
        batch=str(dump),
    )
    return RlctlError(
        f"{METRIC} is {error.value:.3g} in step {step}, above "
        f"trainer.mismatch.halt={error.limit:g}: the rollout engine has other weights than the "
        "trainer, or computes other probabilities with them",
        where=str(dump),
        hint="inspect the batch with torch.load(…, weights_only=False): `batch.rollout_log_probs` "
        "are the engine's, `log_probs` the trainer's; compare with rollout.name=hf, or set "
        "trainer.mismatch.halt=null to continue regardless",
    )
