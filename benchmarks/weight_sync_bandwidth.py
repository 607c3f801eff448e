"""Share of the memory's bandwidth that a weight sync to engines on this CPU reaches.

    python -m benchmarks.weight_sync_bandwidth [--runs 7] [--engines 2] [--megabytes 1024] [--json]

The model is in this process, engines of `hf` have one process and one thread each. 100 % is the
time in which all cores together copy the model once for the trainer, which writes it for the
engines, and once for each engine: nothing is read or written twice. Checksums are part of the
sync. Copies and syncs alternate, one transport after the other.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.results import record_rows
from benchmarks.table import Row, in_fresh_process, parse_arguments, show
from benchmarks.weight_sync import engine_pool, to_pool
from rlctl.cores import available_cores
from rlctl.recipes.compose import compose
from rlctl.runtime.cluster.session import ray_session

_LAYER = 36.25  # MiB, float32
_NAME = "actor_rollout_ref.rollout.name=hf"


def build(megabytes: int) -> Qwen2ForCausalLM:
    """Build a random model of this size in float32."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=896,
        intermediate_size=2816,
        num_hidden_layers=max(1, round((megabytes - 14) / _LAYER)),
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


def measure(megabytes: int, runs: int, num_engines: int) -> list[Row]:
    """Return one row per transport."""
    model = build(megabytes)
    size = sum(parameter.nbytes for parameter in model.parameters())
    source, target = torch.ones(size // 4), torch.empty(size // 4)
    settings = compose(
        "ppo_trainer", ["data.train_files=none", "actor_rollout_ref.model.path=none"]
    )
    cores = available_cores()

    def copy() -> None:
        torch.set_num_threads(cores)
        target.copy_(source)
        torch.set_num_threads(1)

    with (
        tempfile.TemporaryDirectory() as folder,
        ray_session(settings.config.ray_kwargs.ray_init, num_engines, 1, 120.0),
    ):
        model.save_pretrained(folder)
        engines = engine_pool(model, folder, num_engines, 64, _NAME)
        engines.wait()
        took: dict[str, list[tuple[float, float]]] = {}
        for backend in ("gloo", "object_store"):  # Ray frees objects after a sync has ended
            took[backend] = [
                (seconds(copy), seconds(lambda name=backend: to_pool(engines, model, name)))
                for _ in range(runs + 2)
            ][2:]  # two warm-up runs: the first use of memory is slow
        engines.pool.close()
    return [
        {
            "transport": backend,
            "ms": 1000 * statistics.median(sync for _, sync in times),
            "copy GB/s": size / statistics.median(copied for copied, _ in times) / 1e9,
            "of the bandwidth": statistics.median(
                (num_engines + 1) * copied / sync for copied, sync in times
            ),
        }
        for backend, times in took.items()
    ]


def seconds(call: Callable[[], object]) -> float:
    """Return the time that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    given = parse_arguments(__doc__, runs=7, engines=2, megabytes=1024)
    rows = in_fresh_process(measure, given.megabytes, given.runs, given.engines)
    record_rows(rows, {"of the bandwidth": "higher"})
    show(f"weight sync of {given.megabytes} MiB to {given.engines} engines", rows, given.json)


if __name__ == "__main__":
    main()
