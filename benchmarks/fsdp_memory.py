"""Peak memory of an update as torch's FSDPMemTracker counts it, beside the plan, without memory.

    python -m benchmarks.fsdp_memory [--models 0.5B,7B,32B,70B] [--ranks 1,8,32] [--json]

The actor runs two micro-batches under FakeTensorMode, as the first rank of a fake process group,
with the layers, FSDP and the optimizer of rlctl. Attention is a stand-in that keeps what flash
attention does, because a CPU has other kernels. Figures are GiB on one rank. Takes minutes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.results import record
from benchmarks.table import Row, in_fresh_process, parse_arguments, show
from docs.generate import MODELS as DOCUMENTED
from docs.generate import write_model
from rlctl.recipes import schema
from rlctl.recipes.compose import compose
from rlctl.runtime.base import ops
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.model import device_mesh, sharding
from rlctl.runtime.model.activations import save_activation_memory
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.kernels import Reach
from rlctl.runtime.model.load import compute_dtype, load_model, master_dtype
from rlctl.runtime.model.mapped import RankStorage
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.planning.devices import Devices
from rlctl.runtime.planning.role_memory import plan_memory
from rlctl.runtime.workers.optimizers import build_optimizer

GIB = 2**30
TOKENS, MICRO_BATCHES = 8192, 2
MODELS = {name: DOCUMENTED[name] for name in ("0.5B", "7B", "32B")}
MODELS["70B"] = (8192, 80, 64, 8, 28672, False, 128256)


class FlashAttention(torch.autograd.Function):
    """Results of the sizes of flash attention, without computation."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return an output (T, H, D) for (T, H, D), (T, K, D), (T, K, D)."""
        out = torch.empty_like(query)
        log_sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the inputs."""
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class OnePacked:
    """Packing of one row."""

    def __init__(self, position_ids: Tensor) -> None:
        self.position_ids = position_ids

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        """See `TokenAttention`."""
        del layer, reach
        found: Any = FlashAttention.apply(query, key, value)
        return found


def config_of(folder: str, ranks: int) -> schema.Config:
    """Return the configuration of a run with engines in a pool of their own."""
    overrides = [
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.model.init=random",
        "actor_rollout_ref.model.dtype=bfloat16",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={TOKENS}",
        "trainer.placement.rollout=engines",
        f"data.max_prompt_length={TOKENS // 8}",
        f"data.max_response_length={TOKENS - TOKENS // 8}",
        f"data.train_batch_size={MICRO_BATCHES * ranks}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={MICRO_BATCHES * ranks}",
    ]
    return compose("gsm8k_grpo", overrides).config


def planned(folder: str, ranks: int) -> int:
    """Return the bytes that the plan gives the actor."""
    config = config_of(folder, ranks)
    needs = load_algorithm(config, 1).needs
    plan = plan_memory(config, Devices("cuda", 1, ranks), {"main": ranks, "engines": 1}, needs)
    return next(each.peak for each in plan.known() if each.role == "actor")


def tracked(folder: str, ranks: int) -> dict[str, int]:
    """Return the bytes at the peak of an update, by kind, and their sum as `Total`.

    The optimizer has stepped before, and the second micro-batch meets the gradients of the first.
    """
    config = config_of(folder, ranks).actor_rollout_ref
    fsdp = config.actor.fsdp_config
    ops._CHUNK_CPU = ops._CHUNK_GPU
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    rank = RankInfo(0, ranks, "cpu", 1, 60.0, False, None)
    mesh = device_mesh.mesh_of(rank, fsdp)  # which needs numbers
    with FakeTensorMode(), patch.object(device_mesh, "mesh_of", lambda *_: mesh):
        hf = load_model(config.model, "policy", master_dtype(fsdp), 0)
        save_activation_memory(hf, config.model)
        policy = PolicyModel(hf, 1.0)
        storage = RankStorage("cpu", master_dtype(fsdp), compute_dtype(config.model, "cuda"))
        sharding.shard(policy, rank, fsdp, storage)
        optimizer = build_optimizer(list(policy.parameters()), config.actor.optim, offload=False)
        for parameter in policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # the tracker would count temporary tensors that a GPU does not have
        optimizer.zero_grad()
        tracker = FSDPMemTracker(policy, optimizer)
        policy.train()
        with tracker:
            for _ in range(MICRO_BATCHES):
                tracker.reset_mod_stats()  # of modules, not the peak
                policy(sequences()).log_probs.sum().backward()
        peaks = tracker.get_tracker_snapshot("peak")
    [found] = peaks.values()
    return {getattr(kind, "value", kind): size for kind, size in found.items()}


def sequences() -> Sequences:
    """Return one row of a micro-batch's tokens: an eighth of them is the prompt."""
    prompt = TOKENS // 8
    positions = torch.arange(TOKENS)
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    packing: Any = OnePacked(positions)
    return Sequences(ids, packing, positions[prompt - 1 : -1], ids[prompt:], positions[-1:])


def main() -> None:
    """Count and print."""
    given = parse_arguments(__doc__, models=",".join(MODELS), ranks="1,8,32")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.models.split(","):
            write_model(Path(folder), MODELS[name])
            for ranks in map(int, given.ranks.split(",")):
                found = in_fresh_process(tracked, folder, ranks)
                plan = planned(folder, ranks)
                total = found["Total"]
                row: Row = {"model": name, "ranks": str(ranks), "tracked": total / GIB}
                rows.append(row | {"plan": plan / GIB, "plan / tracked": plan / total})
                parts = {kind: f"{size / GIB:.2f}" for kind, size in found.items() if size}
                print(rows[-1], parts, file=sys.stderr, flush=True)
    show("peak memory of an update on one rank, GiB", rows, given.json)
    off = max(abs(float(row["plan / tracked"]) - 1) for row in rows)
    print(f"largest difference of plan and tracker: {off:.0%}", file=sys.stderr)
    record("plan and FSDPMemTracker, largest difference", off, "lower")


if __name__ == "__main__":
    main()
