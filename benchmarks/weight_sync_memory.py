"""Memory that a weight sync takes on each rank of a mesh and in the engine, beside the model's.

    python -m benchmarks.weight_sync_memory [--meshes "FSDP; …"] [--hidden 512] [--layers 12]

Four ranks and one engine of `hf` in processes of their own, through Ray's object store, with
buckets of 16 MiB. `rank` is the most private memory that any rank had during the second sync above
that before it, `engine` that of the engine; both are sampled every millisecond. `largest` is the
largest parameter: a bucket has at least one. All in MiB, float32.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.measured import MeasuredActor, engine_growth
from benchmarks.results import record_rows
from benchmarks.table import Row, in_fresh_process, parse_arguments, show
from rlctl.recipes.compose import compose
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.cluster.engine_group import EnginePool
from rlctl.runtime.cluster.pool import PoolSpec, RayPool
from rlctl.runtime.cluster.session import ray_session
from rlctl.runtime.generation.separate_engines import SeparateEngines
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.workers.actor import ActorSpec
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
    "experts 2 × tensor 2": (
        "expert_model_parallel_size=2",
        "tensor_model_parallel_size=2",
        "fsdp_size=2",
    ),
}


def measure(meshes: list[str], hidden: int, layers: int) -> list[Row]:
    """Return the row of each mesh; the engine is the same for all."""
    with tempfile.TemporaryDirectory() as folder:
        largest, total = write_model(Path(folder), hidden, layers)
        given = [
            f"actor_rollout_ref.model.path={folder}",
            "actor_rollout_ref.model.init=random",
            "actor_rollout_ref.rollout.name=benchmarks.measured:MeasuredEngine",
            f"actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes={BUCKET}",
        ]
        config = compose("ppo", given).config
        part, found = config.actor_rollout_ref, list[Row]()
        sampling = SamplingConfig(part.rollout, 8, (2,))
        with ray_session(config.ray_kwargs.ray_init, RANKS + 1, 1, 300.0):
            engines = EnginePool(_pool("engines", 1), 60.0, lambda *_, **__: None)
            group = engines.spawn(RolloutSpec(part.model, sampling, 8, seed=0))
            group.wait()
            for mesh in meshes:
                ranks = RayPool(_pool("main", RANKS))
                settings = compose("ppo", [*given, *(f"{_FSDP}.{each}" for each in MESHES[mesh])])
                algorithm: Any = load_algorithm(settings.config, 1)
                actor = settings.config.actor_rollout_ref.actor
                spec = ActorSpec(part.model, actor, sampling, 8, algorithm, 0)
                trainer = ranks.spawn("actor", MeasuredActor, spec)
                for _ in range(2):
                    group.mark_stale()
                    SeparateEngines(trainer, group).update_weights()
                handle: Any = engines.engines.engines[0].handle
                of_ranks = trainer.largest_growth()
                of_engine: int = ray.get(handle.__ray_call__.remote(engine_growth))
                ranks.close()
                found.append(
                    {
                        "mesh": mesh,
                        "model": total / MIB,
                        "largest": largest / MIB,
                        "rank": of_ranks / MIB,
                        "engine": of_engine / MIB,
                        "rank / model": of_ranks / total,
                        "engine / model": of_engine / total,
                    }
                )
                print(found[-1], file=sys.stderr, flush=True)
            engines.close()
    return found


def _pool(name: str, size: int) -> PoolSpec:
    where = RankInfo(0, size, "cpu", 1, 300.0, False, None)
    return PoolSpec(name, size, where, 300.0, 300.0, balanced=False, device_fraction=1.0)


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
    meshes = [each.strip() for each in given.meshes.split(";")]
    rows: list[Row] = in_fresh_process(measure, meshes, given.hidden, given.layers)
    record_rows(rows, {"rank / model": "lower"})
    show("private memory of a weight sync above that before it, MiB", rows, given.json)


if __name__ == "__main__":
    main()
