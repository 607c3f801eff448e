"""Rungs of vLLM in the trainer's process, at the shape of Qwen2.5-0.5B.

It starts, gets weights, generates and sleeps; the policy is trained, and vLLM wakes and gets the
new weights. Each time, log-probs of its tokens must be those of the trainer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.machine import synchronize
from benchmarks.gpu.recorder import Recorder, Settings
from benchmarks.gpu.shapes import write_config
from benchmarks.gpu.work import ACTOR, build_actor, experience, pool
from rlctl.runtime.base.batch import Prompts, Ragged, Rollouts
from rlctl.runtime.model.load import compute_dtype
from rlctl.runtime.rollout.engine_weights import Selection
from rlctl.runtime.rollout.vllm_engine.versions import check_installed
from rlctl.runtime.workers.actor import ActorWorker

SHAPE = "Qwen2.5-0.5B"
PROMPTS, PROMPT = 16, 24
_VOCABULARY = 2000  # ids that every shape has
_LIMITS = {"cuda": 0.05, "cpu": 1e-3}  # of the mean |log π_engine − log π_trainer|
ROLLOUT = "actor_rollout_ref.rollout"
_SLEPT = 0.8  # share of the weights' memory that sleep must free at least


def eager(settings: Settings, recorder: Recorder) -> None:
    """Check vLLM without compilation: start, generate."""
    _cycle(settings, recorder, 0, f"{ROLLOUT}.enforce_eager=true")


def compiled(settings: Settings, recorder: Recorder) -> None:
    """Check vLLM as it is by default, through three updates."""
    _cycle(settings, recorder, 3, f"{ROLLOUT}.enforce_eager=false")


def lora(settings: Settings, recorder: Recorder) -> None:
    """Check vLLM with adapters, which are all that it gets of later updates."""
    _cycle(settings, recorder, 2, "actor_rollout_ref.model.lora_rank=16")


def _cycle(settings: Settings, recorder: Recorder, updates: int, *overrides: str) -> None:
    """Write a row for the start, and one for each load of weights with what follows.

    The installed vLLM must be one that a run accepts, as `steps` demands it.
    """
    check_installed(settings.device)
    fixed = f"{ROLLOUT}.name=vllm", f"{ACTOR}.optim.weight_decay=0"
    with tempfile.TemporaryDirectory() as folder, pool(settings.device) as opened:
        shape = write_config(Path(folder), SHAPE, settings.tiny)
        worker = build_actor(opened, shape, *fixed, *overrides)
        took = _timed(worker.start_engine, settings)
        recorder.row("vllm", what="start, then sleep", seconds=took)
        recorder.row("engine", **engine_facts(worker))
        for number in range(updates + 1):
            _check(worker, number, settings, recorder)
            if number < updates:
                worker.update(experience(8, 96, _VOCABULARY), lr=1e-3)
        worker.close()


def _check(worker: ActorWorker, number: int, settings: Settings, recorder: Recorder) -> None:
    """Load the weights of update `number`, generate, and compare log-probs."""
    device = settings.device
    whole, asleep = worker.engine_lacks is Selection.ALL, _free_gib(device)
    loading = _timed(worker.update_weights, settings)
    awake, found = _free_gib(device), list[Rollouts]()
    generating = _timed(
        lambda: found.append(worker.generate_sequences(_prompts(), seed=number)), settings
    )
    ours = worker.compute_log_probs(found[0]).log_probs.values
    used = _free_gib(device)
    difference = float((ours - found[0].rollout_log_probs.values).abs().mean())
    size = compute_dtype(worker.spec.model, device).itemsize
    num_bytes = size * sum(value.numel() for value in worker.policy.parameters())
    slept = asleep is None or awake is None or asleep - awake > _SLEPT * num_bytes / 2**30
    recorder.row(
        "vllm",
        what=f"after {number} updates",
        seconds=generating,
        load_s=loading,
        load_gb_per_s=num_bytes / loading / 1e9 if whole else None,
        log_prob_error=difference,
        free_gib_asleep=asleep,
        free_gib_with_weights=awake,
        free_gib_after_generation=used,
        engine_gib=None if asleep is None or used is None else asleep - used,
        ok=difference <= _LIMITS[device] and slept,
    )


def engine_facts(worker: ActorWorker) -> dict[str, Any]:
    """Return what vLLM has chosen: its version, runner, attention, cache, and share of memory."""
    from rlctl.runtime.rollout.vllm_engine.weights import model_runner

    engine: Any = worker.engine
    runner = model_runner(engine.llm)
    cache = runner.vllm_config.cache_config
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    backends = (layer.get_attn_backend() for layer in layers if hasattr(layer, "get_attn_backend"))
    attention = {backend.get_name() for backend in backends}
    return {
        "version": import_module("vllm").__version__,
        "runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "attention": ", ".join(sorted(attention)),
        "kv_blocks": cache.num_gpu_blocks,
        "kv_block_tokens": cache.block_size,
        "memory_share": cache.gpu_memory_utilization,
        "plan_gib": _planned_gib(cache.gpu_memory_utilization, worker.rank_info.device),
    }


def _planned_gib(share: float, device: str) -> float | None:
    """Return what a run's plan counts for vLLM, weights included; None on a CPU."""
    return share * torch.cuda.mem_get_info()[1] / 2**30 if device == "cuda" else None


def _prompts() -> Prompts:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, _VOCABULARY, (PROMPTS * PROMPT,), generator=draw)
    rows: list[Any] = [None] * PROMPTS
    return Prompts(Ragged(ids, torch.full((PROMPTS,), PROMPT)), torch.arange(PROMPTS), rows)


def _timed(work: Callable[[], object], settings: Settings) -> float:
    """Return the seconds of one call."""
    begin = time.perf_counter()
    work()
    synchronize(settings.device)
    return time.perf_counter() - begin


def _free_gib(device: str) -> float | None:
    """Return the free memory of the device; None on a CPU."""
    if device != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 2**30
