"""Patch of vLLM's samplers: report log-probs over the entire vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def report_full_log_probs(runner: Any) -> None:
    """Have vLLM report log-probs under `log_softmax(logits / temperature)` despite top-k and top-p.

    vLLM's `processed_logprobs` are those of the restricted distribution; the trainer computes those
    of the full one, and both must agree.
    """
    sampler = runner.sampler
    if hasattr(sampler, "topk_topp_sampler"):
        _patch_runner_v1(sampler.topk_topp_sampler)
    else:
        _patch_runner_v2(sampler)


def _patch_runner_v1(restricted: Any) -> None:
    """Patch the runner for CPUs, whose `forward` samples from logits divided by the temperature."""
    restricted.logprobs_mode = "raw_logprobs"  # disables the computation of vLLM
    draw = restricted.forward

    def forward(
        logits: Tensor,
        generators: dict[int, torch.Generator],
        top_k: Tensor | None,
        top_p: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Map logits (R, V) to tokens (R,) and log-probs (R, V)."""
        log_probs = logits.log_softmax(-1, dtype=torch.float32)
        tokens, _ = draw(logits, generators, top_k, top_p)
        return tokens, log_probs

    restricted.forward = forward


def _patch_runner_v2(sampler: Any) -> None:
    """Patch the runner for GPUs, which computes log-probs from the logits of `_sample_random`."""
    draw = sampler._sample_random

    def sample_random(
        logits: Tensor,
        rows: Tensor,
        rows_np: Any,
        positions: Tensor,
        top_k: Any,
        top_p: Any,
        fused: bool,
    ) -> Any:
        """Map logits (R, V) to tokens (R,) and the unrestricted logits (R, V)."""
        full = logits if top_k is None and top_p is None else logits.clone()
        tokens, _ = draw(logits, rows, rows_np, positions, top_k, top_p, fused)
        return tokens, full

    sampler._sample_random = sample_random
