"""Time of weight sync to vLLM, in milliseconds and relative to a plain copy of all parameters.

    python -m benchmarks.weight_sync [--runs 5] [--sizes 1m,20m,100m] [--engines 2] [--json]

`shared`: on one CPU rank vLLM's parameters are the trainer's. `streamed`: an engine in the
trainer's process with separate weights. `pool`: engines in separate processes, with checksums,
through Ray's object store or in a group of processes (gloo). The variants alternate.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from benchmarks.results import record_rows
from benchmarks.rollout import build, vllm_engine, vllm_settings
from benchmarks.table import Row, in_fresh_process, parse_arguments, show
from rlctl.recipes.compose import compose
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.cluster.engine_group import EngineGroup, EnginePool
from rlctl.runtime.cluster.pool import PoolSpec
from rlctl.runtime.cluster.session import ray_session
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.rollout.weight_sync import WHOLE, WeightChannel, bucket_bytes, to_buckets, whole
from rlctl.runtime.workers.rollout import RolloutSpec


def weights(model: Qwen2ForCausalLM) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's parameters by name, detached."""
    return ((name, value.detach()) for name, value in model.named_parameters())


def engine_pool(
    model: Qwen2ForCausalLM, folder: str, num_engines: int, max_tokens: int, *settings: str
) -> EngineGroup:
    """Start `num_engines` of vLLM on Ray, one thread each, which receive the model's weights.

    The model is saved in `folder`.
    """
    part = vllm_settings(folder, *settings)
    spec = PoolSpec(
        "engines",
        num_engines,
        RankInfo(0, 1, "cpu", 1, 600.0, False, None),
        300.0,
        600.0,
        balanced=False,
        device_fraction=1.0,
    )
    stop_token_ids = tuple(range(model.config.vocab_size // 40))
    rollout = RolloutSpec(
        part.model, SamplingConfig(part.rollout, max_tokens, stop_token_ids), 96, seed=1
    )
    return EnginePool(spec, 60.0, lambda kind, **fields: print(kind, fields)).spawn(rollout)


def send_to(engines: EngineGroup, model: Qwen2ForCausalLM) -> None:
    """Send the model's weights to all engines."""

    def send_weights(channel: WeightChannel[Any]) -> list[Any]:
        rows = whole(weights(model))
        max_bytes = bucket_bytes(engines.rollout, channel.device)
        for bucket in to_buckets(rows, WHOLE, torch.float32, max_bytes, channel.allocate):
            channel.send(bucket)
        return [channel.close(version=1)]

    engines.update_weights(send_weights)


def to_pool(engines: EngineGroup, model: Qwen2ForCausalLM, backend: str) -> None:
    """Sync weights to all engines through `backend`."""
    section = engines.rollout.checkpoint_engine.model_copy(update={"backend": backend})
    engines.rollout = engines.rollout.model_copy(update={"checkpoint_engine": section})
    engines.mark_stale()
    send_to(engines, model)


def measure(size: str, runs: int, num_engines: int) -> list[Row]:
    """Return one row per variant."""
    model, copy = build(size), build(size)
    shared, streamed = vllm_engine(model, shared=True), vllm_engine(model, shared=False)
    ray = compose(
        "ppo_trainer", ["data.train_files=none", "actor_rollout_ref.model.path=none"]
    ).config.ray_kwargs.ray_init
    with tempfile.TemporaryDirectory() as folder, ray_session(ray, num_engines, 1, 120.0):
        model.save_pretrained(folder)
        engines = engine_pool(
            model, folder, num_engines, 64, "actor_rollout_ref.rollout.max_num_seqs=16"
        )
        engines.wait()
        variants: dict[str, Callable[[], object]] = {
            "copy": lambda: copy.load_state_dict(model.state_dict()),
            "shared": lambda: shared.load_weights(weights(model)),
            "streamed": lambda: streamed.load_weights(weights(model)),
            f"pool of {num_engines}, object_store": lambda: to_pool(engines, model, "object_store"),
            f"pool of {num_engines}, gloo": lambda: to_pool(engines, model, "gloo"),
        }
        took: dict[str, list[float]] = {name: [] for name in variants}
        for run in range(runs + 2):  # two warm-up runs: the first use of Ray's store is slow
            for name, sync in variants.items():
                start = time.perf_counter()
                sync()
                if run >= 2:
                    took[name].append(1000 * (time.perf_counter() - start))
        engines.pool.close()
    parameters = f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M"
    medians = {name: statistics.median(times) for name, times in took.items()}
    return [
        {"parameters": parameters, "variant": name, "ms": ms, "copies": ms / medians["copy"]}
        for name, ms in medians.items()
    ]


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments(__doc__, runs=5, sizes="1m,20m,100m", engines=2)
    rows = [
        row
        for size in arguments.sizes.split(",")
        for row in in_fresh_process(measure, size, arguments.runs, arguments.engines)
    ]
    record_rows(rows, {"copies": "lower"})
    show(
        f"weight sync to vLLM, float32, median of {arguments.runs} runs",
        rows,
        arguments.json,
    )


if __name__ == "__main__":
    main()
