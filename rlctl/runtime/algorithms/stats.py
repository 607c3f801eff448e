"""What is reported of a batch before anything is learned from it."""

from __future__ import annotations

from torch import Tensor

from rlctl.runtime.batch import Experience, LogProbs, Ragged, Scored
from rlctl.runtime.ops import group_stats
from rlctl.tracking.metrics import Max, Mean, Metrics, Min, Sum


def spread(name: str, values: Tensor) -> Metrics:
    """mean, max and min of `values` (N,); nothing if there are none."""
    if not len(values):
        return {}
    values = values.float()
    return {
        f"{name}/mean": Mean(float(values.sum()), len(values)),
        f"{name}/max": Max(float(values.max())),
        f"{name}/min": Min(float(values.min())),
    }


def rollout_metrics(scored: Scored, max_response_length: int) -> Metrics:
    """Lengths, scores and reward components. `clip_ratio` is the share of rows that reached `max_response_length`."""
    responses, prompts = scored.response_ids.lengths, scored.prompt_ids.lengths
    metrics = (
        spread("response_length", responses)
        | spread("prompt_length", prompts)
        | spread("critic/score", scored.scores)
    )
    metrics["response_length/clip_ratio"] = Mean(
        float((responses >= max_response_length).sum()), len(scored)
    )
    metrics |= uniform_groups(scored.scores, scored.group)
    metrics["reward/num_failed"] = Sum(float(scored.failed.sum()))
    for name, values in scored.components.items():
        metrics[f"reward/{name}/mean"] = Mean(float(values.sum()), len(values))
    return metrics


def uniform_groups(scores: Tensor, group: Tensor) -> Metrics:
    """The share of rows (B,) whose whole group has one score, among those in groups of two or more: a group's advantages are then all 0."""
    stats = group_stats(scores, group)
    compared = stats.std[stats.size > 1]
    return (
        {"critic/score/uniform_groups": Mean(float((compared == 0).sum()), len(compared))}
        if len(compared)
        else {}
    )


def experience_metrics(experience: Experience, old: LogProbs) -> Metrics:
    """Rewards (a row), advantages, returns and values (a token), and the entropy of the policy that answered."""
    keep = experience.response_mask.values.bool()
    metrics = spread("critic/rewards", experience.rewards.sums())
    per_token: dict[str, Ragged | None] = {
        "critic/advantages": experience.advantages,
        "critic/returns": experience.returns,
        "critic/values": experience.values,
    }
    for name, field in per_token.items():
        if field is not None:
            metrics |= spread(name, field.values[keep])
    if old.entropy is not None:
        metrics["actor/entropy"] = Mean(float(old.entropy.values[keep].sum()), float(keep.sum()))
    return metrics
