"""Advantage estimators: their inputs, what they declare, and how they are loaded.

An estimator is a function `(inputs, config) -> (advantages, returns)`, or
`(inputs, config, params) -> …` if it has settings. Both results are (B, R). It is found
by an entry point of the group `rlctl.advantages` or as `module:function`. Names and definitions
are verl's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from rlctl import plugins
from rlctl.errors import InternalError
from rlctl.plugins.result_check import check_result
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base.ops import EPS, first_rows, group_stats, group_sum, masked_whiten
from rlctl.runtime.base.roles import Total

if TYPE_CHECKING:
    from rlctl.recipes.schema import Algorithm

# Keeps the advantages of a group of equal scores at 0 instead of 0/0. verl adds the same number.
STD_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """A global batch: B rows, right-padded to R response tokens."""

    rewards: Tensor  # (B, R) float, 0 on padding
    mask: Tensor  # (B, R) float, 1 on tokens that the policy wrote
    group: Tensor  # (B,) int64, the prompt of each row
    values: Tensor | None = None  # (B, R)
    greedy_scores: Tensor | None = None  # (B,) score of a greedy response to the row's prompt
    components: dict[str, Tensor] = field(default_factory=dict)  # name -> (B,)
    log_probs: Tensor | None = None  # (B, R) under the policy that wrote the responses
    sum_pi_squared: Tensor | None = None  # (B, R)
    turn: Tensor | None = None  # (B, R) int64: turn of each token, from 0; None without episodes
    # (B,) int64: number of each row's episode, from 0; None: every row is an episode.
    episode: Tensor | None = None
    # Sums numbers (N,) over the parts of a divided batch; None: these are all rows.
    total: Total | None = None

    @property
    def scores(self) -> Tensor:
        """Σ_t r_t, averaged over the rows of an episode: (B,)."""
        rows = self.rewards.sum(-1)
        if self.episode is None:
            return rows
        total = group_sum(rows.double(), self.episode, len(rows))
        num_rows = torch.bincount(self.episode)
        return (total[self.episode] / num_rows[self.episode]).to(rows.dtype)

    @property
    def counted(self) -> Tensor:
        """Mask (B,) of the rows that count in a comparison of scores: the first of each episode."""
        if self.episode is None:
            return torch.ones_like(self.group, dtype=torch.bool)
        return first_rows(self.episode)

    def whitened(self, x: Tensor) -> Tensor:
        """Return `x` (B, R) less its mean, over its deviation, on the tokens of the whole batch.

        See `masked_whiten`. The moments of a divided batch are summed in float64.
        """
        if self.total is None:
            return masked_whiten(x, self.mask)
        exact = torch.where(self.mask > 0, x, 0.0).double()
        num_tokens, sum_x = self.total(torch.stack([self.mask.sum().double(), exact.sum()]))
        mean = sum_x / num_tokens.clamp(min=1)
        squares = (exact - mean).square() * self.mask
        (sum_squares,) = self.total(squares.sum()[None])
        if num_tokens <= 1:
            return x - mean.to(x)
        scale = torch.rsqrt(sum_squares / (num_tokens - 1) + EPS)
        return (x - mean.to(x)) * scale.to(x)

    def given(self, name: str) -> Tensor:
        """Return an optional field, (B,) or (B, R). Raises InternalError for an undeclared need."""
        value = getattr(self, name)
        if value is None:
            raise InternalError(f"the advantage estimator was called without {name}")
        return value


@dataclass(frozen=True)
class AdvantageConfig:
    """The keys of `algorithm` that several estimators use."""

    gamma: float  # discount per token
    lam: float  # λ of GAE
    norm_by_std: bool  # divide by the group's standard deviation (GRPO) or not (Dr.GRPO)

    @classmethod
    def from_config(cls, config: Algorithm) -> Self:
        """Build from the config section `algorithm`."""
        return cls(config.gamma, config.lam, config.norm_adv_by_std_in_grpo)


KEYS = {
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "norm_by_std": "algorithm.norm_adv_by_std_in_grpo",
}
EstimatorFunction = Callable[..., tuple[Tensor, Tensor]]
F = TypeVar("F", bound=EstimatorFunction)


@dataclass(frozen=True)
class Estimator:
    """Advantage estimator with its settings. Calling it returns advantages and returns (B, R)."""

    function: EstimatorFunction
    params: plugins.Params | None = None

    @property
    def needs(self) -> Needs:
        """Requirements that the function declares with `@estimator`; none by default."""
        return getattr(self.function, "needs", Needs.NOTHING)

    @property
    def by_group(self) -> bool:
        """True if the function declares that it may get a part of the batch."""
        return getattr(self.function, "by_group", False)

    def __call__(self, inputs: AdvantageInputs, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
        """Return advantages and returns, (B, R) each."""
        more = () if self.params is None else (self.params,)
        result = self.function(inputs, config, *more)
        is_pair = isinstance(result, tuple) and len(result) == 2
        shape = inputs.rewards.shape
        is_right = is_pair and all(getattr(part, "shape", None) == shape for part in result)
        expected = f"advantages and returns, tensors of {tuple(shape)}"
        check_result(self.function, is_right, result, expected)
        return result


def estimator(
    needs: Needs = Needs.NOTHING,
    params: type[plugins.Params] | None = None,
    by_group: bool = False,
    uses: Sequence[str] | None = None,
) -> Callable[[F], F]:
    """Declare what an estimator needs and the class of its settings.

    `by_group`: rows depend on others of their group alone, except through `inputs.whitened`. Such
    an estimator runs on the workers, each with some groups of the batch, perhaps none. `uses` are
    the fields of its `AdvantageConfig` that it reads; None = all. The others are reported.
    """
    unused = () if uses is None else [key for name, key in KEYS.items() if name not in uses]
    return plugins.declare(needs=needs, Params=params, by_group=by_group, unused_keys=unused)


def load_estimator(name: str, settings: Mapping[str, Any]) -> Estimator:
    """Load an estimator by name or `module:function` and validate its settings.

    Raises ConfigError for an unknown name or wrong settings.
    """
    function = plugins.load("advantages", name)
    params = plugins.parse_params(function, name, settings, "algorithm.adv_estimator_params")
    return Estimator(function, params)


def on_tokens(row_advantages: Tensor, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Copy one number per row (B,) to its unmasked tokens: advantages and returns, (B, R) each."""
    advantages = row_advantages[:, None] * inputs.mask  # (B, R)
    return advantages, advantages


def normalised(
    scores: Tensor, group: Tensor, by_std: bool, counted: Tensor | None = None
) -> Tensor:
    """Return s − μ_g, divided by σ_g + 1e-6 if `by_std`. All tensors: (B,).

    σ_g is the unbiased standard deviation. A group of one has μ = 0 and σ = 1. Rows that are not
    `counted` have no part in μ and σ.
    """
    stats = group_stats(scores, group, counted)
    centred = scores - stats.mean
    return centred / (stats.std + STD_EPS) if by_std else centred


def reward_to_go(inputs: AdvantageInputs) -> Tensor:
    """Return the undiscounted sum of the rewards from each token on, Σ_{t' ≥ t} r·m: (B, R)."""
    return (inputs.rewards * inputs.mask).flip(-1).cumsum(-1).flip(-1)
