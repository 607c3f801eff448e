"""Rung of TRL: steps of GRPO by both on the same device, at the shape of Qwen2.5-0.5B.

256 responses of at most 256 tokens, of the same forced lengths; weights and AdamW in float32, and
on a GPU passes in bfloat16. Both generate with transformers' model, TRL by `generate`.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from transformers import AutoConfig

from benchmarks.gpu.machine import device_name
from benchmarks.gpu.recorder import Recorder, Settings
from benchmarks.gpu.shapes import write_config
from benchmarks.gpu.throughput import useful_flops_of
from benchmarks.gpu.work import settings as model_settings
from benchmarks.trl import compare, response_lengths
from rlctl.runtime.model.costs import Costs
from rlctl.runtime.workers.device_usage import peak_flops

SHAPE, KIND = "Qwen2.5-0.5B", "natural"
_PASSES = 8  # of TRL on a GPU: it holds the logits of all tokens of a pass


def measure(settings: Settings, recorder: Recorder) -> None:
    """Measure both in turns; tokens are those of responses."""
    rounds, passes = (1, 1) if settings.tiny else (3, _PASSES)
    with tempfile.TemporaryDirectory() as folder:
        shape = write_config(Path(folder), SHAPE, settings.tiny)
        overrides = model_settings(shape, settings.device)
        pairs = compare(KIND, rounds, Path(folder), overrides, passes)
        decoder = Costs.from_config(AutoConfig.from_pretrained(shape))
    assert decoder is not None, "the shape is a dense decoder"
    lengths = response_lengths(KIND).tolist()
    flops = sum(useful_flops_of(decoder, 1, length) for length in lengths)
    peak = peak_flops(device_name(settings.device))
    took = [statistics.median(times[0] for times in who) for who in zip(*pairs, strict=True)]
    for name, seconds in zip(("TRL", "rlctl"), took, strict=True):
        recorder.row(
            "trl",
            library=name,
            step_s=seconds,
            tokens_per_s=sum(lengths) / seconds,
            mfu_percent=None if peak is None or settings.tiny else 100 * flops / seconds / peak,
            ratio=took[0] / seconds,
        )
