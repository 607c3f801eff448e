"""Weight sync of a policy with LoRA adapters to a vLLM pool: bytes, seconds, and generation.

    python -m benchmarks.adapter_sync [--runs 5] [--sizes 1m,100m] [--rank 16] [--json]

One engine in a process of its own, through Ray's object store. `whole`: all weights each time, as
for an engine without support; `merged`: the weights that adapters change; `adapters`: the adapters,
which vLLM computes beside the base. `tokens/CPU s` is that of generation with 16 rows.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from types import SimpleNamespace
from typing import Any, cast

import ray
import torch
from transformers import Qwen2ForCausalLM

from benchmarks.results import record_rows
from benchmarks.rollout import build
from benchmarks.table import Row, in_fresh_process, parse_arguments, show
from benchmarks.weight_sync import engine_pool
from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Prompts, Ragged
from rlctl.runtime.cluster.engine_group import EngineGroup
from rlctl.runtime.cluster.session import ray_session
from rlctl.runtime.generation.separate_engines import SeparateEngines
from rlctl.runtime.model.lora import add_adapters
from rlctl.runtime.rollout.engine_weights import AdapterSync, EngineWeights
from rlctl.runtime.rollout.weight_sync import WHOLE, WeightChannel, bucket_bytes, to_buckets, whole

_PROMPTS = 16


def send(engines: EngineGroup, weights: EngineWeights) -> int:
    """Send what the engines lack, and return its bytes."""
    sent = [0]

    def send_weights(channel: WeightChannel[Any]) -> list[Any]:
        rows = whole(weights.parameters(channel.selection))
        max_bytes = bucket_bytes(engines.rollout, channel.device)
        for bucket in to_buckets(rows, WHOLE, torch.float32, max_bytes, channel.allocate):
            sent[0] += bucket.data.nbytes
            channel.send(bucket)
        return [channel.close(version=1)]

    engines.mark_stale()
    engines.update_weights(send_weights)
    return sent[0]


def generate(engines: EngineGroup, vocabulary: int) -> tuple[int, float]:
    """Return the tokens of one batch of responses and the CPU seconds of the engine for them."""
    ids = torch.randint(3, vocabulary, (_PROMPTS * 32,), generator=torch.Generator().manual_seed(1))
    prompts = Ragged(ids, torch.full((_PROMPTS,), 32))
    batch = Prompts(prompts, torch.arange(_PROMPTS), [None] * _PROMPTS)  # type: ignore[list-item]
    began = engine_seconds(engines)
    rollouts = SeparateEngines(cast(Any, SimpleNamespace()), engines).generate_sequences(
        batch, seed=1
    )
    return len(rollouts.response_ids.values), engine_seconds(engines) - began


def engine_seconds(engines: EngineGroup) -> float:
    """Return the CPU seconds that the engine's process has used."""
    handle = engines.pool.engines[0].handle
    return ray.get(handle.__ray_call__.remote(lambda _: time.process_time()))


def measure(size: str, runs: int, rank: int, sync: AdapterSync) -> Row:
    """Return the row of one form of the weights, after a first sync that is not measured."""
    model: Qwen2ForCausalLM = build(size)
    ray_init = compose(
        "ppo_trainer", ["data.train_files=none", "actor_rollout_ref.model.path=none"]
    ).config.ray_kwargs.ray_init
    with tempfile.TemporaryDirectory() as folder, ray_session(ray_init, 1, 1, 120.0):
        model.save_pretrained(folder)
        merges = str(sync is not AdapterSync.ADAPTERS).lower()
        engines = engine_pool(
            model,
            folder,
            1,
            64,
            "actor_rollout_ref.rollout.max_num_seqs=16",
            f"actor_rollout_ref.model.lora_rank={rank}",
            f"actor_rollout_ref.rollout.lora_merge={merges}",
        )
        engines.wait()
        add_adapters(model, engines.spec.model, 0)
        weights = EngineWeights(model, sync)
        send(engines, weights)
        generate(engines, model.config.vocab_size)
        took, speed, num_bytes = list[float](), list[float](), 0
        for _ in range(runs):
            start = time.perf_counter()
            num_bytes = send(engines, weights)
            took.append(1000 * (time.perf_counter() - start))
            tokens, seconds = generate(engines, model.config.vocab_size)
            speed.append(tokens / seconds)
        engines.pool.close()
    return {
        "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M",
        "sync": sync.name.lower(),
        "MB": num_bytes / 1e6,
        "ms": statistics.median(took),
        "tokens/CPU s": statistics.median(speed),
    }


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments(__doc__, runs=5, sizes="1m,100m", rank=16)
    rows: list[Row] = [
        in_fresh_process(measure, size, arguments.runs, arguments.rank, sync)
        for size in arguments.sizes.split(",")
        for sync in AdapterSync
    ]
    record_rows(rows, {"MB": "lower"})
    show(
        f"weight sync of LoRA rank {arguments.rank} to a vLLM pool, float32, median of "
        f"{arguments.runs} runs",
        rows,
        arguments.json,
    )


if __name__ == "__main__":
    main()
