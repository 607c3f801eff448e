"""Metrics of a batch, computed before the updates."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.base.batch import Experience, Ragged, Rollouts, Scored
from rlctl.runtime.base.metrics import Max, Mean, Metrics, Min, Sum
from rlctl.runtime.base.ops import first_rows, group_stats


def spread(name: str, values: Tensor) -> Metrics:
    """Return mean, max and min of `values` (N,); an empty dict if N = 0."""
    if not len(values):
        return {}
    values = values.float()
    return {
        f"{name}/mean": Mean(float(values.sum()), len(values)),
        f"{name}/max": Max(float(values.max())),
        f"{name}/min": Min(float(values.min())),
    }


def rollout_metrics(algorithm: object, most: int, scored: Scored) -> Metrics:
    """Return metrics of lengths and, unless `algorithm.has_rewards` is False, of rewards.

    `response_length/clip_ratio` is the share of rows of `most` tokens, the limit, or that ended
    because a reply did not fit. An episode with several rows has one score. Rows without a
    component do not count in its mean.
    """
    responses = scored.response_ids.lengths
    prompts = scored.prompt_ids.lengths
    metrics = spread("response_length", responses) | spread("prompt_length", prompts)
    cut = torch.tensor([finish == "length" for finish in scored.finish], dtype=torch.bool)
    cut |= responses >= most
    metrics["response_length/clip_ratio"] = Mean(float(cut.sum()), len(scored))
    if not getattr(algorithm, "has_rewards", True):
        return metrics
    once = first_rows(scored.episode_of_row)
    scores = scored.scores[once]
    group = scored.group[once]
    metrics |= spread("critic/score", scores) | uniform_groups(scores, group)
    metrics["reward/num_failed"] = Sum(float(scored.failed[once].sum()))
    for name, component in scored.components.items():
        values = component[once & ~component.isnan()]
        if len(values):
            metrics[f"reward/{name}/mean"] = Mean(float(values.sum()), len(values))
    return metrics


def uniform_groups(scores: Tensor, group: Tensor) -> Metrics:
    """Return the share of rows in groups with equal scores; `scores` and `group`: (B,).

    The advantages of such a group are 0. Groups of one do not count; the metric is missing if there
    are no others.
    """
    stats = group_stats(scores, group)
    compared = stats.std[stats.size > 1]
    if not len(compared):
        return {}
    return {"critic/score/uniform_groups": Mean(float((compared == 0).sum()), len(compared))}


def experience_metrics(experience: Experience) -> Metrics:
    """Return metrics of rewards per row, and of advantages and values per token."""
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
    return metrics


def entropy_metric(batch: Rollouts, entropy: Tensor | Ragged | None) -> Metrics:
    """Return the mean `entropy` (T,) of the tokens that the policy wrote; nothing for None."""
    if entropy is None:
        return {}
    values = entropy.values if isinstance(entropy, Ragged) else entropy
    keep = batch.response_mask.values.bool()
    return {"actor/entropy": Mean(float(values[keep].sum()), float(keep.sum()))}
