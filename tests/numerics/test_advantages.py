"""Advantage estimators against verl's golden numbers and against loops in plain Python."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from rlctl.errors import ConfigError, InternalError
from rlctl.plugins import names
from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    Estimator,
    load_estimator,
)
from rlctl.runtime.algorithms.base import Needs
from rlctl.runtime.base.ops import lowest_if_missing
from tests.numerics.advantage_loops import LOOPS, SETTINGS, Table, gae_sums
from tests.numerics.batches import golden_rows, random_rows
from tests.plugin_folders import is_there, of_plugins

PLAIN = AdvantageConfig(gamma=1.0, lam=1.0, norm_by_std=True)
ESTIMATORS = names("advantages")


def get_estimator(name: str, **settings: object) -> Estimator:
    return load_estimator(name, settings)


# Computed with verl 0.9.1 on `golden_rows`: advantages (and returns) at all positions.
GOLDEN: dict[str, tuple[AdvantageConfig, Table]] = {
    "gae": (
        PLAIN,
        [
            [-0.130984, -0.261968, -0.392953, -1.309842],
            [-1.309842, -1.178858, -1.309842, -1.309842],
            [1.309842, 1.047874, 1.047874, 0.916890],
        ],
    ),
    "grpo": (
        PLAIN,
        [[0.707105] * 3 + [0], [-0.707105] * 2 + [0, 0], [1.999998, 0, 1.999998, 1.999998]],
    ),
    "rloo": (PLAIN, [[0.5] * 3 + [0], [-0.5] * 2 + [0, 0], [2, 0, 2, 2]]),
    "opo": (PLAIN, [[0.2] * 3 + [0], [-0.3] * 2 + [0, 0], [2, 0, 2, 2]]),
    "gpg": (PLAIN, [[0.25] * 3 + [0], [-0.25] * 2 + [0, 0], [2, 0, 2, 2]]),
    "reinforce_plus_plus_baseline": (
        PLAIN,
        [[-0.515659] * 3 + [0], [-1.000985] * 2 + [0, 0], [1.182983, 0, 1.182983, 1.182983]],
    ),
    "remax": (PLAIN, [[0.5, 0.5, 0.5, 0], [0.5, 0.5, 0, 0], [1, 2, 1, 1]]),
}


@pytest.mark.parametrize("name", of_plugins("advantages", GOLDEN))
def test_golden(name: str) -> None:
    params, expected = GOLDEN[name]
    advantages, _ = get_estimator(name)(golden_rows(), params)
    torch.testing.assert_close(
        advantages, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=2e-6
    )


def test_golden_returns_and_discounts() -> None:
    _, returns = get_estimator("gae")(golden_rows(), PLAIN)
    torch.testing.assert_close(
        returns, torch.tensor([[1, 1, 1, 0.4], [0.5, 0.5, 0.3, 0.2], [2, 1.9, 2, 2]])
    )
    advantages, returns = get_estimator("gae")(
        golden_rows(), AdvantageConfig(gamma=0.99, lam=0.95, norm_by_std=True)
    )
    assert advantages[0].tolist() == pytest.approx(
        [-0.187611, -0.261663, -0.338916, -1.315917], abs=2e-6
    )
    assert returns[0].tolist() == pytest.approx([0.908407, 0.955350, 1, 0.4], abs=2e-6)
    advantages, _ = get_estimator("grpo")(golden_rows(), replace(PLAIN, norm_by_std=False))
    assert advantages[:, 0].tolist() == [0.25, -0.25, 2.0]


@pytest.mark.plugin("objectives")
def test_golden_returns_of_reinforce_plus_plus() -> None:
    advantages, returns = get_estimator("reinforce_plus_plus")(
        golden_rows(), AdvantageConfig(gamma=0.9, lam=1.0, norm_by_std=True)
    )
    assert advantages[0].tolist() == pytest.approx([-0.546326, -0.395036, -0.226935, 0], abs=2e-6)
    assert advantages[2].tolist() == pytest.approx([0.815286, 0, 1.117867, 1.454068], abs=2e-6)
    assert returns[2].tolist() == pytest.approx([1.62, 0, 1.8, 2])


def test_gae_ignores_rewards_and_values_of_masked_tokens() -> None:
    rows = random_rows(3)
    noise = (1 - rows.mask) * 1e3 * torch.randn_like(rows.mask)
    noisy = AdvantageInputs(
        rows.rewards + noise, rows.mask, rows.group, rows.given("values") + noise
    )
    expected, got = (
        get_estimator("gae")(each, AdvantageConfig(0.9, 0.8, True)) for each in (rows, noisy)
    )
    keep = rows.mask > 0
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a[keep], b[keep])


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("norm_by_std", [True, False])
def test_estimator_equals_an_independent_loop(name: str, seed: int, norm_by_std: bool) -> None:
    """Compare on ragged rows with tool output. A new estimator needs a loop in `LOOPS`."""
    # The first six rows have no group of one, which pass@k refuses.
    rows = random_rows(seed, rows=6 if name == "grpo_passk" else 9)
    config = AdvantageConfig(gamma=0.9, lam=0.8, norm_by_std=norm_by_std)
    advantages, returns = load_estimator(name, SETTINGS.get(name, {}))(rows, config)
    expected = torch.tensor(LOOPS[name](rows, config))
    keep = rows.mask > 0
    torch.testing.assert_close(advantages[keep], expected[keep], rtol=2e-5, atol=2e-5)
    assert returns.shape == advantages.shape == rows.mask.shape
    if name not in ("gae", "vapo", "remax"):  # these do not zero masked entries, as in verl
        assert torch.equal(advantages[~keep], torch.zeros_like(advantages[~keep]))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_needs_are_declared(name: str) -> None:
    """Run an estimator with its declared inputs only; without them it must raise."""
    needs, rows = get_estimator(name).needs, random_rows(0, rows=6)
    only = AdvantageInputs(
        rows.rewards,
        rows.mask,
        rows.group,
        values=rows.values if Needs.CRITIC in needs else None,
        greedy_scores=rows.greedy_scores if Needs.GREEDY_BASELINE in needs else None,
        components=rows.components if Needs.COMPONENTS in needs else {},
        log_probs=rows.log_probs if Needs.SUM_PI_SQUARED in needs else None,
        sum_pi_squared=rows.sum_pi_squared if Needs.SUM_PI_SQUARED in needs else None,
    )
    assert bool(torch.isfinite(get_estimator(name)(only, PLAIN)[0]).all())
    if needs & (Needs.CRITIC | Needs.GREEDY_BASELINE | Needs.SUM_PI_SQUARED):
        with pytest.raises(InternalError, match="without"):
            get_estimator(name)(AdvantageInputs(rows.rewards, rows.mask, rows.group), PLAIN)


def test_verls_other_names_are_accepted_and_not_listed() -> None:
    config = ["data.train_files=[t]", "actor_rollout_ref.model.path=m"]
    aliases = names("other_names.advantages")
    others = ["rloo_vectorized"] if is_there("objectives") else []
    assert aliases == ["grpo_vectorized", *others]
    for alias in aliases:
        name = alias.removesuffix("_vectorized")
        assert alias not in ESTIMATORS
        assert get_estimator(alias) == get_estimator(name)
        given = f"algorithm.adv_estimator={alias}"
        assert compose("grpo_trainer", [*config, given]).config.algorithm.adv_estimator == alias
        with pytest.raises(ConfigError, match=f"{alias} has no settings, given: a"):
            compose("grpo_trainer", [*config, given, "+algorithm.adv_estimator_params.a=1"])


@pytest.mark.plugin("objectives")
def test_tokens_of_tools_are_no_positions() -> None:
    """Without them both token baselines are equal; rows of the same text are equal with them."""
    rows = random_rows(4)
    whole = replace(rows, mask=(rows.mask > -1).float())
    otb, tir = get_estimator("optimal_token_baseline"), get_estimator("tir_optimal_token_baseline")
    torch.testing.assert_close(tir(whole, PLAIN)[0], otb(whole, PLAIN)[0])
    assert not torch.allclose(tir(rows, PLAIN)[0], otb(rows, PLAIN)[0])


@pytest.mark.plugin("objectives")
def test_vapos_returns_have_a_lambda_of_their_own() -> None:
    rows = random_rows(5)
    config = AdvantageConfig(gamma=0.9, lam=0.1, norm_by_std=True)
    _, returns = get_estimator("vapo", alpha=0.4, critic_lambda=0.95)(rows, config)
    expected = torch.tensor(gae_sums(rows, 0.9, lambda _: 0.95)) + rows.given("values")
    torch.testing.assert_close(returns[rows.mask > 0], expected[rows.mask > 0])


def test_inputs_that_an_estimator_cannot_use_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two responses"):
        get_estimator("grpo_passk")(golden_rows(), PLAIN)


@pytest.mark.plugin("objectives")
def test_components_that_gdpo_cannot_use_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"helpful.*correct, format"):
        get_estimator("gdpo", reward_keys=["helpful"])(random_rows(0), PLAIN)
    with pytest.raises(ConfigError, match="2 weights for 1 reward_keys") as caught:
        get_estimator("gdpo", reward_keys=["a"], reward_weights=[1, 2])
    assert caught.value.problems[0].where == "algorithm.adv_estimator_params"


@pytest.mark.plugin("objectives")
def test_gdpo_leaves_out_components_without_a_weight() -> None:
    rows = random_rows(0)
    alone = replace(rows, components={"correct": rows.components["correct"]})
    chosen = get_estimator("gdpo", reward_keys=["correct"])(rows, PLAIN)
    assert torch.equal(chosen[0], get_estimator("gdpo")(alone, PLAIN)[0])
    assert not torch.equal(chosen[0], get_estimator("gdpo")(rows, PLAIN)[0])


def my_estimator(
    inputs: AdvantageInputs, config: AdvantageConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rewards: an estimator outside of rlctl."""
    return inputs.rewards * config.gamma, inputs.rewards


def test_estimators_are_found_and_pickled_by_name() -> None:
    estimator = get_estimator("tests.numerics.test_advantages:my_estimator")
    assert estimator.needs == Needs.NOTHING
    assert torch.equal(estimator(golden_rows(), PLAIN)[0], golden_rows().rewards)
    assert get_estimator("rlctl.runtime.algorithms.advantages.gae:gae").needs == Needs.CRITIC
    passk = get_estimator("grpo_passk")
    assert pickle.loads(pickle.dumps(passk)) == passk
    with pytest.raises(ConfigError, match=r"'gropo'(?s:.*)did you mean 'grpo'") as caught:
        get_estimator("gropo")
    assert ", ".join(ESTIMATORS) in str(caught.value)


@pytest.mark.plugin("objectives")
def test_an_estimator_with_settings_is_pickled() -> None:
    gdpo = get_estimator("gdpo", reward_keys=["a"])
    assert pickle.loads(pickle.dumps(gdpo)) == gdpo


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_batch_without_tokens_to_learn_from_is_no_error(name: str, num_tokens: int) -> None:
    """Rollout correction may reject all tokens but one: the update is then skipped."""
    mask = torch.zeros(4, 3)
    mask[0, :num_tokens] = 1
    ones = torch.ones(4, 3)
    inputs = AdvantageInputs(
        rewards=ones,
        mask=mask,
        group=torch.tensor([0, 0, 1, 1]),
        values=ones,
        greedy_scores=torch.ones(4),
        components={"a": torch.rand(4)},
        log_probs=-ones,
        sum_pi_squared=ones,
        turn=torch.zeros(4, 3, dtype=torch.int64),
        total=lambda numbers: numbers,
    )
    for given in (inputs, replace(inputs, total=None)):
        advantages, returns = get_estimator(name)(given, PLAIN)
        assert advantages[mask > 0].isfinite().all()
        assert returns[mask > 0].isfinite().all()


@pytest.mark.parametrize(
    "name",
    of_plugins(
        "advantages",
        ("grpo", "grpo_passk", "rloo", "gpg", "gdpo", "reinforce_plus_plus_baseline"),
    ),
)
def test_an_episode_with_several_rows_counts_once(name: str) -> None:
    """Rows 0 and 3 are one episode, as of an agent that forked: they share its advantage."""
    torch.manual_seed(4)
    scores = torch.tensor([1.0, 0.0, 0.25, 1.0, 0.5, 0.0])
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    episode = torch.tensor([0, 1, 2, 0, 3, 4])
    rewards = torch.zeros(6, 3)
    rewards[:, 2] = scores
    ones = torch.ones(6, 3)
    once = [0, 1, 2, 4, 5]
    forked = AdvantageInputs(rewards, ones, group, components={"a": scores}, episode=episode)
    single = AdvantageInputs(rewards[once], ones[once], group[once], components={"a": scores[once]})
    found, _ = get_estimator(name)(forked, PLAIN)
    wanted, _ = get_estimator(name)(single, PLAIN)
    assert torch.equal(found[3], found[0])
    if name in ("gdpo", "reinforce_plus_plus_baseline"):  # whitened over all tokens
        order = wanted[:, 0].argsort()
        assert (found[once, 0][order].diff() >= 0).all()
        return
    torch.testing.assert_close(found[once], wanted)


def test_a_missing_component_is_the_lowest_of_its_group() -> None:
    """With penalties below 0, a failed call counted as 0 would be the best."""
    nan = float("nan")
    values = torch.tensor([-1.0, nan, -0.5, 2.0, nan, nan])
    group = torch.tensor([3, 3, 3, 5, 5, 9])
    filled = lowest_if_missing(values, group)
    assert filled.tolist() == [-1.0, -1.0, -0.5, 2.0, 2.0, 0.0]
