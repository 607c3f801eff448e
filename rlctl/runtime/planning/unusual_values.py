"""Warnings about values that are allowed and can hardly be meant."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rlctl.recipes import schema
from rlctl.recipes.roles import needed_roles, rollout_pool
from rlctl.runtime.algorithms.base import Needs

_MANY_RESPONSES = 100_000  # per step; DAPO's 512 prompts × 16 responses are 8,192
_HIGH_LR = 0.1  # AdamW moves each weight by up to `lr`, and weights are below 1


def unusual_values(config: schema.Config, needs: Needs) -> Iterator[str]:
    """Yield one warning for each such value of the configuration."""
    rollout, data, trainer = config.actor_rollout_ref.rollout, config.data, config.trainer
    responses = data.train_batch_size * rollout.n
    if Needs.GROUPS in needs and responses > _MANY_RESPONSES:
        yield (
            f"a step generates {responses:,} responses: data.train_batch_size="
            f"{data.train_batch_size} × actor_rollout_ref.rollout.n={rollout.n}"
        )
    for role in needed_roles(config, needs):
        if role.learns and (lr := role.learner(config).optim.lr) >= _HIGH_LR:
            yield (
                f"{role.section}.optim.lr={lr:g} overwrites the weights: AdamW moves each weight "
                "by up to this much in an update; 1e-7 to 1e-3 are usual"
            )
    beside = config.async_training
    if beside.max_staleness == 1 and not beside.eager and rollout_pool(config, needs) is None:
        yield (
            "async_training.max_staleness=1 saves no time without engines of their own, which "
            "trainer.placement.rollout=POOL gives: generation and training take turns"
        )
    address = config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS")
    if trainer.nnodes > 1 and address is None:
        yield (
            f"trainer.nnodes={trainer.nnodes} needs a running Ray cluster, and none is named: set "
            "RAY_ADDRESS or ray_kwargs.ray_init.address, or start with --address"
        )
