"""Conversion of prompts to sampling parameters, and of responses to a batch, for all engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlctl.recipes import schema
from rlctl.runtime.base.batch import Prompts, Rollouts
from rlctl.runtime.data.tokenizer import stop_token_ids
from rlctl.runtime.model.load import empty_model
from rlctl.runtime.rollout.engine import Responses, SamplingParams, random_streams

if TYPE_CHECKING:
    from rlctl.runtime.base.image_processor import Images
    from rlctl.runtime.model.routing import RoutingShape

# Rows that engines decode at a time by default.
_ROWS_OF_GPU = 1024  # of vLLM on a large GPU
DEFAULT_ROWS = 256  # of hf, and of any on a CPU


def rows_at_a_time(rollout: schema.Rollout, device: str) -> int:
    """Return `max_num_seqs`; for null the most rows that an engine decodes at a time by default."""
    on_gpu = device == "cuda" or rollout.is_client
    return rollout.max_num_seqs or (_ROWS_OF_GPU if on_gpu else DEFAULT_ROWS)


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling settings of a run, for training and validation."""

    rollout: schema.Rollout
    max_response_length: int
    stop_token_ids: tuple[int, ...]
    routing: RoutingShape | None = None  # of the experts that engines record, for router replay

    @classmethod
    def from_config(cls, config: schema.Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return the sampling settings of a run."""
        policy = config.actor_rollout_ref
        length = config.data.max_response_length
        shape: RoutingShape | None = None
        if policy.actor.router_replay.mode == "R3":
            from rlctl.runtime.model.routing import routing_shape

            shape = routing_shape(empty_model(policy.model))
        return cls(policy.rollout, length, stop_token_ids(tokenizer, policy.model.path), shape)

    def params(
        self,
        prompts: Tensor,
        seed: int,
        validate: bool,
        greedy: bool,
        images: Sequence[Images] = (),
    ) -> SamplingParams:
        """Build the sampling parameters of prompts with indices `prompts` (B,) in the batch.

        `images` are those of each of B prompts.

        Random streams depend on `seed` and these indices, not on the process that samples.
        `greedy` requests one greedy response per prompt, regardless of the configuration.
        """
        if greedy:
            return SamplingParams(
                temperature=0.0,
                top_p=1.0,
                top_k=-1,
                stop_token_ids=self.stop_token_ids,
                max_tokens=self.max_response_length,
                seed=0,
                n=1,
                images=images,
            )
        chosen = self.rollout.val_kwargs if validate else self.rollout
        sampled = not validate or self.rollout.val_kwargs.do_sample
        rows = (prompts[:, None] * chosen.n + torch.arange(chosen.n)).flatten()
        return SamplingParams(
            temperature=chosen.temperature if sampled else 0.0,
            top_p=chosen.top_p,
            top_k=chosen.top_k,
            max_tokens=self.max_response_length,
            stop_token_ids=self.stop_token_ids,
            seed=random_streams(seed, rows),
            n=chosen.n,
            images=images,
        )


def to_rollouts(prompts: Prompts, n: int, responses: Responses) -> Rollouts:
    """Join B `prompts` and their `responses` into B·n rows on the CPU; groups are adjacent."""
    ids = responses.response_ids.to("cpu")
    return prompts.repeat(n).grow(
        Rollouts,
        response_ids=ids,
        response_mask=ids.like(torch.ones(len(ids.values))),
        rollout_log_probs=responses.log_probs.to("cpu"),
        finish=responses.finish,
        routing=responses.routing,
    )
