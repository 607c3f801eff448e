"""Building of roles, with pools that record what is spawned."""

from __future__ import annotations

from collections import Counter
from unittest.mock import create_autospec

import pytest
import torch

from rlctl.recipes.compose import compose
from rlctl.runtime.agents.actor import ColocatedEngines, RankEngines
from rlctl.runtime.agents.schedule import TurnEngines
from rlctl.runtime.agents.stream import OverlappedActor
from rlctl.runtime.cluster.disaggregated import DisaggregatedActor
from rlctl.runtime.rewards.role import RuleReward
from rlctl.runtime.roles import Actor, Roles
from rlctl.runtime.rollout.requests import Decoding, Request
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.training.generation import _overlapped


def overlapped(engines: TurnEngines, *overrides: str) -> Actor:
    """Return the actor of a run whose rewards are computed in processes."""
    config = compose("grpo", list(overrides)).config
    rollout = config.actor_rollout_ref.rollout
    actor, reward = create_autospec(Actor), create_autospec(RuleReward)
    sampling = SamplingConfig(rollout, 8, (2,))
    roles = _overlapped(config, Roles(actor, reward), engines, 4, sampling, reward)
    return roles.actor


def test_overlap_places_requests_on_engines(caplog: pytest.LogCaptureFixture) -> None:
    """One engine of two ranks each, a pool of three, and a pool whose engines return groups."""
    decoding = Decoding(1.0, 1.0, -1, ())
    ids = [Request(i, torch.tensor([1]), decoding, (4,), (i,)) for i in range(12)]
    shared = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    pool = create_autospec(DisaggregatedActor, instance=True)
    pool.num_engines.return_value = 3
    for engines, overrides, expected in (
        (ColocatedEngines(create_autospec(RankEngines), 4, 2), [shared], {0: 6, 1: 6}),
        (pool, [], {0: 4, 1: 4, 2: 4}),
    ):
        actor = overlapped(engines, *overrides)
        assert isinstance(actor, OverlappedActor)
        assert Counter(each.affinity for each in actor._placed(ids)) == expected
    caplog.set_level("INFO", "rlctl")
    actor = overlapped(pool, "actor_rollout_ref.rollout.mode=async")
    assert not isinstance(actor, OverlappedActor)
    assert "responses are scored after generation, although reward.overlap is true" in caplog.text
