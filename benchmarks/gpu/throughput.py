"""Rungs of training: tokens per second, MFU and peak memory of an update, as prime-rl's tables.

One optimizer step on 32,768 tokens in two micro-batches, with activation checkpointing, float32
weights and AdamW, bfloat16 passes. MFU counts the head once and the embedding not at all, as
prime-rl does; `perf/mfu` of a run counts both, as verl does.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import device_name, reset_peak_memory, seconds
from benchmarks.gpu.recorder import Recorder, Settings
from benchmarks.gpu.shapes import write_config
from benchmarks.gpu.work import (
    ACTOR,
    build_actor,
    experience,
    planned_gib,
    pool,
    release,
)
from benchmarks.memory import PEAK_METRIC
from rlctl.runtime.base.metrics import Metrics, to_floats
from rlctl.runtime.cluster.pools import InlinePool
from rlctl.runtime.model.costs import Costs
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.runtime.workers.device_usage import peak_flops

LORA_RANK = 16
_EXPECTED_MFU = 0.08  # for the time that a row will take; without a known GPU, see below
_UNKNOWN_FLOPS = 1e9
_BUILD_S = 12.0


@dataclass(frozen=True)
class Case:
    """Model and mode, and the contexts to measure with it."""

    shape: str
    lora: bool
    contexts: tuple[int, ...]


# In the order of their importance: what does not fit into the time is left out.
CASES = (
    Case("Qwen3-0.6B", False, (16384, 4096, 1024)),
    Case("Qwen2.5-0.5B", False, (16384, 4096, 1024)),
    Case("Qwen3-0.6B", True, (16384, 4096, 1024)),
    Case("Qwen3-4B", True, (16384, 4096)),
    Case("Qwen3-1.7B", False, (16384, 4096)),
    Case("Qwen3-4B", False, (16384, 4096)),
    Case("Qwen2.5-0.5B", True, (16384, 4096, 1024)),
    Case("Qwen3-1.7B", True, (16384, 4096)),
)
# Full: weights in bfloat16, and the optimizer's state in host memory.
LARGE = {
    Case("Qwen2.5-7B", True, (4096,)): (),
    Case("Qwen2.5-7B", False, (4096,)): (
        f"{ACTOR}.fsdp_config.model_dtype=bf16",
        f"{ACTOR}.fsdp_config.optimizer_offload=true",
    ),
}
_FULL_S = 90.0
_TOKENS = 16384  # of a micro-batch
_TINY = {16384: 256, 4096: 128, 1024: 64}


def measure(settings: Settings, recorder: Recorder) -> None:
    """Measure all cases; each context is a row."""
    with tempfile.TemporaryDirectory() as folder, pool(settings.device) as opened:
        for case in (CASES[0], CASES[2]) if settings.tiny else CASES:
            name = f"{case.shape}, {_mode(case)}"
            if case.lora and find_spec("peft") is None:
                recorder.note(name, "peft is not installed")
                continue
            with recorder.attempt(name, optional=True):
                _case(case, settings, recorder, opened, Path(folder))
            release(settings.device)


def large(settings: Settings, recorder: Recorder) -> None:
    """Measure an update of 7 billion parameters, beside the peak that is planned."""
    with tempfile.TemporaryDirectory() as folder, pool(settings.device) as opened:
        for case, overrides in LARGE.items():
            name = f"{case.shape}, {_mode(case)}"
            if case.lora or settings.tiny or recorder.enough(name, _FULL_S):
                with recorder.attempt(name, optional=not case.lora):
                    _case(case, settings, recorder, opened, Path(folder), *overrides)
            release(settings.device)


def _mode(case: Case) -> str:
    return f"LoRA (rank {LORA_RANK})" if case.lora else "full"


def _case(
    case: Case,
    settings: Settings,
    recorder: Recorder,
    opened: InlinePool,
    folder: Path,
    *overrides: str,
) -> None:
    shape = write_config(folder, case.shape, settings.tiny)
    tokens = _TINY[_TOKENS] if settings.tiny else _TOKENS
    every = [
        *overrides,
        f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}",
        f"actor_rollout_ref.model.lora_rank={LORA_RANK if case.lora else 0}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "actor_rollout_ref.model.dtype=bf16",
    ]
    if not recorder.enough(f"{case.shape}, {_mode(case)}", _BUILD_S):
        return
    worker = build_actor(opened, shape, *every)
    planned = planned_gib(shape, settings.device, *every)
    for context in case.contexts:
        length = _TINY[context] if settings.tiny else context
        what = f"{case.shape}, {_mode(case)}, {context} tokens"
        if recorder.enough(what, 3 * _expected_s(worker, tokens, length, settings.device)):
            with recorder.attempt(what, optional=True):
                measured = _measure(worker, max(2, 2 * tokens // length), length, settings)
                row = {"model": case.shape, "mode": _mode(case), "context": context}
                recorder.row("throughput", **row, **measured, planned_gib=planned)


def _measure(worker: ActorWorker, rows: int, length: int, settings: Settings) -> dict[str, Any]:
    """Return the rates of an update of two micro-batches: `rows` rows of `length` tokens."""
    batch = experience(rows, length, worker.policy.hf.config.vocab_size)
    reset_peak_memory(settings.device)
    updates: list[Metrics] = []
    took = seconds(settings.device, lambda: updates.append(worker.update(batch, lr=1e-6)), runs=2)
    peak = peak_flops(device_name(settings.device))
    achieved = useful_flops(worker, rows, length) / took
    return {
        "tokens_per_s": rows * length / took,
        "mfu_percent": None if peak is None or settings.tiny else 100 * achieved / peak,
        "tflops": achieved / 1e12,
        "step_s": took,
        "peak_gib": to_floats(updates[-1]).get(PEAK_METRIC),
        "oom_retries": len(worker.pop_oom_retries()),
    }


def useful_flops(worker: ActorWorker, rows: int, length: int) -> float:
    """Return the FLOPs of an update as prime-rl counts them: without the embedding."""
    shape = Costs.from_config(worker.policy.hf.config)
    assert shape is not None, "the shapes of the suite are dense decoders"
    return useful_flops_of(shape, rows, length)


def useful_flops_of(shape: Costs, rows: int, length: int) -> float:
    """Return the FLOPs of forward and backward passes of `rows` rows of `length` tokens."""
    embedding = 6 * shape.embedding * rows * length
    return shape.training_flops([length] * rows) - embedding


def _expected_s(worker: ActorWorker, tokens: int, length: int, device: str) -> float:
    """Return the seconds that one update may take, for the decision to begin it."""
    peak = peak_flops(device_name(device))
    rate = _UNKNOWN_FLOPS if peak is None else _EXPECTED_MFU * peak
    return useful_flops(worker, max(2, 2 * tokens // length), length) / rate
