"""What an advantage estimator is: its inputs, its parameters, what it needs, and where it is registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import TYPE_CHECKING

from torch import Tensor

from rlctl.errors import ConfigError, InternalError
from rlctl.runtime.algorithms.registry import Registry

if TYPE_CHECKING:
    from rlctl.recipes.schema import Algorithm


class Need(Flag):
    """What an estimator asks of a run beyond token rewards; checked before anything starts."""

    NOTHING = 0
    VALUES = auto()  # a critic's values
    GREEDY_BASELINE = auto()  # the score of one greedy answer to each prompt
    GROUPS = auto()  # several answers to each prompt
    COMPONENTS = auto()  # the reward's components, apart
    SUM_PI_SQUARED = auto()  # Σ_v π(v)² and log-probs of the actor's forward pass


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """A whole global batch: B rows, right-padded to R response tokens."""

    rewards: Tensor  # (B, R) float, 0 on padding
    mask: Tensor  # (B, R) float, 1 where the policy wrote the token
    group: Tensor  # (B,) int64, the prompt of each row
    values: Tensor | None = None  # (B, R)
    greedy_scores: Tensor | None = None  # (B,) the score of a greedy answer to the row's prompt
    components: dict[str, Tensor] = field(default_factory=dict)  # name -> (B,)
    log_probs: Tensor | None = None  # (B, R) of the policy that wrote the answers
    sum_pi_squared: Tensor | None = None  # (B, R)

    @property
    def scores(self) -> Tensor:
        """Σ_t r_t: (B,)."""
        return self.rewards.sum(-1)

    def given(self, name: str) -> Tensor:
        """The field of that name, where the estimator declared that it needs it."""
        value = getattr(self, name)
        if value is None:
            raise InternalError(f"the advantage estimator was called without {name}")
        return value


@dataclass(frozen=True)
class AdvantageParams:
    """The numbers of `algorithm.*` that estimators use."""

    gamma: float  # discount a token
    lam: float  # λ of GAE
    norm_by_std: bool  # divide by the group's std (GRPO) or not (Dr.GRPO)
    weights: dict[str, float] = field(
        default_factory=dict
    )  # of the reward's components that count; empty: all, 1 each

    @classmethod
    def of(cls, config: Algorithm) -> AdvantageParams:
        """From the section `algorithm`. `ConfigError` for weights without a component each."""
        keys, weights = config.gdpo_reward_keys or (), config.gdpo_reward_weights
        if weights is not None and len(weights) != len(keys):
            raise ConfigError(
                f"{len(weights)} weights for {len(keys)} components of the reward",
                where="algorithm.gdpo_reward_weights",
                hint="name the components in algorithm.gdpo_reward_keys, one for each weight",
            )
        named = dict(zip(keys, weights or (1.0,) * len(keys), strict=True))
        return cls(
            gamma=config.gamma,
            lam=config.lam,
            norm_by_std=config.norm_adv_by_std_in_grpo,
            weights=named,
        )


Compute = Callable[[AdvantageInputs, AdvantageParams], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Estimator:
    """A registered estimator. Calling it gives advantages and returns, (B, R) each."""

    name: str
    needs: Need
    compute: Compute

    def __call__(self, inputs: AdvantageInputs, params: AdvantageParams) -> tuple[Tensor, Tensor]:
        return self.compute(inputs, params)


ESTIMATORS: Registry[Estimator] = Registry("advantage estimator", "algorithm.adv_estimator")


def estimator(name: str, needs: Need = Need.NOTHING) -> Callable[[Compute], Compute]:
    """Register a function as the estimator `name`; it stays the plain function that it is."""

    def register(compute: Compute) -> Compute:
        ESTIMATORS.add(name, Estimator(name, needs, compute))
        return compute

    return register
