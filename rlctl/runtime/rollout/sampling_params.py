"""From prompts to sampling parameters, and from an engine's answers to a batch: the same wherever the engine lives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.recipes import schema
from rlctl.runtime.batch import Prompts, Rollouts
from rlctl.runtime.ops import ceil_div
from rlctl.runtime.rollout.engine import Responses, SamplingParams, random_streams

_REQUESTS = (
    4  # for each engine: what a slow or dead one holds up is little, and a request is still a batch
)


def num_requests(rollout: schema.Rollout, num_prompts: int, num_engines: int) -> int:
    """Into how many requests a batch is cut, for engines of a pool of their own. It hangs on their number, not on how many live.

    In mode `async` each prompt is a request, because it joins those that are being answered.
    """
    return num_prompts if rollout.mode == "async" else min(num_prompts, _REQUESTS * num_engines)


def max_in_flight(rollout: schema.Rollout) -> int:
    """How many requests an engine of a pool of its own is given before the first is answered: so many that it never waits for the next."""
    if rollout.mode == "sync":
        return 2
    return ceil_div(rollout.max_num_seqs, min(rollout.n, rollout.val_kwargs.n)) + 1


@dataclass(frozen=True)
class SamplingConfig:
    """How prompts of this run are answered, in training and in validation."""

    rollout: schema.Rollout
    max_response_length: int
    stop_token_ids: tuple[int, ...]

    def params(self, prompts: Tensor, seed: int, validate: bool, greedy: bool) -> SamplingParams:
        """For `prompts` (B,), numbers in the whole batch: a row's random stream does not hang on the process that answers it.

        `greedy` is one greedy answer a prompt, whatever the configuration says.
        """
        if greedy:
            return SamplingParams(
                0.0, 1.0, -1, self.max_response_length, self.stop_token_ids, seed=0, n=1
            )
        chosen = self.rollout.val_kwargs if validate else self.rollout
        return SamplingParams(
            temperature=0.0
            if validate and not self.rollout.val_kwargs.do_sample
            else chosen.temperature,
            top_p=chosen.top_p,
            top_k=chosen.top_k,
            max_tokens=self.max_response_length,
            stop_token_ids=self.stop_token_ids,
            seed=random_streams(
                seed, (prompts[:, None] * chosen.n + torch.arange(chosen.n)).flatten()
            ),
            n=chosen.n,
        )


def to_rollouts(prompts: Prompts, n: int, responses: Responses) -> Rollouts:
    """`n` rows for each of `prompts`, side by side, on the CPU."""
    ids = responses.response_ids.to("cpu")
    return prompts.repeat(n).grow(
        Rollouts,
        response_ids=ids,
        response_mask=ids.like(torch.ones(len(ids.values))),
        rollout_log_probs=responses.log_probs.to("cpu"),
        finish=responses.finish,
    )
