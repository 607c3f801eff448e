"""Metrics of a training step: speed, memory of processes, and sequence lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil
import torch
from torch import Tensor

from rlctl.runtime.base.batch import Ragged, Rollouts
from rlctl.runtime.workers.dispatch import split
from rlctl.tracking.alarm_rules import MEMORY

# Phases reported as `timing_per_token_ms/*`: per response token, and per token of any kind.
_PER_RESPONSE_TOKEN = ("gen",)
_PER_TOKEN = (
    *("ref", "values", "adv", "update_critic", "update_actor"),
    *("rm_scores", "update_rm"),
)
_RAY = ("IDLE", "DashboardAgent", "RuntimeEnvAgent")  # processes of Ray itself


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
        **process_memory(),
    }


def process_memory() -> dict[str, float]:
    """Return the resident GiB of the controller, and of its largest worker of each name here.

    `Process` is that of roles on Ray, `sandbox` that of rewards and environments.
    """
    controller = psutil.Process()
    found = {f"{MEMORY}controller": controller.memory_info().rss / 2**30}
    for child in controller.children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            title = " ".join(child.cmdline()[:1])
            name = title.removeprefix("ray::").split(".")[0]
            if "python" in title:
                name = "sandbox"
            elif name in _RAY or not title.startswith("ray::"):
                continue
            gib = child.memory_info().rss / 2**30
            found[f"{MEMORY}{name}"] = max(found.get(f"{MEMORY}{name}", 0.0), gib)
    return found


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
