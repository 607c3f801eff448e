"""Samplers that learn from scores which prompts to draw, selected by `data.sampler`.

Their draws are a function of the seed, the number of earlier draws and the observed scores, so a
resumed run draws the same prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from rlctl.plugins import Params
from rlctl.runtime.data.samplers import StatefulSampler

_BINS = (0.0, 0.25, 0.5, 0.75, 1.0)  # edges of the difficulty histogram


class ScoreRange(Params):
    """Settings that all samplers of this module share."""

    min_score: float = Field(default=0.0, description="score of a wrong response")
    max_score: float = Field(default=1.0, description="score of a right response")
    decay: float = Field(
        default=0.5, ge=0, lt=1, description="weight of earlier scores of a prompt; 0 = the latest"
    )

    @model_validator(mode="after")
    def _is_a_range(self) -> ScoreRange:
        if self.max_score <= self.min_score:
            raise ValueError("max_score should be larger than min_score")
        return self

    def share_right(self, scores: Sequence[float]) -> Any:
        """Return mean scores (N,) as shares between 0 and 1: (N,)."""
        width = self.max_score - self.min_score
        return np.clip((np.asarray(scores, dtype=np.float64) - self.min_score) / width, 0.0, 1.0)


class CurriculumParams(ScoreRange):
    """Settings of the sampler with a pool of prompts of suitable difficulty."""

    low: float = Field(default=0.05, ge=0, le=1, description="smallest mean score in the pool")
    high: float = Field(default=0.95, ge=0, le=1, description="largest mean score in the pool")
    explore: float = Field(
        default=0.1, ge=0, le=1, description="share of prompts drawn from outside the pool"
    )

    @model_validator(mode="after")
    def _is_a_pool(self) -> CurriculumParams:
        if self.high < self.low:
            raise ValueError("high should not be smaller than low")
        return self


class DifficultyPool(StatefulSampler):
    """Sampler of prompts that are neither solved nor hopeless, and of some others.

    A prompt is in the pool until it has been scored, and while its mean score, with exponentially
    decaying weights, is between `low` and `high`. Prompts drawn least often come first, in random
    order; `explore` of each draw comes from outside the pool, whose difficulty may have changed.
    """

    Params = CurriculumParams

    def __init__(self, num_prompts: int, seed: int, params: CurriculumParams) -> None:
        self.params = params
        self.seed = seed
        self.num_draws = 0
        self.mean = np.full(num_prompts, np.nan)  # (N,) between 0 and 1; nan: not scored yet
        self.drawn = np.zeros(num_prompts, dtype=np.int64)  # (N,)

    def draw(self, count: int, avoid: Collection[int] = ()) -> list[int]:
        rng = np.random.default_rng([self.seed, self.num_draws])
        self.num_draws += 1
        order = np.lexsort((rng.random(len(self.mean)), self.drawn))
        inside = self._in_pool()[order]
        first = order[inside]
        rest = order[~inside]
        num_outside = min(len(rest), round(self.params.explore * count))
        split = max(0, count - num_outside)
        preferred = [*first[:split], *rest[:num_outside], *first[split:], *rest[num_outside:]]
        chosen = first_of(preferred, count, avoid)
        self.drawn[chosen] += 1
        return chosen

    def observe(self, prompts: Sequence[int], scores: Sequence[float]) -> None:
        found = self.params.share_right(scores)
        for prompt, share in zip(prompts, found.tolist(), strict=True):
            before = self.mean[prompt]
            decay = self.params.decay
            if np.isnan(before) or decay == 0:
                self.mean[prompt] = share
            else:
                self.mean[prompt] = decay * before + (1 - decay) * share

    def metrics(self) -> dict[str, float]:
        return {"curriculum/pool_share": float(self._in_pool().mean())} | histogram(self.mean)

    def state_dict(self) -> dict[str, Any]:
        used = np.flatnonzero((self.drawn > 0) | ~np.isnan(self.mean)).tolist()
        mean = [None if np.isnan(self.mean[i]) else float(self.mean[i]) for i in used]
        drawn = self.drawn[used].tolist()
        return {"num_draws": self.num_draws, "prompts": used, "mean": mean, "drawn": drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_draws = state["num_draws"]
        self.mean[:] = np.nan
        self.drawn[:] = 0
        self.mean[state["prompts"]] = np.array(state["mean"], dtype=np.float64)
        self.drawn[state["prompts"]] = state["drawn"]

    def _in_pool(self) -> Any:
        """Return a mask (N,)."""
        low = self.params.low
        high = self.params.high
        return np.isnan(self.mean) | ((self.mean >= low) & (self.mean <= high))


class ThompsonParams(ScoreRange):
    """Settings of Thompson sampling."""

    target: float = Field(
        default=0.5, ge=0, le=1, description="mean score of the prompts that teach most"
    )
    strength: float = Field(
        default=4.0, gt=0, description="observations that the scores of one group count as"
    )


class ThompsonSampler(StatefulSampler):
    """Thompson sampling (Thompson 1933) of prompts whose mean score is near `target`.

    The mean score of each prompt has a Beta posterior, with a uniform prior, whose evidence decays.
    A draw samples a mean from every posterior and takes the prompts that are nearest to `target`.
    """

    Params = ThompsonParams

    def __init__(self, num_prompts: int, seed: int, params: ThompsonParams) -> None:
        self.params = params
        self.seed = seed
        self.num_draws = 0
        self.right = np.zeros(num_prompts)  # (N,) evidence beyond the prior
        self.wrong = np.zeros(num_prompts)  # (N,)

    def draw(self, count: int, avoid: Collection[int] = ()) -> list[int]:
        rng = np.random.default_rng([self.seed, self.num_draws])
        self.num_draws += 1
        means = rng.beta(1 + self.right, 1 + self.wrong)
        order = np.argsort(np.abs(means - self.params.target), kind="stable")
        return first_of(order.tolist(), count, avoid)

    def observe(self, prompts: Sequence[int], scores: Sequence[float]) -> None:
        strength = self.params.strength
        decay = self.params.decay
        for prompt, share in zip(prompts, self.params.share_right(scores).tolist(), strict=True):
            self.right[prompt] = decay * self.right[prompt] + strength * share
            self.wrong[prompt] = decay * self.wrong[prompt] + strength * (1 - share)

    def metrics(self) -> dict[str, float]:
        evidence = self.right + self.wrong
        seen = evidence > 0
        return histogram(np.where(seen, self.right / np.where(seen, evidence, 1.0), np.nan))

    def state_dict(self) -> dict[str, Any]:
        seen = np.flatnonzero(self.right + self.wrong > 0).tolist()
        right = self.right[seen].tolist()
        wrong = self.wrong[seen].tolist()
        return {"num_draws": self.num_draws, "prompts": seen, "right": right, "wrong": wrong}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_draws = state["num_draws"]
        self.right[:] = self.wrong[:] = 0
        self.right[state["prompts"]] = state["right"]
        self.wrong[state["prompts"]] = state["wrong"]


def first_of(preferred: Sequence[Any], count: int, avoid: Collection[int]) -> list[int]:
    """Return the first `count` of `preferred`, those in `avoid` only where the others are fewer."""
    left = [int(row) for row in preferred if row not in avoid][:count]
    if len(left) < count:
        left += [int(row) for row in preferred if row in avoid][: count - len(left)]
    return left


def histogram(means: Any) -> dict[str, float]:
    """Return the shares of prompts by mean score (N,), nan for those that were not scored."""
    seen = means[~np.isnan(means)]
    counts, _ = np.histogram(seen, bins=_BINS)
    shares = {"curriculum/unscored": 1 - len(seen) / max(len(means), 1)}
    for low, high, number in zip(_BINS, _BINS[1:], counts.tolist(), strict=False):
        shares[f"curriculum/mean_{low:g}_to_{high:g}"] = number / max(len(means), 1)
    return shares
