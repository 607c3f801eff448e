"""Rung of generation: tokens per second of engines at the shape of Qwen2.5-0.5B, in bfloat16.

Prompts of 128 tokens, every response of the longest length, temperature 1. `hf` is measured with
CUDA graphs and without; on a CPU, with fixed shapes of steps and exact ones. vLLM is measured where
it is installed.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu.capturing import capturer_of
from benchmarks.gpu.machine import peak_memory_gib, reset_peak_memory, seconds
from benchmarks.gpu.recorder import Recorder, Settings
from benchmarks.gpu.shapes import write_config
from benchmarks.gpu.work import rank_info, release
from benchmarks.gpu.work import settings as model_settings
from rlctl.plugins import load
from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Ragged
from rlctl.runtime.model.load import load_model
from rlctl.runtime.rollout.engine import EngineSpec, RolloutEngine, SamplingParams
from rlctl.runtime.rollout.hf import HFEngine, Steps

SHAPE = "Qwen2.5-0.5B"
PROMPT, GROUP = 128, 8
ROWS, LENGTH = (256, 64, 8), 512
_TINY_LENGTH = 24
_EAGER_STEP_S = 0.05  # for the time that a row will take


def measure(settings: Settings, recorder: Recorder) -> None:
    """Measure all engines."""
    with tempfile.TemporaryDirectory() as folder:
        shape = write_config(Path(folder), SHAPE, settings.tiny)
        with recorder.attempt("hf"):
            _measure_hf(settings, recorder, shape)
        release(settings.device)
        if find_spec("vllm") is None:
            recorder.note("vllm", "it is not installed")
        elif settings.tiny or recorder.enough("vllm", 60.0):
            with recorder.attempt("vllm"):
                _measure_vllm(settings, recorder, shape)


def _spec(settings: Settings, shape: Path, *overrides: str) -> EngineSpec:
    config = compose("grpo", model_settings(shape, settings.device, *overrides)).config
    part = config.actor_rollout_ref
    return EngineSpec(
        model=part.model,
        rollout=part.rollout,
        dtype=torch.bfloat16,
        rank_info=rank_info(settings.device),
        max_length=PROMPT + LENGTH,
        seed=0,
        on_oom=lambda _: None,
    )


def _measure_hf(settings: Settings, recorder: Recorder, shape: Path) -> None:
    spec = _spec(settings, shape)
    with torch.device(settings.device):
        model = load_model(spec.model, "policy", spec.dtype, spec.seed)
    fixed = HFEngine(model, None, spec.max_length, steps=Steps(capturer_of(settings.device)))
    name = "hf, CUDA graphs" if settings.device == "cuda" else "hf, fixed shapes"
    _measure(fixed, name, settings, recorder)
    if fixed.static is not None and fixed.static.reason is not None:
        recorder.note(name, fixed.static.reason)
    fixed.sleep()
    release(settings.device)
    exact = HFEngine(model, None, spec.max_length)
    _measure(exact, "hf, enforce_eager", settings, recorder)


def _measure_vllm(settings: Settings, recorder: Recorder, shape: Path) -> None:
    spec = _spec(settings, shape, "actor_rollout_ref.rollout.name=vllm")
    model = load_model(spec.model, "policy", spec.dtype, spec.seed)
    engine = load("engines", "vllm").from_spec(spec, None)
    engine.wake()
    engine.load_weights(model.named_parameters())
    _measure(engine, "vllm", settings, recorder)
    engine.close()


def _measure(engine: RolloutEngine, name: str, settings: Settings, recorder: Recorder) -> None:
    """Write a row for each number of responses."""
    length = _TINY_LENGTH if settings.tiny else LENGTH
    for rows in ROWS[-1:] if settings.tiny else ROWS:
        what = f"{name}, {rows} responses"
        if not settings.tiny and not recorder.enough(what, 2 * length * _EAGER_STEP_S):
            continue
        with recorder.attempt(what):
            reset_peak_memory(settings.device)
            took = seconds(settings.device, _generate(engine, rows, length, settings), runs=1)
            recorder.row(
                "generation",
                engine=name,
                responses=rows,
                tokens_each=length,
                tokens_per_s=rows * length / took,
                ms_per_token=1000 * took / length,
                peak_gib=peak_memory_gib(settings.device),
            )
            gc.collect()


def _generate(
    engine: RolloutEngine, rows: int, length: int, settings: Settings
) -> Callable[[], object]:
    """Return a call that generates `rows` responses of `length` tokens."""
    draw = torch.Generator().manual_seed(1)
    num_prompts = max(1, rows // GROUP)
    ids = torch.randint(3, 2000, (num_prompts * PROMPT,), generator=draw)
    prompts = Ragged(ids, torch.full((num_prompts,), PROMPT)).to(settings.device)
    sampling = SamplingParams(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_tokens=length,
        stop_token_ids=(),
        seed=1,
        n=rows // num_prompts,
    )
    return lambda: engine.generate(prompts, sampling)
