"""Prompts and settings of generation, responses, and the log-probs that it should report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlctl.recipes.compose import compose
from rlctl.runtime.base.batch import Prompts, Ragged, Rollouts
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.rollout.engine import EngineSpec, Responses, RolloutEngine, SamplingParams
from rlctl.runtime.rollout.requests import Completion, Decoding, Request, next_key
from tests.tolerance import assert_as_exact, in_float64

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
    found = full_log_probs(policy, prompt, response, temperature)
    return found.gather(1, response[:, None]).squeeze(1)


def recomputed(
    policy: PreTrainedModel, prompt_ids: Ragged, found: Responses, temperature: float = 1.0
) -> Tensor:
    """Return the log-probs (T,) of all responses, which are as many for each prompt."""
    prompts, n = prompt_ids.rows(), len(found.response_ids) // len(prompt_ids)
    rows = enumerate(found.response_ids.rows())
    return torch.cat([full_forward(policy, prompts[i // n], ids, temperature) for i, ids in rows])


def with_kept_cache(
    old: PreTrainedModel, new: PreTrainedModel, prompt: Tensor, response: Tensor, num_old: int
) -> Tensor:
    """Return log-probs of the tokens from `num_old` on: `new` reads the keys and values of `old`.

    The last of the old tokens was sampled, but not yet computed.
    """
    with torch.no_grad():
        context = torch.cat([prompt, response[: num_old - 1]])
        cache = old(context[None], use_cache=True).past_key_values
        rest = response[num_old - 1 : -1]
        logits = new(rest[None], past_key_values=cache, use_cache=True).logits[0]
    return logits.log_softmax(-1).gather(1, response[num_old:, None]).squeeze(1)


def references(
    policy: PreTrainedModel, prompt_ids: Ragged, found: Responses, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return `recomputed` in float32 and in float64, for `assert_as_exact`."""
    second = recomputed(policy, prompt_ids, found, temperature)
    return second, recomputed(in_float64(policy), prompt_ids, found, temperature)


@torch.no_grad()
def exact_log_probs(policy: PreTrainedModel, batch: Rollouts, temperature: float = 1.0) -> Tensor:
    """Return the log-probs (T,) of all responses in float64."""
    sequences = Sequences.from_ragged(batch.prompt_ids, batch.response_ids)
    return PolicyModel(in_float64(policy), temperature)(sequences).log_probs


def full_log_probs(
    policy: PreTrainedModel, prompt: Tensor, response: Tensor, temperature: float
) -> Tensor:
    """Return log-probs of all tokens (len(response), V) computed by transformers."""
    with torch.no_grad():
        logits = policy(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def assert_most_probable(
    policy: PreTrainedModel, engine: RolloutEngine, temperature: float, atol: float | None = None
) -> None:
    """Ask for the 3, 0 and 20 most probable tokens, and compare them with those of `policy`.

    `atol` is for engines whose own kernels are less exact than transformers in float32.
    """
    exact_policy = in_float64(policy)
    decoding = Decoding(temperature, 0.9, 9, ())
    asked = {
        key: Request(key, ids, decoding, (6, 4), (1, 2), num_top=num_top)
        for ids, num_top in zip(prompts(9, 1, 40).rows(), (3, 0, 20), strict=True)
        for key in (next_key(),)
    }
    engine.submit([*asked.values()])
    done: list[Completion] = []
    while engine.num_open:
        done += engine.step()
    assert len(done) == 6
    for found in done:
        request = asked[found.key]
        if not request.num_top:
            assert found.top == ()
            continue
        expected, exact = (
            full_log_probs(model, request.context_ids, found.response_ids, temperature or 1.0)
            for model in (policy, exact_policy)
        )
        ids, numbers = (torch.tensor(part) for part in zip(*map(_columns, found.top), strict=True))
        assert ids.shape == (len(found.response_ids), request.num_top)
        best, exact_best = (each.topk(request.num_top).values for each in (expected, exact))
        if atol is None:
            assert_as_exact(numbers, expected.gather(1, ids), exact.gather(1, ids))
            assert_as_exact(numbers, best, exact_best)
        else:
            torch.testing.assert_close(expected.gather(1, ids), numbers, atol=atol, rtol=0)
            torch.testing.assert_close(numbers, best, atol=atol, rtol=0)


def _columns(top: tuple[tuple[int, float], ...]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    ids, numbers = zip(*top, strict=True)
    return ids, numbers


def respond(prompts: Prompts, rows: Ragged | Sequence[Sequence[int]], **fields: Any) -> Rollouts:
    """Return responses of these tokens; mask and log-probs are ones if `fields` lacks them."""
    ids = rows if isinstance(rows, Ragged) else Ragged.from_rows(rows, torch.int64)
    ones = ids.like(torch.ones(len(ids.values)))
    given = {"response_mask": ones, "rollout_log_probs": ones, "finish": ["stop"] * len(prompts)}
    return prompts.grow(Rollouts, response_ids=ids, **(given | fields))
