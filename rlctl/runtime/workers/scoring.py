"""Passes of the policy that score responses, with the experts of their tokens."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedModel

from rlctl.runtime.algorithms.base import Loss
from rlctl.runtime.base.batch import LogProbs, Rollouts
from rlctl.runtime.base.budget import Budget
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.workers.learner import Learner


def install_routers(hf: PreTrainedModel, replay: str) -> None:
    """Let the routers of `hf` record and replay unless `replay` is "disabled"."""
    if replay != "disabled":
        from rlctl.runtime.model.routing import Routers

        Routers.of(hf)


def score(
    learner: Learner,
    policy: PolicyModel,
    batch: Rollouts,
    budget: Budget,
    with_squares: bool,
    replay: str,
) -> LogProbs:
    """Return log-probs, entropies, and Σ_v π(v)² if asked for; rows keep the order of `batch`.

    With the `replay` R2 also the experts of all tokens, unless the batch has them.
    """
    records = replay == "R2" and batch.routing is None

    def forward(sequences: Sequences) -> tuple[Tensor, ...]:
        if records:
            from rlctl.runtime.model.routing import Routers

            sequences = sequences.recorded(Routers.of(policy.hf).shape.dtype)
        outputs = policy(sequences, with_entropy=True, with_squares=with_squares)
        values = [outputs.log_probs, outputs.entropy]
        if with_squares:
            values.append(outputs.sum_pi_squared)
        if records:
            values.append(sequences.own_routing())
        return tuple(values)

    found = learner.infer(batch, budget, forward, num_whole=int(records))
    routing = found[-1] if records else None
    return LogProbs(*found[: len(found) - records], routing=routing)


def with_agreement(loss: Loss, sequences: Sequences) -> Loss:
    """Return `loss` with the metric of replayed experts, if there are any."""
    if sequences.routing is None:
        return loss
    agreement = sequences.routing.agreement(sequences.predictors)
    return replace(loss, metrics=loss.metrics | agreement)
