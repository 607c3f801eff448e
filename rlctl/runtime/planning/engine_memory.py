"""Memory of vLLM on one device.

On a GPU vLLM takes a share of it, `gpu_memory_utilization`: what weights, CUDA graphs and a pass
leave of the share is cache. Asleep it has only its graphs. Graphs and passes are estimates.
"""

from __future__ import annotations

from rlctl.recipes import schema
from rlctl.runtime.ops import ceil_div
from rlctl.runtime.planning.memory import GIB, EngineMemory
from rlctl.runtime.planning.model_size import ModelSize
from rlctl.runtime.rollout.sampling_params import rows_at_a_time

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

    `planned` has caches of the tokens that are decoded at a time, and its own weights if any.
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
