"""Single responses that are scored while others are generated, on engines of several ranks."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import torch

from rlctl.recipes.compose import compose
from rlctl.runtime.agents.actor import ColocatedEngines
from rlctl.runtime.batch import Prompts, Ragged
from rlctl.runtime.roles import Roles
from rlctl.runtime.rollout.requests import Completion, Request, Slice
from rlctl.runtime.rollout.sampling_params import SamplingConfig
from rlctl.runtime.training.generation import _overlapped


class Ranks:
    """Ranks whose engines finish each request at once, with its length as the response."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[Request]], Slice]] = []

    def exchange(
        self, requests: list[list[Request]], limit: Slice, cancelled: Collection[int] = ()
    ) -> list[list[Completion]]:
        assert not cancelled
        self.calls.append((requests, limit))
        return [
            [
                Completion(each.key, i, ids, torch.zeros(1), "stop")
                for each in part
                for i, ids in enumerate([torch.tensor([len(each.context_ids)])] * len(each.seeds))
            ]
            for part in requests
        ]

    def end_exchange(self) -> None:
        pass


def test_ranks_that_share_an_engine_get_the_same_requests_and_steps() -> None:
    rollout = "actor_rollout_ref.rollout"
    config = compose("grpo", [f"{rollout}.tensor_model_parallel_size=2", f"{rollout}.n=2"]).config
    sampling = SamplingConfig(config.actor_rollout_ref.rollout, 8, (2,))
    ranks, reward = Ranks(), MagicMock()
    roles = Roles(cast(Any, SimpleNamespace()), cast(Any, reward))
    overlapped = _overlapped(config, roles, ColocatedEngines(ranks, 4, 2), 4, sampling, reward)
    lengths = [3, 1, 4, 2, 5]
    ids = Ragged.from_rows([[7] * n for n in lengths], torch.int64)
    rollouts = overlapped.actor.generate_sequences(
        Prompts(ids, torch.arange(5), cast(Any, [None] * 5)), seed=1
    )
    assert rollouts.response_ids.values.tolist() == [n for n in lengths for _ in range(2)]
    ((parts, limit),) = ranks.calls
    assert [[len(each.context_ids) for each in part] for part in parts] == 2 * [[4, 3, 1]] + 2 * [
        [5, 2]
    ]
    assert (limit.steps, limit.seconds) == (8, None)
    assert reward.begin().add.call_count == 10
    reward.begin().finish.assert_called_once_with(rollouts)
