"""Out-of-memory retries with smaller micro-batches give equal results; RLIMIT_AS sets the limit."""

from __future__ import annotations

import ctypes
import gc
import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlctl.errors import DeviceMemoryError
from rlctl.recipes.compose import compose
from rlctl.runtime.base.balance import TokenCounts
from rlctl.runtime.base.batch import Experience
from rlctl.runtime.base.budget import Budget, OomRetry
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.runtime.workers.process_memory import MMAP_THRESHOLD, TOP_PAD, TRIM_THRESHOLD
from tests import workers
from tests.distributed.ranks import in_a_process
from tests.models import write_tiny_model
from tests.tolerance import PASSES, assert_as_exact, float64
from tests.workers import LOSS, actor_of

pytestmark = pytest.mark.soak

ROWS, PROMPT, RESPONSE, VOCABULARY = 4, 16, 112, 98304
TOKENS = ROWS * (PROMPT + RESPONSE)
KEY = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
INFER_KEY = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a model whose logits dominate the memory of a pass: 42 MiB per row, at least twice.

    Blocks of this size are returned to the kernel when they are freed.
    """
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY))


def experience() -> Experience:
    rows = range(ROWS)
    return workers.experience([PROMPT] * ROWS, rows, [RESPONSE] * ROWS, shift=-10.0, masked=())


def actor(where: RankInfo, model: str, *overrides: str) -> ActorWorker:
    config = compose("ppo", [f"actor_rollout_ref.model.path={model}", *LOSS, *overrides]).config
    return actor_of(where, config, (PROMPT, RESPONSE))


def leave(mebibytes: int | None) -> None:
    """Limit this process to its current memory plus `mebibytes`, or remove the limit (None)."""
    gc.collect()  # garbage would be free memory later
    current = (
        int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        * resource.getpagesize()
    )
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (hard if mebibytes is None else current + mebibytes * 2**20, hard)
    )


def update(worker: ActorWorker) -> tuple[torch.Tensor, list[OomRetry]]:
    """Return the gradient that an update passes to the optimizer, and the out-of-memory retries."""
    found, _ = workers.gradients(worker, experience())
    return torch.cat([each.flatten() for each in found.values()]), worker.pop_oom_retries()


def return_freed_memory() -> None:
    """Undo `keep_freed_memory`: the limits below are on all memory of the process."""
    libc = ctypes.CDLL(None)
    for parameter, value in ((TOP_PAD, 0), (TRIM_THRESHOLD, 2**17), (MMAP_THRESHOLD, 2**17)):
        libc.mallopt(parameter, value)


def exact_passes(where: RankInfo, model: str) -> dict[str, Any]:
    """Run passes with enough memory in float64."""
    with float64():
        worker = actor(where, model, *PASSES)
        return {"log_probs": worker.compute_log_probs(experience()), "enough": update(worker)}


def passes_with_limits(where: RankInfo, model: str) -> dict[str, Any]:
    """Run passes with enough memory, with memory for half of a batch, and with too little."""
    return_freed_memory()
    plenty = actor(where, model)
    log_probs, enough = plenty.compute_log_probs(experience()), update(plenty)
    worker = actor(where, model)
    try:
        leave(130)  # of 190 for everything and 90 for half
        scored = worker.compute_log_probs(experience()), worker.pop_oom_retries()
        leave(275)  # of 340 and 205
        little, again = update(worker), update(worker)
        worker = actor(where, model)
        leave(30)
        with pytest.raises(DeviceMemoryError) as error:
            worker.update(experience(), lr=1e-3)
    finally:
        leave(None)  # error reports need memory, too
    nothing = pickle.dumps(error.value)
    passes = {"log_probs": log_probs, "scored": scored}
    return passes | {"enough": enough, "little": little, "again": again, "nothing": nothing}


@pytest.fixture(scope="module")
def seen(model: str) -> dict[str, Any]:
    exact = in_a_process(exact_passes, model)
    return in_a_process(passes_with_limits, model) | {"exact": exact}


def test_gradient_is_unchanged_by_oom_retries(seen: dict[str, Any]) -> None:
    """Half a batch fits; later updates use the reduced budget without a retry."""
    expected, none = seen["enough"]
    gradient, retries = seen["little"]
    assert retries == [OomRetry(KEY, TOKENS, TOKENS // 2, "tokens")]
    assert none == seen["again"][1] == []
    assert expected.norm() > 1e-3
    assert_as_exact(gradient, expected, seen["exact"]["enough"][0])


def test_log_probs_are_unchanged_by_oom_retries(seen: dict[str, Any]) -> None:
    expected, (found, retries) = seen["log_probs"], seen["scored"]
    assert [each.key for each in retries] == [INFER_KEY]
    exact = seen["exact"]["log_probs"].log_probs.values.double()
    assert_as_exact(found.log_probs.values, expected.log_probs.values, exact)


def test_single_row_that_does_not_fit_is_an_error(seen: dict[str, Any]) -> None:
    """No budget is proposed. The error is pickled between processes."""
    error = pickle.loads(seen["nothing"])
    assert (error.key, error.value, error.proposed, error.exit_code) == (KEY, 16384, None, 7)
    assert f"a single row of {PROMPT + RESPONSE} tokens" in str(error)


def test_budget_is_halved_three_times() -> None:
    """Halving starts from the largest micro-batch, not from a budget that was never filled."""
    budget, lengths = Budget(KEY, 10**6, "tokens"), torch.full((16,), 3)
    counts = TokenCounts.of_rows(lengths)
    for _ in range(3):
        budget.halve([lengths[part] for part in budget.cut(counts)], 0, alone=True, reason="")
    assert budget.size == 16 * 3 // 8
    with pytest.raises(DeviceMemoryError, match="halved 3 times") as error:
        budget.halve([lengths[part] for part in budget.cut(counts)], 0, alone=True, reason="")
    assert (error.value.key, error.value.value, error.value.proposed) == (KEY, 10**6, 3)
    by_rows = Budget(KEY, 4, "rows")
    parts = [lengths[part] for part in by_rows.cut(counts)]
    assert by_rows.halve(parts, 3, alone=True, reason="").after == 2


def oom_in_sharded_backward(where: RankInfo, model: str, folder: str) -> dict[str, Any]:
    """Run out of memory in a backward pass of FSDP2 on one rank, which mixed precision requires."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    half = "actor_rollout_ref.model.dtype=bfloat16"
    undisturbed, _ = update(actor(where, model, half, f"{KEY}={TOKENS // 2}"))
    worker = actor(where, model, half)
    num_tries = 0

    def run_out_of_memory(grad: torch.Tensor) -> torch.Tensor:
        nonlocal num_tries
        num_tries += 1
        return grad if num_tries > 1 else torch.empty(2**60, dtype=torch.uint8)

    def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(run_out_of_memory)

    worker.policy.hf.get_submodule("model.layers.0.mlp.gate_proj").register_forward_hook(hook)
    found = update(worker)
    dist.destroy_process_group()
    return {"undisturbed": undisturbed, "found": found, "num_tries": num_tries}


@pytest.mark.soak
def test_sharded_model_recovers_from_oom_in_backward(model: str, tmp_path: Path) -> None:
    seen = in_a_process(oom_in_sharded_backward, model, str(tmp_path))
    gradient, retries = seen["found"]
    assert seen["num_tries"] == 3
    assert len(retries) == 1
    assert torch.equal(gradient, seen["undisturbed"])
