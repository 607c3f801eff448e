"""Models and batches that the rungs measure."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.machine import reset_peak_memory
from benchmarks.gpu.shapes import built_on
from rlctl.cores import available_cores
from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Experience, Ragged
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.cluster.pools import InlinePool
from rlctl.runtime.planning.devices import Devices
from rlctl.runtime.planning.role_memory import plan_memory
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.workers.actor import ActorSpec, ActorWorker

PROMPT = 32  # tokens of each prompt
ACTOR = "actor_rollout_ref.actor"


def rank_info(device: str, deterministic: bool = False) -> RankInfo:
    """Return the only rank of a pool on `device`."""
    return RankInfo(0, 1, device, available_cores(), 600.0, deterministic, None)


@contextmanager
def pool(device: str) -> Iterator[InlinePool]:
    """Open a pool of this process, with a process group also on a CPU, and close it."""
    opened = InlinePool(rank_info(device))
    if not dist.is_initialized():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield opened
    finally:
        opened.close()


def settings(folder: Path, device: str, *overrides: str) -> list[str]:
    """Return overrides for a model of random weights in `folder`."""
    return [
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.model.init=random",
        f"trainer.device={device}",
        f"{ACTOR}.use_kl_loss=false",
        *overrides,
    ]


def build_actor(pool: InlinePool, folder: Path, *overrides: str) -> ActorWorker:
    """Build an actor with random weights; `release` frees its memory."""
    rank = pool.process.rank_info
    config = compose("grpo", settings(folder, rank.device, *overrides)).config
    part = config.actor_rollout_ref
    algorithm = load_algorithm(config, num_steps=1)
    sampling = SamplingConfig(part.rollout, config.data.max_response_length, (2,))
    spec = ActorSpec(part.model, part.actor, sampling, PROMPT, algorithm, 0)
    reset_peak_memory(rank.device)
    with built_on(rank.device):
        return ActorWorker(rank, spec)


def planned_gib(folder: Path, device: str, *overrides: str) -> float:
    """Return the peak that the plan gives such an actor, without an engine."""
    apart = "trainer.placement.rollout=engines"
    config = compose("grpo", settings(folder, device, apart, *overrides)).config
    needs, ranks = load_algorithm(config, num_steps=1).needs, {"main": 1, "engines": 1}
    plan = plan_memory(config, Devices(device, 1, 1), ranks, needs)
    return next(role.peak for role in plan.known() if role.role == "actor") / 2**30


def release(device: str) -> None:
    """Free the memory of models that are no longer referenced."""
    gc.collect()
    reset_peak_memory(device)


def experience(rows: int, context: int, vocabulary: int, prompt: int = PROMPT) -> Experience:
    """Return `rows` rows of `context` tokens each, with advantages of both signs."""
    draw = torch.Generator().manual_seed(0)
    length = context - prompt
    lengths = torch.full((rows,), length)
    response_ids = Ragged(torch.randint(3, vocabulary, (rows * length,), generator=draw), lengths)
    prompt_ids = torch.randint(3, vocabulary, (rows * prompt,), generator=draw)
    zeros = response_ids.like(torch.zeros(rows * length))
    advantages = torch.randn(rows, generator=draw).repeat_interleave(length)
    return Experience(
        prompt_ids=Ragged(prompt_ids, torch.full((rows,), prompt)),
        group=torch.arange(rows),
        rows=[],
        response_ids=response_ids,
        response_mask=response_ids.like(torch.ones(rows * length)),
        rollout_log_probs=zeros,
        finish=["length"] * rows,
        scores=torch.zeros(rows),
        components={},
        failed=torch.zeros(rows, dtype=torch.bool),
        rewards=zeros,
        old_log_probs=zeros,
        advantages=response_ids.like(advantages),
    )
