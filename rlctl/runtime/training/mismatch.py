"""Check that the rollout engine and the trainer compute the same probabilities.

A difference above `trainer.mismatch.halt` ends the run before it learns from the batch; smaller
ones only raise the alarm `rollout_mismatch`.
"""

from __future__ import annotations

import torch

from rlctl.errors import RlctlError
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.agents.delegating import DelegatingActor
from rlctl.runtime.algorithms.divided import mean_probs_diff
from rlctl.runtime.algorithms.importance_weights import PROBS_DIFF
from rlctl.runtime.batch import Experience, LogProbs, Prompts, Rollouts
from rlctl.runtime.batch.stored import fetched
from rlctl.runtime.roles import REFUSED, Actor, Weights
from rlctl.tracking.metrics import Metrics


class RolloutMismatch(Exception):
    """Engine and trainer differ by `value`, more than `limit`, on the tokens of `batch`."""

    def __init__(self, value: float, limit: float, batch: Rollouts, log_probs: LogProbs) -> None:
        super().__init__(f"{PROBS_DIFF} is {value:.3g}, above {limit:g}")
        self.value = value
        self.limit = limit
        self.batch = batch
        self.log_probs = log_probs


class CheckedActor(DelegatingActor):
    """Actor that compares its log-probs with the engine's until the first update of the step.

    `compute_log_probs` raises RolloutMismatch where they differ by more than `limit`, as does an
    `update` that computes them itself, before its optimizer step. After an update the policy is not
    the one that generated the responses, so nothing is compared.
    """

    def __init__(self, actor: Actor, limit: float) -> None:
        super().__init__(actor)
        self.limit = limit
        self._is_sampling_policy = False

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        if not validate:  # offline algorithms validate, and learn from other responses
            self._is_sampling_policy = True
        return self.actor.generate_sequences(prompts, seed=seed, validate=validate, greedy=greedy)

    def compute_log_probs(
        self, batch: Rollouts, weights: Weights = "current", top_k: int = 0
    ) -> LogProbs:
        log_probs = self.actor.compute_log_probs(batch, weights, top_k)
        if self._is_sampling_policy and weights == "current":
            check_rollout(batch, log_probs, self.limit, self.actor)
        return log_probs

    def update(self, batch: Rollouts, lr: float, max_probs_diff: float | None = None) -> Metrics:
        metrics = self.actor.update(batch, lr, self._limit_of(batch, max_probs_diff))
        if REFUSED in metrics:
            log_probs = self.actor.compute_log_probs(batch)
            raise RolloutMismatch(metrics[PROBS_DIFF].value, self.limit, batch, log_probs)
        return metrics

    def update_with_log_probs(
        self, batch: Rollouts, lr: float, max_probs_diff: float | None = None
    ) -> tuple[LogProbs, Metrics]:
        limit = self._limit_of(batch, max_probs_diff)
        log_probs, metrics = self.actor.update_with_log_probs(batch, lr, limit)
        if REFUSED in metrics:
            raise RolloutMismatch(metrics[PROBS_DIFF].value, self.limit, batch, log_probs)
        return log_probs, metrics

    def _limit_of(self, batch: Rollouts, max_probs_diff: float | None) -> float | None:
        """Return the bound of an update, and note that the policy changes."""
        own_pass = isinstance(batch, Experience) and batch.old_log_probs is None
        compares, self._is_sampling_policy = own_pass and self._is_sampling_policy, False
        return self.limit if compares else max_probs_diff


def check_rollout(batch: Rollouts, log_probs: LogProbs, limit: float, actor: Actor) -> None:
    """Raise RolloutMismatch if the mean of |π_engine − π_trainer| over tokens exceeds `limit`.

    NaN counts as exceeding it.
    """
    value = mean_probs_diff(batch, log_probs, actor)
    if not value <= limit:
        raise RolloutMismatch(value, limit, batch, log_probs)


def record_mismatch(error: RolloutMismatch, step: int, run: RunDir) -> RlctlError:
    """Write the batch to the attempt's folder and an event; return the error that ends the run."""
    dump = run.attempt / f"mismatch_step_{step:06d}.pt"
    torch.save(
        {"batch": fetched(error.batch), "log_probs": fetched(error.log_probs).log_probs}, dump
    )
    run.event(
        "mismatch_halt",
        step=step,
        metric=PROBS_DIFF,
        value=error.value,
        limit=error.limit,
        batch=str(dump),
    )
    return RlctlError(
        f"{PROBS_DIFF} is {error.value:.3g} in step {step}, above "
        f"trainer.mismatch.halt={error.limit:g}: the rollout engine has other weights than the "
        "trainer, or computes other probabilities with them",
        where=str(dump),
        hint="inspect the batch with torch.load(…, weights_only=False): `batch.rollout_log_probs` "
        "are the engine's, `log_probs` the trainer's; compare with rollout.name=hf, or set "
        "trainer.mismatch.halt=null to continue regardless",
    )
