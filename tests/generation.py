"""Prompts and settings of generation, responses, and the log-probs that it should report."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.runtime.batch import Prompts, Ragged, Rollouts
from rlctl.runtime.rollout.engine import SamplingParams

STOP = 2


def prompts(*lengths: int) -> Ragged:
    generator = torch.Generator().manual_seed(1)
    return Ragged(torch.randint(3, 64, (sum(lengths),), generator=generator), torch.tensor(lengths))


def sampling(**changes: Any) -> SamplingParams:
    settings = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 30,
        "stop_token_ids": (STOP,),
        "seed": 3,
        "n": 3,
    }
    return SamplingParams(**(settings | changes))


def full_forward(
    policy: PreTrainedModel, prompt: Tensor, response: Tensor, temperature: float
) -> Tensor:
    """Return log-probs (len(response),) computed by transformers."""
    with torch.no_grad():
        logits = policy(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, response[:, None]).squeeze(1)


def echoed(prompts: Prompts) -> Rollouts:
    """Return the prompts as responses to themselves."""
    ids = prompts.prompt_ids
    ones = ids.like(torch.ones(len(ids.values)))
    return prompts.grow(
        Rollouts,
        response_ids=ids,
        response_mask=ones,
        rollout_log_probs=ones,
        finish=["stop"] * len(prompts),
    )
