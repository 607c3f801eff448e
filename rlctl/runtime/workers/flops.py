"""Floating-point operations of training, for the model FLOPs utilization (MFU)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from rlctl.runtime.model.attention import head_size, layer_window
from rlctl.runtime.model.mixers import has_states
from rlctl.runtime.model.routing import num_experts
from rlctl.runtime.workers.process_memory import PEAK
from rlctl.tracking.metrics import Max, Mean, Metrics

# Dense bfloat16 FLOP/s from the vendors' data sheets; the first name that is part of the device's.
_PEAKS = {
    "H200 NVL": 835.5e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H200": 989.4e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "B200": 2250e12,
}


def peak_flops(device_name: str) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of the device; None if it is not in the table."""
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a dense Llama-like decoder.

    It has grouped-query attention and a gated feed-forward layer of three matrices.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    windows: tuple[int | None, ...]  # of each layer in tokens; None: the entire context

    @classmethod
    def from_config(cls, config: Any) -> DecoderShape | None:
        """Read the sizes from a transformers config.

        Returns None if the formula does not apply: a size is missing, experts are mixed, or layers
        have states. MFU is then not reported.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        sizes = (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
        )
        if any(getattr(text, name, None) is None for name in sizes) or num_experts(text):
            return None
        if has_states(text):
            return None
        heads = text.num_attention_heads
        return cls(
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            num_layers=text.num_hidden_layers,
            num_heads=heads,
            num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=head_size(text) or text.hidden_size // heads,
            intermediate_size=text.intermediate_size,
            windows=tuple(layer_window(text, i) for i in range(text.num_hidden_layers)),
        )

    @property
    def num_matrix_weights(self) -> int:
        """N = 2·vocab·h + layers·(h·(q + k + v + o) + 3·h·intermediate).

        Embedding and head both count, tied or not, as in verl.
        """
        query, key_value = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * 2 * (query + key_value)
        return 2 * self.vocab_size * self.hidden_size + self.num_layers * (
            attention + 3 * self.hidden_size * self.intermediate_size
        )

    def training_flops(self, lengths: Iterable[int]) -> float:
        """Return the FLOPs of forward and backward passes over rows of `lengths` tokens.

        6·N·Σ len + 6·Σ len²·layers·heads·head_dim: causal attention takes half of 12. A layer with
        a window w < len has 2·w·len − w² in place of len². Recomputed activations do not count,
        because MFU measures useful work.
        """
        lens = list(lengths)
        pairs = sum(
            times * (n * n if window is None or n <= window else (2 * n - window) * window)
            for window, times in Counter(self.windows).items()
            for n in lens
        )
        attention = 6 * self.num_heads * self.head_dim * pairs
        return float(6 * self.num_matrix_weights * sum(lens) + attention)


def device_usage(
    config: PretrainedConfig, lengths: list[int], seconds: float, name: str
) -> Metrics:
    """Return the peak of memory, and model FLOPs utilization (MFU) of an update.

    MFU is weighted by `seconds`: merged, it is the useful work divided by the device time.
    """
    metrics: Metrics = {"perf/max_memory_allocated_gb": Max(PEAK.pop() / 2**30)}
    shape, peak = DecoderShape.from_config(config), peak_flops(torch.cuda.get_device_name())
    if shape is not None and peak is not None:
        metrics[f"perf/mfu/{name}"] = Mean(shape.training_flops(lengths) / peak, seconds)
    return metrics
