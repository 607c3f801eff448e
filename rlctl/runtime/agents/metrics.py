"""Metrics of a batch of episodes."""

from __future__ import annotations

from collections import Counter

import torch

from rlctl.runtime.algorithms.stats import spread
from rlctl.runtime.batch import Rollouts
from rlctl.runtime.ops import first_rows
from rlctl.tracking.metrics import to_floats

# Kinds of errors of calls that no tool received. Their names are the policy's text: it can invent
# any number of them, so they are no part of a metric's name.
REFUSED = ("unknown", "malformed", "too_many")


def agent_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Return `agent/*` and `tool/<name>/*` of B episodes; nothing for other responses.

    `agent/outcome/<name>` is the share of the episodes that ended so. `tool/<name>/calls` counts
    the calls of a tool, `…/seconds` is their mean time; `agent/refused_calls/<kind>` counts calls
    that no tool received.
    """
    if not rollouts.episodes:
        return {}
    once = first_rows(rollouts.episode_of_row).nonzero().flatten()
    episodes = [rollouts.episodes[i] for i in once.tolist()]
    outcomes = Counter(episode.outcome for episode in episodes)
    written, total = float(rollouts.response_mask.values.sum()), len(rollouts.response_ids.values)
    metrics = to_floats(
        spread("agent/turns", torch.tensor([episode.num_turns for episode in episodes]))
    )
    metrics |= {f"agent/outcome/{name}": n / len(episodes) for name, n in sorted(outcomes.items())}
    metrics["agent/num_failed"] = float(sum(episode.failed for episode in episodes))
    metrics["agent/tool_tokens_share"] = 1 - written / total if total else 0.0
    metrics["agent/retokenized_tokens"] = float(
        sum(episode.num_retokenized for episode in episodes)
    )
    uses = [use for episode in episodes for use in episode.uses]
    refused = Counter(use.error for use in uses if use.error in REFUSED)
    metrics |= {f"agent/refused_calls/{kind}": float(refused[kind]) for kind in sorted(refused)}
    run = [use for use in uses if use.error not in REFUSED]
    for tool in sorted({use.tool for use in run}):
        own = [use for use in run if use.tool == tool]
        errors = Counter(use.error for use in own)
        metrics |= {
            f"tool/{tool}/calls": float(len(own)),
            f"tool/{tool}/errors": float(len(own) - errors[None]),
            f"tool/{tool}/timeouts": float(errors["timeout"]),
            f"tool/{tool}/seconds": sum(use.seconds for use in own) / len(own),
        }
    return metrics
