"""vLLM's worker for GPUs between updates, on a CPU, with memory that is unmapped meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.recipes.compose import compose
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.vllm_engine.weights import model_runner
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.runtime.workers.process_memory import sleeping_bytes
from tests.distributed.ranks import rank_info
from tests.distributed.test_vllm_actor import prompts, with_advantages
from tests.fake_gpu import FakeGpu
from tests.interpreted import interpreted
from tests.models import write_tiny_model
from tests.workers import LOSS, actor_of

pytestmark = [pytest.mark.extra("vllm"), pytest.mark.extra("triton"), pytest.mark.soak]

_MODEL = "actor_rollout_ref.model"
_LORA = (f"{_MODEL}.lora_rank=8", "actor_rollout_ref.rollout.lora_merge=false")
_TOTAL = 2**26  # bytes of the GPU
_SETTINGS = ("name=vllm", "max_num_seqs=4", "enforce_eager=true", "gpu_memory_utilization=0.5")


@dataclass(frozen=True)
class Memory:
    """Bytes of vLLM that are mapped, and that rlctl subtracts from peaks; what ends a process."""

    mapped: int
    sleeping: int
    weights_are_fatal: bool
    cache_is_fatal: bool


@dataclass
class Observed:
    """Memory of the engine in its states, and results by step."""

    asleep: list[Memory] = field(default_factory=list)
    with_weights: list[Memory] = field(default_factory=list)
    awake: list[Memory] = field(default_factory=list)
    forgets: bool = False  # weights that nothing has loaded since are NaN
    tokens: list[list[int]] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)  # of the trainer's log-probs


def kills(touch: Callable[[], object]) -> bool:
    """Return True if a fork of this process dies of an access to memory."""
    child = os.fork()
    if child == 0:
        touch()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def start(where: RankInfo, model: Path, overrides: tuple[str, ...]) -> ActorWorker:
    """Return an actor on the CPU whose engine is on the GPU."""
    given = [f"{_MODEL}.path={model}", *LOSS, *overrides]
    given += [f"actor_rollout_ref.rollout.{setting}" for setting in _SETTINGS]
    worker = actor_of(where, compose("ppo", given).config, (24, 6))
    worker.rank_info = replace(where, device="cuda")
    worker.start_engine()
    return worker


def observe(model: Path, overrides: tuple[str, ...]) -> Observed:
    """Generate, sleep and learn in turns."""
    observed, where = Observed(), rank_info()
    with FakeGpu(_TOTAL) as gpu:
        worker = start(where, model, overrides)
        engine: Any = worker.engine
        runner = model_runner(engine.llm)
        layers = runner.vllm_config.compilation_config.static_forward_context.values()
        weight, cache = next(runner.get_model().parameters()), next(iter(layers)).kv_cache

        def memory() -> Memory:
            return Memory(gpu.mapped, sleeping_bytes(), kills(weight.sum), kills(cache.sum))

        def submit(requests: Any) -> None:
            observed.with_weights.append(memory())
            submit_requests(requests)
            observed.awake.append(memory())

        submit_requests, engine.submit = engine.submit, submit
        engine.wake()
        observed.forgets = bool(weight.isnan().all())
        for step in range(3):
            worker.update_weights()
            asked = prompts(where).select(torch.arange(3))
            rollouts = worker.generate_sequences(asked, seed=1)
            observed.asleep.append(memory())
            observed.tokens.append(rollouts.response_ids.values.tolist())
            observed.log_probs.append(rollouts.rollout_log_probs.values)
            own = worker.compute_log_probs(rollouts).log_probs
            difference = (own.values - rollouts.rollout_log_probs.values).abs().max()
            observed.differences.append(float(difference))
            if step > 0:  # the first two generate with the same weights
                worker.update(with_advantages(rollouts, own), lr=1e-2)
    return observed


@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    [
        pytest.param((f"{_MODEL}.dtype=fp32",), 1e-4, id="full"),
        # vLLM has no kernels for adapters in float32.
        pytest.param((f"{_MODEL}.dtype=bf16", *_LORA), 0.2, id="adapters"),
    ],
)
def test_an_engine_generates_the_same_after_its_memory_was_unmapped(
    overrides: tuple[str, ...], tolerance: float, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path, hidden_size=128, head_dim=32)
    observed: Observed = interpreted(observe, model, overrides)
    first, second, third = observed.tokens
    assert first == second
    assert torch.equal(*observed.log_probs[:2])
    assert third != second, "the policy has learned"
    assert max(observed.differences) <= tolerance
    assert observed.forgets
    (awake,), (asleep,) = {*observed.awake}, {*observed.asleep}
    assert awake == Memory(awake.mapped, 0, False, False)
    assert 0.4 * _TOTAL < awake.mapped <= 0.51 * _TOTAL, "gpu_memory_utilization"
    assert asleep == Memory(0, awake.mapped, True, True)
    (before,) = {*observed.with_weights}  # the cache is mapped only when its memory is needed
    assert 0 < before.mapped < awake.mapped / 10
    assert before == Memory(before.mapped, awake.mapped - before.mapped, False, True)
