"""Metrics of a training step: speed, sequence lengths, and the mismatch with the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psutil
import torch
from torch import Tensor

from rlctl.errors import RlctlError
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.agents.delegating import DelegatingActor
from rlctl.runtime.algorithms.divided import mean_probs_diff
from rlctl.runtime.algorithms.importance_weights import PROBS_DIFF
from rlctl.runtime.batch import Experience, LogProbs, Prompts, Ragged, Rollouts
from rlctl.runtime.batch.stored import fetched
from rlctl.runtime.roles import REFUSED, Actor, Weights
from rlctl.runtime.workers.dispatch import split
from rlctl.tracking.metrics import Metrics

# Phases reported as `timing_per_token_ms/*`: per response token, and per token of any kind.
_PER_RESPONSE_TOKEN = ("gen",)
_PER_TOKEN = (
    *("ref", "values", "adv", "update_critic", "update_actor"),
    *("rm_scores", "update_rm"),
)


def speed_metrics(
    phases: Mapping[str, float], batch: Rollouts, seconds: float, num_devices: int
) -> dict[str, float]:
    """Return `timing_s/*`, `timing_per_token_ms/*` and `perf/*` of a step that took `seconds`.

    `phases` gives seconds by phase; `num_devices` counts the devices of all pools.
    """
    num_response = int(batch.response_ids.lengths.sum())
    num_tokens = int(batch.num_tokens.sum())
    per_token = dict.fromkeys(_PER_RESPONSE_TOKEN, num_response)
    per_token |= dict.fromkeys(_PER_TOKEN, num_tokens)
    return {
        **{f"timing_s/{name}": value for name, value in phases.items()},
        "timing_s/step": seconds,
        **{
            f"timing_per_token_ms/{name}": 1000 * phases[name] / n
            for name, n in per_token.items()
            if n and name in phases
        },
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / seconds / num_devices,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
    }


def length_metrics(batch: Rollouts, num_ranks: int) -> dict[str, float]:
    """Return `global_seqlen/*`: tokens per rank with rows split in order and balanced by cost."""
    in_order, balanced = (
        _totals(batch.num_tokens, split(batch, num_ranks, balanced=by_cost))
        for by_cost in (False, True)
    )
    return {
        "global_seqlen/min": min(in_order),
        "global_seqlen/max": max(in_order),
        "global_seqlen/minmax_diff": max(in_order) - min(in_order),
        "global_seqlen/balanced_min": min(balanced),
        "global_seqlen/balanced_max": max(balanced),
        "global_seqlen/mean": sum(in_order) / num_ranks,
    }


def _totals(values: Tensor, parts: Sequence[Tensor]) -> list[int]:
    """Return the sum of `values` (B,) over each of `parts` (N,)."""
    sizes = torch.tensor([len(part) for part in parts])
    return Ragged(values[torch.cat(list(parts))], sizes).sums().tolist()


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
