"""Actor with a vLLM engine: it agrees with the trainer after updates, and loads and exports.

tests/e2e/test_vllm.py has two ranks that share an engine. vLLM's worker for GPUs runs on a CPU,
with memory that is unmapped between updates.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Experience, Prompts, Ragged, Rollouts
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.rollout.vllm_engine.weights import model_runner
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.runtime.workers.background import await_written, begin_writing
from rlctl.runtime.workers.device_usage import sleeping_bytes
from tests.distributed.ranks import in_a_process, rank_info
from tests.fake_gpu import FakeGpu
from tests.interpreted import interpreted
from tests.models import write_tiny_model
from tests.settings import given
from tests.workers import LOSS, actor_of, learnable, save

pytestmark = pytest.mark.extra("vllm")

NUM_PROMPTS = 8


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tied"), hidden_size=128, head_dim=32)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "head_dim": 32, "tie_word_embeddings": False}
    return write_tiny_model(tmp_path_factory.mktemp("untied"), "llama", **sizes)


def actor(where: RankInfo, model: Path) -> ActorWorker:
    rollout = [*given(model=model, engine="vllm"), "actor_rollout_ref.rollout.max_num_seqs=16"]
    config = compose("ppo", [*LOSS, *rollout]).config
    worker = actor_of(where, config, (24, 24))
    worker.start_engine()
    return worker


def prompts(where: RankInfo) -> Prompts:
    """Return this rank's share of eight prompts of different lengths."""
    draw = torch.Generator().manual_seed(7)
    ids = Ragged.from_rows(
        [torch.randint(3, 60, (3 + 2 * row,), generator=draw) for row in range(NUM_PROMPTS)],
        torch.int64,
    )
    mine = torch.arange(NUM_PROMPTS).tensor_split(where.world_size)[where.rank]
    rows: list[Any] = [None] * NUM_PROMPTS
    return Prompts(ids, torch.arange(NUM_PROMPTS), rows).select(mine)


def with_advantages(rollouts: Rollouts, log_probs: Ragged) -> Experience:
    """Return an experience whose rows have advantages of different sign and size."""
    return learnable(rollouts, log_probs, rollouts.group.float() - 3.5)


@dataclass(frozen=True)
class Observed:
    """Differences |π_engine − π_trainer| per token, before and after the updates."""

    before: torch.Tensor
    after: torch.Tensor


def observe(
    where: RankInfo,
    model: Path,
    updates: int,
    checkpoint: Path | None = None,
) -> Observed:
    """Observe an actor in this process, which can build no other engine afterwards.

    With a folder `checkpoint`, the actor first trains and loads its initial state from there.
    """
    worker = actor(where, model)
    if checkpoint is not None:
        load_and_export(worker, model, checkpoint)
    shared = [
        each.path for each in psutil.Process().memory_maps() if each.path.startswith("/dev/shm/")
    ]
    assert not [path for path in shared if Path(path).exists()], (
        "files in shared memory would outlive a killed process"
    )
    worker.update_weights()
    found: list[torch.Tensor] = []
    for step in range(updates + 1):
        worker.update_weights()
        rollouts = worker.generate_sequences(prompts(worker.rank_info), seed=step)
        log_probs = worker.compute_log_probs(rollouts).log_probs
        found.append((log_probs.values.exp() - rollouts.rollout_log_probs.values.exp()).abs())
        if step < updates:
            worker.update(with_advantages(rollouts, log_probs), lr=1e-2)
    worker.engine.close()
    return Observed(found[0], found[-1])


def load_and_export(worker: ActorWorker, model: Path, folder: Path) -> None:
    """Check that vLLM generates with loaded weights, and that an export has each tensor once."""
    begin_writing(folder)
    worker.save(folder / "state")
    asked = prompts(rank_info())
    worker.update_weights()
    before = worker.generate_sequences(asked, seed=1)
    for _ in range(2):
        worker.update(with_advantages(before, worker.compute_log_probs(before).log_probs), lr=1e-2)
    worker.update_weights()
    trained = worker.generate_sequences(asked, seed=1).response_ids.values
    assert trained.tolist() != before.response_ids.values.tolist()
    await_written([folder / "state"], timeout_s=60)
    worker.load(folder / "state")
    worker.update_weights()
    loaded = worker.generate_sequences(asked, seed=1).response_ids.values
    assert torch.equal(loaded, before.response_ids.values)
    save(worker, folder / "after", folder / "model")
    written, read = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (model, folder / "model")
    )
    assert all(torch.equal(value, read[name]) for name, value in written.items())


@pytest.fixture(scope="module")
def alone(tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """Return what one rank does, where vLLM shares the policy's weights."""
    return in_a_process(observe, tied, 4, tmp_path_factory.mktemp("checkpoint"))


def assert_agrees(observed: Observed) -> None:
    for difference in (observed.before, observed.after):
        assert difference.mean() <= 1e-5
        assert difference.max() <= 1e-3


@pytest.mark.soak
def test_engine_and_trainer_agree_after_updates(alone: Observed, untied: Path) -> None:
    assert_agrees(alone)
    assert_agrees(in_a_process(observe, untied, 3))


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
class OnGpu:
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


def observe_gpu(model: Path, overrides: tuple[str, ...]) -> OnGpu:
    """Generate, sleep and learn in turns."""
    observed, where = OnGpu(), rank_info()
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


@pytest.mark.extra("triton")
@pytest.mark.soak
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
    observed: OnGpu = interpreted(observe_gpu, model, overrides)
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
