"""Actor that passes responses to the reward as soon as they are finished.

While other responses are generated, the processes of the reward functions compute. Responses and
scores are those of a generation without overlap: all requests are submitted at once and in the same
order, and the engines only pause between slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from rlctl.runtime.agents.delegating import DelegatingActor
from rlctl.runtime.agents.schedule import TurnEngines
from rlctl.runtime.batch import Prompts, Rollouts
from rlctl.runtime.rewards.role import RuleReward
from rlctl.runtime.roles import Actor
from rlctl.runtime.rollout.engine import in_order, to_requests, to_responses
from rlctl.runtime.rollout.requests import Completion, Request, Slice
from rlctl.runtime.rollout.sampling_params import SamplingConfig, to_rollouts
from rlctl.tracking.clock import timed

NO_OVERLAP = "responses are scored after generation, although reward.overlap is true: %s"
_SLICE = Slice(steps=None, seconds=0.1)


class OverlappedActor(DelegatingActor):
    """Actor whose `engines` generate single responses in slices, between which they are scored.

    Args:
        actor: the actor; all else is delegated to it.
        engines: its engines.
        num_ranks: returns the number of the actor's ranks, or of the engines of a pool.
        context_length: limit of prompt and response together.
    """

    def __init__(
        self,
        actor: Actor,
        engines: TurnEngines,
        num_ranks: Callable[[], int],
        sampling: SamplingConfig,
        context_length: int,
        reward: RuleReward,
    ) -> None:
        super().__init__(actor)
        self.engines = engines
        self.num_ranks = num_ranks
        self.sampling = sampling
        self.context_length = context_length
        self.reward = reward

    @timed("gen")
    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        params = self.sampling.params(prompts.group, seed, validate, greedy)
        requests = to_requests(prompts.prompt_ids, params, self.context_length)
        scoring = self.reward.begin(prompts.repeat(params.n))
        first_row = {request.key: number * params.n for number, request in enumerate(requests)}
        waiting, completions = self._placed(requests), list[Completion]()
        num_rows = len(prompts) * params.n
        try:
            while len(completions) < num_rows:
                for completion in self.engines.exchange(waiting, _SLICE):
                    completions.append(completion)
                    scoring.add(
                        first_row[completion.key] + completion.index, completion.response_ids
                    )
                waiting = []
        finally:
            self.engines.end_exchange()
        rollouts = to_rollouts(prompts, params.n, to_responses(in_order(requests, completions)))
        scoring.finish(rollouts)
        return rollouts

    def _placed(self, requests: list[Request]) -> list[Request]:
        """Return the requests in the order and on the engines of an undivided generation."""
        parts = torch.arange(len(requests)).tensor_split(self.num_ranks())
        size = self.sampling.rollout.tensor_model_parallel_size  # ranks of an engine
        engine = {i: rank // size for rank, part in enumerate(parts) for i in part.tolist()}
        placed = [replace(request, affinity=engine[i]) for i, request in enumerate(requests)]
        return sorted(placed, key=lambda request: -len(request.context_ids))
