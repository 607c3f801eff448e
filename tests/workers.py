"""Actors of tiny models in this process, and a batch that workers learn from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlctl.recipes.schema import Config
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.base.batch import Experience, Ragged, Rollouts
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.model.sharding import full_tensor
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.workers.actor import ActorSpec, ActorWorker
from rlctl.runtime.workers.background import await_written
from rlctl.runtime.workers.critic import CriticSpec, CriticWorker
from rlctl.runtime.workers.dispatch import split
from tests.configs import configured

ROWS = 8
LOSS = (
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.actor.grad_clip=1000",
    "critic.grad_clip=1000",
)


def actor_of(
    where: RankInfo, config: Config, lengths: tuple[int, int] = (8, 8), stops: Sequence[int] = (2,)
) -> ActorWorker:
    """Build the actor of a recipe for prompts and responses of at most `lengths` tokens."""
    part = config.actor_rollout_ref
    sampling = SamplingConfig(part.rollout, lengths[1], tuple(stops))
    algorithm = load_algorithm(config, num_steps=1)
    return ActorWorker(where, ActorSpec(part.model, part.actor, sampling, lengths[0], algorithm, 0))


def actor(where: RankInfo, model: Path | str, overrides: tuple[str, ...] = ()) -> ActorWorker:
    """Build an actor of the recipe ppo whose loss has all terms."""
    path = f"actor_rollout_ref.model.path={model}"
    return actor_of(where, configured("ppo", [path, *LOSS], overrides))


def critic_of(where: RankInfo, config: Config) -> CriticWorker:
    """Build the critic of a recipe of PPO."""
    algorithm = PPO.from_config(config, num_steps=1)
    return CriticWorker(where, CriticSpec(config.critic, algorithm, 0))


def save(worker: ActorWorker, folder: Path, export: Path | None = None) -> None:
    """Save the state of a worker, and wait until it is written; see `begin_writing`."""
    worker.save(folder, export)
    await_written([folder], timeout_s=60)


def gradients(
    worker: ActorWorker | CriticWorker, batch: Rollouts
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the gradients in full that an update passes to the optimizer, and its metrics."""
    found: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        for name, parameter in worker.learner.model.named_parameters():
            if parameter.grad is not None:  # else of the base of adapters, or a frozen tower
                found[name] = full_tensor(parameter.grad).clone()

    worker.learner.optimizer.register_step_pre_hook(keep)
    metrics = worker.update(batch, lr=1e-3)
    return found, {name: metric.value for name, metric in metrics.items()}


def learnable(rollouts: Rollouts, log_probs: Ragged, advantages: torch.Tensor) -> Experience:
    """Return an experience with an advantage for each row (R,)."""
    nothing, num_rows = log_probs.like(torch.zeros_like(log_probs.values)), len(rollouts)
    of_tokens = log_probs.like(advantages.repeat_interleave(log_probs.lengths))
    return rollouts.grow(
        Experience,
        scores=torch.zeros(num_rows),
        components={},
        failed=torch.zeros(num_rows, dtype=torch.bool),
        **dict.fromkeys(("rewards", "values", "returns"), nothing),
        **dict.fromkeys(("old_log_probs", "ref_log_probs"), log_probs),
        advantages=of_tokens,
    )


def update(worker: ActorWorker, lr: float = 1e-3) -> None:
    """Update with this rank's rows of `experience()`."""
    batch, where = experience(), worker.rank_info
    ranks_per_row = worker.learner.model.ranks_per_row
    parts = split(batch, where.world_size // ranks_per_row, balanced=True)
    worker.update(batch.chunk(parts)[where.rank // ranks_per_row], lr=lr)


def weights(worker: ActorWorker) -> torch.Tensor:
    """Return all weights, flat and in full."""
    return torch.cat([full_tensor(value).flatten().clone() for value in worker.policy.parameters()])


def experience(
    prompts: Sequence[int] = (3, 7, 5, 4, 9, 3, 6, 8),
    prompt_of_row: Sequence[int] = (0, 0, 1, 1, 2, 2, 3, 7),
    responses: Sequence[int] = (1, 12, 5, 20, 3, 8, 2, 15),
    shift: float = -5.0,
    masked: Sequence[int] = (0, 3, 4, 20, 41),
) -> Experience:
    """Return slightly off-policy rows of these numbers of tokens, with tool tokens and weights.

    `shift` is the mean log-prob of a token; the tokens `masked` are a tool's.
    """
    draw = torch.Generator().manual_seed(3)

    def ragged(scale: float = 0.3, shift: float = 0.0) -> Ragged:
        rows = [torch.randn(n, generator=draw) * scale + shift for n in responses]
        return Ragged.from_rows(rows)

    def ids(lengths: Sequence[int]) -> Ragged:
        rows = [torch.randint(3, 60, (n,), generator=draw) for n in lengths]
        return Ragged.from_rows(rows, dtype=torch.int64)

    num_rows = len(responses)
    response_ids = ids(responses)
    mask = torch.ones(len(response_ids.values))
    mask[list(masked)] = 0
    return Experience(
        prompt_ids=ids(prompts).select(torch.tensor(prompt_of_row)),
        group=torch.arange(num_rows) // 2,
        rows=[],
        response_ids=response_ids,
        response_mask=response_ids.like(mask),
        rollout_log_probs=ragged(),
        finish=["stop"] * num_rows,
        scores=torch.zeros(num_rows),
        components={},
        failed=torch.zeros(num_rows, dtype=torch.bool),
        rewards=ragged(),
        old_log_probs=ragged(shift=shift),
        advantages=ragged(scale=1.0),
        ref_log_probs=ragged(shift=shift),
        values=ragged(),
        returns=ragged(),
        is_weights=ragged(scale=0.1, shift=0.9),
    )
