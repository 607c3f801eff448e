"""Prompts and settings of generation, responses, and the log-probs that it should report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.recipes.compose import compose
from rlctl.runtime.batch import Prompts, Ragged, Rollouts
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.engine import EngineSpec, SamplingParams

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


def engine_spec(
    folder: Path, *overrides: str, timeout_s: float = 60.0, max_length: int = 64
) -> EngineSpec:
    """Return the spec of an engine for the model in `folder`, in float32 on a CPU."""
    words = [f"actor_rollout_ref.model.path={folder}", *overrides]
    config = compose("grpo", words).config.actor_rollout_ref
    rank_info = RankInfo(0, 1, "cpu", 1, timeout_s, False, None)
    return EngineSpec(config.model, config.rollout, torch.float32, rank_info, max_length, seed=0)


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
