"""Generation whose responses are scored while others are generated.

The responses of a batch go to the reward as they finish: its processes compute beside the engines.
Responses and scores are those of a generation without overlap: all requests are submitted at once
and in the same order, and the engines only pause between slices.
"""

from __future__ import annotations

from rlctl.runtime.base.batch import Prompts, Rollouts
from rlctl.runtime.base.clock import timed
from rlctl.runtime.generation.on_engines import OnEngines
from rlctl.runtime.generation.policy_engines import Engines
from rlctl.runtime.rewards.role import RuleReward
from rlctl.runtime.rollout.engine import in_order, to_requests, to_responses
from rlctl.runtime.rollout.exchange import complete
from rlctl.runtime.rollout.requests import Completion
from rlctl.runtime.rollout.sampling_params import SamplingConfig, to_rollouts


class OverlappedGenerator(OnEngines):
    """Generator of single responses in slices of the engines, between which they are scored.

    Args:
        engines: the engines.
        context_length: limit of prompt and response together.
    """

    def __init__(
        self,
        engines: Engines,
        sampling: SamplingConfig,
        context_length: int,
        reward: RuleReward,
    ) -> None:
        super().__init__(engines)
        self.sampling = sampling
        self.context_length = context_length
        self.reward = reward

    @timed("gen")
    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        params = self.sampling.params(prompts.group, seed, validate, greedy, prompts.images)
        requests = to_requests(prompts.prompt_ids, params, self.context_length)
        scoring = self.reward.begin(prompts.repeat(params.n))
        first_row = {request.key: number * params.n for number, request in enumerate(requests)}

        def score(completion: Completion) -> None:
            scoring.add(first_row[completion.key] + completion.index, completion.response_ids)

        try:
            completions = complete(self.engines.divide(requests), self.engines.exchange, score)
        finally:
            self.engines.end_exchange()
        rollouts = to_rollouts(prompts, params.n, to_responses(in_order(requests, completions)))
        scoring.finish(rollouts)
        return rollouts
