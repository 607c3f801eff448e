"""Memory of vLLM on one device.

On a GPU vLLM takes a share of it, `gpu_memory_utilization`: what weights, CUDA graphs and a pass
leave of the share is cache. Asleep it has only its graphs. Graphs and passes are estimates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from rlctl.errors import Problem
from rlctl.recipes import schema
from rlctl.recipes.schema.policy import MOST_OF_A_GPU
from rlctl.runtime.base.ops import ceil_div
from rlctl.runtime.planning.memory import GIB, EngineMemory, RoleMemory, generating
from rlctl.runtime.planning.model_size import ModelSize
from rlctl.runtime.planning.role_memory import MemoryPlan
from rlctl.runtime.rollout.sampling_params import rows_at_a_time

LOG = logging.getLogger(__name__)

_UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization"
_TENSOR = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_STEPS = 20  # of the utilization: 0.05 each
_GRAPHS = GIB  # of vLLM's default sizes of batches
_TOKENS_PER_PASS = 16_384  # vLLM's default on a large GPU
_SAMPLER = 3 * 4  # bytes per logit: logits, log-probs and a sorted copy in float32


def vllm_memory(
    size: ModelSize,
    itemsize: int,
    rollout: schema.Rollout,
    planned: EngineMemory,
    share: int | None,
) -> EngineMemory:
    """Return the memory of vLLM on a GPU, whose numbers take `itemsize` bytes.

    `planned` has caches of the tokens that are decoded at a time, and weights if any.
    """
    ranks = rollout.tensor_model_parallel_size
    graphs = 0 if rollout.enforce_eager else _GRAPHS
    numbers = 4 * size.hidden + ceil_div(3 * size.intermediate, ranks)
    scratch = (rollout.max_num_batched_tokens or _TOKENS_PER_PASS) * numbers * itemsize
    scratch += rows_at_a_time(rollout, "cuda") * size.vocab * _SAMPLER
    cache = planned.cache
    if share is not None:
        weights = ceil_div(size.num_parameters * itemsize, ranks)
        cache = max(0, share - weights - graphs - scratch)
    return EngineMemory(
        *(planned.weights, cache, planned.row_cache, planned.keeps_cache, graphs, scratch),
        sleeps=rollout.free_cache_engine,
        share=share,
    )


def largest_utilization(plan: MemoryPlan, pool: str, available: int, device: int) -> float:
    """Return the share of a `device` that `available` bytes leave to the engine of a pool."""
    roles = plan.pools()[pool]
    # The share of a role of engines includes its weights.
    others = (role for role in roles if role.engine.share is None or role.engine.weights)
    left = available - plan.overhead(pool) - sum(role.resident for role in others)
    return min(MOST_OF_A_GPU, max(0, left * _STEPS // device) / _STEPS)


def engine_problems(
    plan: MemoryPlan, pool: str, roles: Sequence[RoleMemory], available: int
) -> Iterator[Problem]:
    """Yield a problem if vLLM's share does not fit beside the trainer's state, or holds no row.

    If it holds one but for the estimates, this is a warning.
    """
    role = next(role for role in roles if role.engine.share is not None)
    engine = role.engine
    share = engine.share or 0
    possible = largest_utilization(plan, pool, available, available)
    proposal = f"{_UTILIZATION}={possible:g}"
    needed = generating(roles) + plan.overhead(pool)
    if engine.num_rows == 0:
        weights = engine.weights or role.parameters  # of a role of engines
        other = engine.graphs + engine.scratch
        remedy = f"a larger {_TENSOR}"
        if possible * available > share:
            remedy += f", {proposal}"
        problem = Problem(
            f"vLLM gets {share / GIB:.1f} GiB of each GPU of the pool {pool}, and needs "
            f"{weights / GIB:.1f} for weights, about {other / GIB:.1f} for CUDA graphs and a pass, "
            f"and {engine.row_cache / GIB:.1f} for the cache of one row of the longest length",
            _UTILIZATION,
            f"{remedy}, or shorter rows; `rlctl fit` searches for values",
        )
        if weights + engine.row_cache > share:
            yield problem
        else:
            LOG.warning(str(problem))
    elif needed > available and any(role.learns for role in roles):
        remedy = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true, or more ranks"
        fix = None
        if possible * available >= engine.awake - engine.cache + engine.row_cache:
            remedy = f"{proposal}, {remedy}"
            fix = (_UTILIZATION, proposal)
        yield Problem(
            f"the pool {pool} needs {needed / GIB:.1f} GiB on each GPU when vLLM wakes up, and "
            f"{available / GIB:.1f} GiB are available: "
            f"{sum(role.resident for role in roles) / GIB:.1f} for weights and moments of "
            f"{', '.join(role.role for role in roles)}, {engine.awake / GIB:.1f} for vLLM, and "
            f"about {plan.overhead(pool) / GIB:.1f} for CUDA and NCCL",
            _UTILIZATION,
            remedy,
            fix,
        )
