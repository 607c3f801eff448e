"""Pair losses against the papers' formulas in plain Python, and their gradient by coefficients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.episodes import Episode
from rlctl.errors import ConfigError
from rlctl.plugins import parse_params
from rlctl.plugins.objectives.dpo import OnlineDPO, OnlineDPOParams
from rlctl.plugins.objectives.pair_losses import PairParams, pair_loss, pair_rows
from rlctl.plugins.objectives.raft import RAFT, RaftParams
from rlctl.recipes.schema.algorithm import PFPPO
from rlctl.runtime.algorithms.base import group_batches, mini_batch_rows
from rlctl.runtime.algorithms.policy_filtration import draw_rows
from rlctl.runtime.base.batch import Ragged, Scored
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.sequences import Sequences
from tests.configs import configured
from tests.models import tiny_model
from tests.numerics.batches import scored_batch

PARAMS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3},
    "cdpo": {"beta": 0.3, "label_smoothing": 0.2},
    "ipo": {"loss": "ipo", "beta": 0.4},
    "simpo": {"loss": "simpo", "beta": 2.0, "margin": 0.7},
}
PAIRS = [[0, 1], [3, 2], [0, 2]]  # row 0 is in two pairs
MASK = [1, 1, 0, 1, 1, 1, 1, 0, 1]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def formula(name: str, d: float) -> tuple[float, float]:
    """Return loss and derivative by d = h_w − h_l, as the papers give them."""
    match name:
        case "dpo":  # arXiv 2305.18290, equation 7 and the gradient below it
            return -math.log(sigmoid(0.3 * d)), -0.3 * sigmoid(-0.3 * d)
        case "cdpo":  # Mitchell 2023: (1 − ε)·L(d) + ε·L(−d)
            value = -0.8 * math.log(sigmoid(0.3 * d)) - 0.2 * math.log(sigmoid(-0.3 * d))
            return value, 0.3 * (sigmoid(0.3 * d) - 0.8)
        case "ipo":  # arXiv 2310.12036, equation 17 with τ = β
            return (d - 0.5 / 0.4) ** 2, 2 * (d - 0.5 / 0.4)
        case _:  # SimPO, arXiv 2405.14734, equation 6
            return -math.log(sigmoid(2.0 * d - 0.7)), -2.0 * sigmoid(-(2.0 * d - 0.7))


def batch() -> tuple[Scored, Ragged, Ragged]:
    """Return four rows with masked tokens, and log-probs of policy and reference."""
    rng = torch.Generator().manual_seed(2)
    scored = scored_batch()
    mask = scored.response_mask.like(torch.tensor(MASK, dtype=torch.float32))
    scored = Scored(**{**vars(scored), "response_mask": mask})
    now, ref = (mask.like(-3 * torch.rand(len(MASK), generator=rng)) for _ in range(2))
    return scored, now, ref


@pytest.mark.parametrize("name", PARAMS)
def test_losses_and_coefficients_equal_an_independent_loop(name: str) -> None:
    params, (scored, now, ref) = PairParams(**PARAMS[name]), batch()
    rows, metrics = pair_rows(
        scored, now, ref if params.uses_reference else None, torch.tensor(PAIRS), params
    )
    h, lengths = [], []
    for lp, base, mask in zip(now.rows(), ref.rows(), scored.response_mask.rows(), strict=True):
        kept = [
            (a, b) for a, b, m in zip(lp.tolist(), base.tolist(), mask.tolist(), strict=True) if m
        ]
        simpo = name == "simpo"
        lengths.append(len(kept) if simpo else 1)
        h.append(sum(a for a, _ in kept) / len(kept) if simpo else sum(a - b for a, b in kept))
    total, slopes = 0.0, [0.0] * 4
    for chosen, rejected in PAIRS:
        value, slope = formula(name, h[chosen] - h[rejected])
        total += value
        slopes[chosen] += slope / lengths[chosen]
        slopes[rejected] -= slope / lengths[rejected]
    assert rows.coefficients.tolist() == pytest.approx(slopes, abs=1e-6)
    assert rows.counts.tolist() == [1.0, 0.5, 1.0, 0.5]
    loss = pair_loss(now.values, rows)
    assert float(loss.total) == pytest.approx(total, abs=1e-5)
    assert loss.count == 3
    assert loss.metrics["train/loss"].value == pytest.approx(total / 3, abs=1e-5)
    shown = {key: value.value for key, value in metrics.items()}
    beta = params.beta
    assert shown["pairs/loss"] == pytest.approx(total / 3, abs=1e-6)
    gaps = [h[chosen] - h[rejected] for chosen, rejected in PAIRS]
    assert shown["pairs/margin"] == pytest.approx(beta * sum(gaps) / 3, abs=1e-6)
    assert shown["pairs/accuracy"] == pytest.approx(sum(gap > 0 for gap in gaps) / 3)
    chosen_rewards = [beta * h[chosen] for chosen, _ in PAIRS]
    assert shown["pairs/reward_chosen"] == pytest.approx(sum(chosen_rewards) / 3, abs=1e-6)


@pytest.mark.parametrize("name", PARAMS)
def test_coefficients_give_the_gradient_of_the_loss(name: str) -> None:
    """Compare with autograd through the model and the pair loss, one response at a time."""
    params, (scored, _, ref) = PairParams(**PARAMS[name]), batch()
    model = PolicyModel(tiny_model().double(), temperature=0.8)
    weights = list(model.parameters())
    mask, reference = scored.response_mask, ref if params.uses_reference else None

    def log_probs(prompt_ids: Ragged, response_ids: Ragged) -> Tensor:
        return model(Sequences.from_ragged(prompt_ids, response_ids), with_entropy=False).log_probs

    with torch.no_grad():
        now = mask.like(log_probs(scored.prompt_ids, scored.response_ids))
    rows, _ = pair_rows(scored, now, reference, torch.tensor(PAIRS), params)
    packed = log_probs(scored.prompt_ids, scored.response_ids)
    total = pair_loss(packed, rows).total
    gradient = torch.autograd.grad(total, weights)
    h = []
    for row in range(4):
        one = torch.tensor([row])
        own = log_probs(scored.prompt_ids.select(one), scored.response_ids.select(one))
        kept = mask.rows()[row] > 0
        own = own[kept] if reference is None else (own - reference.rows()[row])[kept]
        h.append(own.mean() if name == "simpo" else own.sum())
    index, whole = torch.tensor(PAIRS), torch.stack(h)
    losses = params.losses(whole[index[:, 0]], whole[index[:, 1]])

    def flat(gradient: Sequence[Tensor]) -> Tensor:
        return torch.cat([each.flatten() for each in gradient])

    def derived(value: Tensor) -> Tensor:
        return flat(torch.autograd.grad(value, weights, retain_graph=True))

    (slopes,) = torch.autograd.grad(losses.sum(), whole, retain_graph=True)
    parts = [slope.abs() * derived(each).norm() for slope, each in zip(slopes, h, strict=True)]
    expected = derived(losses.sum())
    assert total.item() == pytest.approx(losses.sum().item(), abs=1e-5)
    assert expected.norm() > 1e-2
    # The model computes in float64, and each row's coefficient is rounded to float32.
    rounding = 2 * torch.finfo(torch.float32).eps * float(sum(parts))
    assert (flat(gradient) - expected).norm() <= rounding


def test_no_pair_gives_a_loss_without_count() -> None:
    scored, now, ref = batch()
    none = torch.empty(0, 2, dtype=torch.int64)
    rows, metrics = pair_rows(scored, now, ref, none, PairParams())
    loss = pair_loss(now.values, rows)
    assert (float(loss.total), loss.count) == (0.0, 0.0)
    assert {key: value.value for key, value in metrics.items()} == {"pairs/count": 0.0}


@pytest.mark.parametrize("name", ["dpo", "simpo"])
def test_a_pair_of_episodes_has_all_of_their_rows(name: str) -> None:
    """Rows 0 and 2 are one episode: its value is that of both rows, joined."""
    params, (scored, now, ref) = PairParams(**PARAMS[name]), batch()
    first, second, third = Episode("done"), Episode("done"), Episode("done")
    scored = replace(scored, episodes=[first, second, first, third])
    reference = ref if params.uses_reference else None
    rows, _ = pair_rows(scored, now, reference, torch.tensor([[0, 1], [3, 0]]), params)
    x = torch.tensor([0, 0, 0, 1, 1, 0, 2, 2, 2])  # episode of each token
    values = now.values.clone().requires_grad_()
    each = values if reference is None else values - ref.values
    mask = scored.response_mask.values
    h = torch.stack([(each * mask)[x == number].sum() for number in range(3)])
    if name == "simpo":
        h = h / torch.stack([mask[x == number].sum() for number in range(3)])
    total = params.losses(h[[0, 2]], h[[1, 0]]).sum()
    (expected,) = torch.autograd.grad(total, values)
    leaf = now.values.clone().requires_grad_()
    loss = pair_loss(leaf, rows)
    (found,) = torch.autograd.grad(loss.total, leaf)
    assert loss.total.item() == pytest.approx(total.item(), abs=1e-5)
    assert torch.allclose(found, expected, atol=1e-6)
    assert loss.count == 2


def online_dpo(kind: str) -> OnlineDPO:
    config = configured("online_dpo", (), ())
    return OnlineDPO.from_config(config, 10, OnlineDPOParams.model_validate({"pairs": kind}))


def make_pairs(kind: str, scores: list[float], group: list[int], step: int = 1) -> list[list[int]]:
    return online_dpo(kind)._pairs(named(scores, group), step).tolist()


def test_pairs_have_different_scores_and_one_prompt() -> None:
    scores, group = [0.0, 1.0, 0.5, 1.0, 1.0, 0.0, 2.0], [0, 0, 0, 1, 1, 2, 2]
    assert make_pairs("best_worst", scores, group) == [[1, 0], [6, 5]]
    assert make_pairs("all", scores, group) == [[1, 0], [1, 2], [2, 0], [6, 5]]
    drawn = [make_pairs("random", scores, group, step) for step in range(1, 30)]
    assert all(len(pairs) == 2 and pairs[1] == [6, 5] for pairs in drawn)
    assert {tuple(pairs[0]) for pairs in drawn} == {(1, 0), (1, 2), (2, 0)}
    assert make_pairs("random", scores, group, 7) == drawn[6]
    assert make_pairs("all", [1.0, 1.0], [0, 0]) == []


def named(scores: list[float], group: list[int], episode: list[int] | None = None) -> Any:
    """Return a stand-in for scored rows; without `episode` each is one."""
    own = torch.arange(len(scores)) if episode is None else torch.tensor(episode)
    return SimpleNamespace(
        scores=torch.tensor(scores), group=torch.tensor(group), episode_of_row=own
    )


def test_rows_of_an_episode_are_ranked_once() -> None:
    """The best episode of a prompt has two rows, and rows of one episode are no pair."""
    scored = named([1.0, 0.0, 1.0, 0.5], [0, 0, 0, 0], [0, 1, 0, 2])
    raft = RAFT.from_config(configured("raft", (), ()), 10, RaftParams(top_k=1))
    assert raft.kept(scored).tolist() == [True, False, True, False]
    assert online_dpo("all")._pairs(scored, 1).tolist() == [[0, 1], [0, 3], [3, 1]]


def test_rejection_keeps_the_best_of_each_prompt_above_the_threshold() -> None:
    scored = named([0.0, 1.0, 1.0, 0.3, 0.2, 0.1], [4, 4, 4, 2, 2, 2])
    config = configured("raft", (), ())

    def kept(**params: Any) -> list[int]:
        algorithm = RAFT.from_config(config, 10, RaftParams.model_validate(params))
        return algorithm.kept(scored).nonzero().flatten().tolist()

    assert kept() == [1, 3]
    assert kept(top_k=2) == [1, 2, 3, 4]
    assert kept(top_k=2, threshold=0.25) == [1, 2, 3]
    assert kept(top_k=None, threshold=1.0) == [1, 2]
    assert kept(top_k=None) == [0, 1, 2, 3, 4, 5]


def test_mini_batches_keep_groups_together() -> None:
    group = torch.tensor([0, 0, 3, 3, 5, 5, 6, 6])
    assert [part.tolist() for part in group_batches(group, 3, 1, None)] == [[0, 3, 5, 6]]
    twice = [part.tolist() for part in group_batches(group, 2, 2, seed=3)]
    assert [len(part) for part in twice] == [2, 2, 2, 2]
    assert sorted(twice[0] + twice[1]) == sorted(twice[2] + twice[3]) == [0, 3, 5, 6]
    assert twice == [part.tolist() for part in group_batches(group, 2, 2, seed=3)]


def test_batches_that_lack_rows_are_cut_between_groups() -> None:
    size = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
    actor = configured("grpo", (), [size]).actor_rollout_ref.actor

    def cut(*group: int) -> list[list[int]]:
        batch: Any = SimpleNamespace(group=torch.tensor(group))
        return [part.tolist() for part in mini_batch_rows(batch, 2, actor, 1)]

    full = (0, 0, 1, 1, 2, 2, 3, 3)
    assert cut(*full) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut(0, 0, 1, 1, 2, 2, 3) == [[0, 1, 2, 3], [4, 5, 6]]
    assert cut(0, 0, 1, 2, 2, 3, 3) == [[0, 1, 2], [3, 4, 5, 6]]
    assert cut(0, 0, 1, 1, 4, 4, 4, 5, 6) == [[0, 1, 2, 3, 4, 5, 6], [7, 8]]
    assert cut(0, 0, 1, 1, 2) == [[0, 1, 2, 3, 4]]  # no update by one row alone
    assert cut(3, 3) == [[0, 1]]
    one = actor.model_copy(update={"ppo_mini_batch_size": 4, "shuffle": True})
    nine: Any = SimpleNamespace(group=torch.arange(9))  # two whole mini-batches and one row
    rows = mini_batch_rows(nine, 1, one, 1)
    assert sorted(len(part) for part in rows) == [4, 5]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing is not defined for loss=ipo"),
        ({"margin": 0.5}, "margin is a setting of loss=simpo"),
        ({"beta": 0.0}, "beta of online_dpo should be greater than 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_params(OnlineDPO, "online_dpo", settings, "algorithm.params")


def test_one_response_per_prompt_is_refused() -> None:
    config = configured("online_dpo", (), ["actor_rollout_ref.rollout.n=1"])
    with pytest.raises(ConfigError, match=r"rollout\.n is 1"):
        OnlineDPO.from_config(config, 10, OnlineDPOParams())


SCORES = torch.tensor([0.0, 1.0, -2.0, 1.0, 0.5]).repeat(4000)


def shares(method: str, weight_pow: float = 2.0) -> list[float]:
    """Return how often rows of each of the five kinds are drawn."""
    config = PFPPO(reweight_method=method, weight_pow=weight_pow)  # type: ignore[arg-type]
    drawn = draw_rows(SCORES, config, seed=1)
    assert len(drawn) == len(SCORES)
    assert torch.equal(drawn, draw_rows(SCORES, config, seed=1))
    return (torch.bincount(drawn % 5, minlength=5) / len(drawn)).tolist()


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("pow", [0.0, 1.0, 4.0, 1.0, 0.25]),
        ("max_min", [0.0, 1.0, 1.0, 1.0, 0.0]),
        ("max_random", [0.1, 0.4, 0.1, 0.4, 0.1]),
    ],
)
def test_rows_are_drawn_in_proportion_to_their_weights(method: str, weights: list[float]) -> None:
    expected = [weight / sum(weights) for weight in weights]
    assert shares(method) == pytest.approx(expected, abs=0.015)


def test_equal_scores_of_0_are_all_drawn() -> None:
    config = PFPPO(reweight_method="pow", weight_pow=2.0)
    assert len(draw_rows(torch.zeros(50), config, seed=3).unique()) > 20
