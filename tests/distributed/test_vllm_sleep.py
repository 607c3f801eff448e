"""Sleep of vLLM's GPU worker between updates, on a CPU, with memory that is lost meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.recipes.compose import compose
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.vllm_engine import engine
from rlctl.runtime.workers.actor import ActorWorker
from tests.distributed.ranks import in_a_process
from tests.distributed.test_vllm_actor import prompts, with_advantages
from tests.models import write_tiny_model
from tests.workers import LOSS, actor_of

pytestmark = pytest.mark.extra("vllm")

_LORA = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.lora_merge=false")
# NaN for weights. Kernels for CPUs multiply values after the end of a context by 0: finite ones.
_FILLS = {"weights": 0xFF, "kv_cache": 0x41}


class LostMemory:
    """Backend of vLLM's sleep mode: what sleeps is overwritten, and must not be used."""

    def __init__(self, worker: Any) -> None:
        runner = worker.model_runner
        model = runner.get_model()
        self.memory: dict[str, list[Tensor]] = {
            "weights": [*model.parameters(), *model.buffers(), *_adapters(model)],
            "kv_cache": list(runner.kv_caches),
        }
        self.asleep: set[str] = set()
        self.num_sleeps = 0
        model.register_forward_pre_hook(lambda *_: self._check("weights", "kv_cache"))
        reload = runner.reload_weights

        def reload_awake(*given: Any, **options: Any) -> None:
            self._check("weights")
            reload(*given, **options)

        runner.reload_weights = reload_awake

    def suspend(self, level: int) -> None:
        assert level == 2
        for tag, values in self.memory.items():
            for value in values:
                storage = value.untyped_storage()
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(_FILLS[tag])
        self.asleep, self.num_sleeps = set(self.memory), self.num_sleeps + 1

    def resume(self, tags: list[str] | None) -> None:
        self.asleep -= set(tags or self.memory)

    def _check(self, *tags: str) -> None:
        assert not self.asleep & set(tags), f"asleep: {self.asleep}"


def _adapters(model: torch.nn.Module) -> Iterator[Tensor]:
    """Yield the slots of adapters."""
    for module in model.modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            yield from getattr(module, name, ())


def let_sleep(worker: ActorWorker) -> LostMemory:
    """Give the engine of an actor the sleep of vLLM's worker for GPUs."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    CPUWorker.sleep, CPUWorker.wake_up = Worker.sleep, Worker.wake_up
    torch.accelerator.synchronize = lambda *_: None
    torch.accelerator.get_memory_info = lambda *_: (0, 0)
    own: Any = worker.engine
    runs = own.llm.llm_engine.model_executor.driver_worker.worker
    runs._sleep_mode_backend = memory = LostMemory(runs)
    own.rank_info, own.sleeps = replace(own.rank_info, device="cuda"), True
    return memory


def observe(where: RankInfo, model: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Generate, sleep and learn in turns; vLLM shares no weight with the policy."""
    engine.share_parameters = lambda *_: None
    rollout = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.max_num_seqs=16")
    given = [f"actor_rollout_ref.model.path={model}", *LOSS, *rollout, *overrides]
    worker = actor_of(where, compose("ppo", given).config, (24, 24))
    worker.start_engine()
    memory, asked, found = let_sleep(worker), prompts(where), []
    differences = []
    for step in range(4):
        worker.update_weights()
        rollouts = worker.generate_sequences(asked, seed=1)
        found.append((rollouts.response_ids.values.tolist(), rollouts.rollout_log_probs.values))
        assert bool(memory.memory["weights"][0].isnan().all())
        log_probs = worker.compute_log_probs(rollouts).log_probs
        differences.append((log_probs.values - rollouts.rollout_log_probs.values).abs().max())
        if step > 0:  # the first two generate with the same weights
            worker.update(with_advantages(rollouts, log_probs), lr=1e-2)
    return {"found": found, "differences": differences, "sleeps": memory.num_sleeps}


@pytest.mark.parametrize(
    "overrides",
    [pytest.param((), id="full"), pytest.param(_LORA, id="adapters", marks=pytest.mark.soak)],
)
def test_an_engine_generates_the_same_after_it_lost_its_memory(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path, hidden_size=128, head_dim=32)
    observed = in_a_process(observe, model, overrides)
    (first, log_probs), (second, again), (third, _), _ = observed["found"]
    assert first == second
    assert torch.equal(log_probs, again)
    assert third != second, "the policy has learned"
    assert max(observed["differences"]) <= 1e-3
    assert observed["sleeps"] == 4
