"""Memory that a weight sync takes on each rank of a mesh and in the engine, beside the model's.

    python -m benchmarks.weight_sync_memory [--meshes "FSDP; …"] [--hidden 512] [--layers 12]

Four ranks and one engine of `hf` in processes of their own, through Ray's object store, with
buckets of 16 MiB. `rank` is the most private memory that any rank had during the second sync above
that before it, `engine` that of the engine; both are sampled every millisecond. `largest` is the
largest parameter: a bucket has at least one. All in MiB, float32.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.results import record_rows
from benchmarks.table import Row, in_fresh_process, parse_arguments, show
from rlctl.recipes.compose import compose
from rlctl.recipes.roles import ROLLOUT
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.cluster.disaggregated import DisaggregatedActor
from rlctl.runtime.cluster.engine_pool import EnginePool
from rlctl.runtime.cluster.pool import PoolSpec, RayPool
from rlctl.runtime.cluster.session import ray_session
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.rollout.weight_sync import WeightChannel
from rlctl.runtime.workers.actor import ActorSpec, ActorWorker, T
from rlctl.runtime.workers.dispatch import dispatch
from rlctl.runtime.workers.rollout import RolloutSpec

MIB, RANKS, BUCKET = 2**20, 4, 16
_FSDP = "actor_rollout_ref.actor.fsdp_config"
MESHES = {
    "FSDP": (),
    "FSDP, 2 replicas": ("fsdp_size=2",),
    "FSDP 2 × tensor 2": ("tensor_model_parallel_size=2",),
    "tensor 4": ("tensor_model_parallel_size=4",),
    "sequence 2 × tensor 2": (
        "tensor_model_parallel_size=2",
        "ulysses_sequence_parallel_size=2",
    ),
    "experts 4": ("expert_model_parallel_size=4",),
    "experts 2 × tensor 2": ("expert_model_parallel_size=2", "tensor_model_parallel_size=2"),
}


def private_bytes() -> int:
    """Return the memory of this process that it shares with no other."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(each for each in lines if each.startswith("RssAnon")).split()[1]) * 1024


@contextmanager
def growth() -> Iterator[list[int]]:
    """Yield a list that gets the largest private memory within the block above that before it."""
    found, ended, before = [0], threading.Event(), private_bytes()

    def sample() -> None:
        while not ended.wait(0.001):
            found[0] = max(found[0], private_bytes() - before)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield found
    finally:
        ended.set()
        sampler.join()


class MeasuredActor(ActorWorker):
    """Actor that measures its weight syncs."""

    grown = 0

    @dispatch(collect_fn=lambda _, results: [each for found in results for each in found])
    def send_weights(self, channel: WeightChannel[T]) -> list[T]:
        """See `ActorWorker`."""
        with growth() as found:
            sent = super().send_weights(channel)
        self.grown = found[0]
        return sent

    @dispatch(collect_fn=lambda _, results: max(results))
    def largest_growth(self) -> int:
        """Return the growth of the last sync; on a handle the largest of all ranks."""
        return self.grown


class MeasuredEngine(HFEngine):
    """Engine that measures its weight syncs."""

    grown = 0

    def load_weights(self, weights: Any) -> None:
        """See `HFEngine`."""
        with growth() as found:
            super().load_weights(weights)
        self.grown = found[0]


def measure(mesh: str, hidden: int, layers: int) -> Row:
    """Return the row of one mesh."""
    settings = [
        "actor_rollout_ref.model.init=random",
        "actor_rollout_ref.rollout.name=benchmarks.weight_sync_memory:MeasuredEngine",
        f"actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes={BUCKET}",
        *(f"{_FSDP}.{each}" for each in MESHES[mesh]),
    ]
    if "expert_model_parallel_size=2" in MESHES[mesh]:
        settings.append(f"{_FSDP}.fsdp_size=2")
    with tempfile.TemporaryDirectory() as folder:
        largest, total = write_model(Path(folder), hidden, layers)
        config = compose("ppo", [f"actor_rollout_ref.model.path={folder}", *settings]).config
        part = config.actor_rollout_ref
        sampling = SamplingConfig(part.rollout, 8, (2,))
        with ray_session(config.ray_kwargs.ray_init, RANKS + 1, 1, 300.0, None):
            ranks = RayPool(_pool("main", RANKS))
            engines = EnginePool(_pool("engines", 1), 60.0, lambda *_, **__: None)
            group = engines.spawn(RolloutSpec(part.model, sampling, 8, seed=0))
            algorithm: Any = load_algorithm(config, 1)
            spec = ActorSpec(part.model, part.actor, sampling, 8, algorithm, 0)
            trainer = ranks.spawn("actor", MeasuredActor, spec)
            group.wait()
            actor = DisaggregatedActor(trainer, group)
            for _ in range(2):
                group.mark_stale()
                actor.update_weights()
            grown = trainer.largest_growth()
            handle: Any = engines.engines.engines[0].handle
            of_engine: int = ray.get(handle.__ray_call__.remote(_engine_growth))
            engines.close()
            ranks.close()
    return {
        "mesh": mesh,
        "model": total / MIB,
        "largest": largest / MIB,
        "rank": grown / MIB,
        "engine": of_engine / MIB,
        "rank / model": grown / total,
        "engine / model": of_engine / total,
    }


def _pool(name: str, size: int) -> PoolSpec:
    where = RankInfo(0, size, "cpu", 1, 300.0, False, None)
    return PoolSpec(name, size, where, 300.0, 300.0, balanced=False, device_fraction=1.0)


def _engine_growth(process: Any) -> int:
    return process.workers[ROLLOUT.name].engine.grown


def write_model(folder: Path, hidden: int, layers: int) -> tuple[int, int]:
    """Write the config.json of a mixture; return the bytes of its largest weight and of all."""
    head: dict[str, Any] = {"head_dim": hidden // 8}
    Qwen3MoeConfig(
        **head,
        vocab_size=16384,
        hidden_size=hidden,
        intermediate_size=hidden,
        moe_intermediate_size=hidden // 2,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    sizes = [each.numel() * 4 for each in model.parameters()]
    return max(sizes), sum(sizes)


def main() -> None:
    """Measure and print."""
    given = parse_arguments(__doc__, meshes="; ".join(MESHES), hidden=512, layers=12)
    rows: list[Row] = [
        in_fresh_process(measure, mesh.strip(), given.hidden, given.layers)
        for mesh in given.meshes.split(";")
    ]
    record_rows(rows, {"rank / model": "lower"})
    show("private memory of a weight sync above that before it, MiB", rows, given.json)


if __name__ == "__main__":
    main()
