"""Reward model: scores, the Bradley-Terry loss and its gradient, calibration, normalization."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification

from rlctl.errors import ConfigError
from rlctl.plugins.objectives.bradley_terry import BradleyTerryParams, with_coefficients
from rlctl.plugins.objectives.model_reward import Scale
from rlctl.plugins.objectives.reward_worker import RewardLearnerWorker, RewardModelSpec
from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.pair_metrics import calibration_error
from rlctl.runtime.base.batch import Ragged, Scored
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.model.load import load_model
from rlctl.runtime.model.probe import check_packing
from rlctl.runtime.model.reward_model import RewardModel
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.workers.dispatch import split
from tests.configs import configured
from tests.distributed.ranks import on_ranks, rank_info
from tests.models import write_tiny_model
from tests.tolerance import PASSES, assert_as_exact, float64, in_float64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return folder


def rows(num_pairs: int = 4) -> Scored:
    """Return conversations of different lengths, two per pair."""
    draw, count = torch.Generator().manual_seed(3), 2 * num_pairs

    def ids(lengths: list[int]) -> Ragged:
        parts = [torch.randint(3, 60, (n,), generator=draw) for n in lengths]
        return Ragged.from_rows(parts, dtype=torch.int64)

    prompts, responses = [3, 3, 7, 7, 4, 4, 9, 9][:count], [1, 12, 5, 20, 3, 8, 2, 15][:count]
    response_ids = ids(responses)
    return Scored(
        prompt_ids=ids(prompts),
        group=torch.arange(count) // 2,
        rows=[],
        response_ids=response_ids,
        response_mask=response_ids.like(torch.ones(len(response_ids.values))),
        rollout_log_probs=response_ids.like(torch.zeros(len(response_ids.values))),
        finish=["stop"] * count,
        scores=torch.zeros(count),
        components={},
        failed=torch.zeros(count, dtype=torch.bool),
    )


def test_scores_are_those_of_transformers(model: Path, tmp_path: Path) -> None:
    settings = compose("rm", [f"reward.reward_model.model.path={model}"]).config
    hf = load_model(settings.reward.reward_model.model, "new_classifier", torch.float32, seed=1)
    again = load_model(settings.reward.reward_model.model, "new_classifier", torch.float32, seed=1)
    assert torch.equal(hf.get_parameter("score.weight"), again.get_parameter("score.weight"))
    hf.save_pretrained(tmp_path)
    check_packing(RewardModel(hf))
    batch = rows()
    with torch.no_grad():
        scores = RewardModel(hf)(Sequences.from_ragged(batch.prompt_ids, batch.response_ids))
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path)
        pairs = [*zip(batch.prompt_ids.rows(), batch.response_ids.rows(), strict=True)]
        second, exact = (
            torch.cat([each(input_ids=torch.cat(pair)[None]).logits[0] for pair in pairs])
            for each in (plain, in_float64(plain))
        )
        assert_as_exact(scores, second, exact)
    stored = settings.reward.reward_model.model.model_copy(update={"path": str(tmp_path)})
    loaded = load_model(stored, "classifier", torch.float32, seed=2)
    assert torch.equal(loaded.get_parameter("score.weight"), hf.get_parameter("score.weight"))


def test_a_policy_is_no_reward_model(model: Path) -> None:
    settings = compose("rm", [f"reward.reward_model.model.path={model}"]).config.reward
    with pytest.raises(ConfigError, match=r"1 weight is missing .*score\.weight"):
        load_model(settings.reward_model.model, "classifier", torch.float32, seed=1)


@pytest.mark.parametrize(
    ("params", "margins"),
    [
        (BradleyTerryParams(), None),
        (BradleyTerryParams(margin=True), [0.5, 2.0, 0.0, -1.0]),
        (BradleyTerryParams(center_rewards_coefficient=0.01), None),
    ],
)
def test_loss_and_its_gradient_equal_a_loop(
    params: BradleyTerryParams, margins: list[float] | None
) -> None:
    scores = torch.randn(8, generator=torch.Generator().manual_seed(1)) * 3
    given = None if margins is None else torch.tensor(margins, dtype=torch.float64)
    pairs, losses = with_coefficients(rows(), scores, given, params)
    for i in range(4):
        w, r, m = float(scores[2 * i]), float(scores[2 * i + 1]), (margins or [0.0] * 4)[i]
        center = params.center_rewards_coefficient
        assert float(losses[i]) == pytest.approx(
            math.log(1 + math.exp(-(w - r - m))) + center * (w + r) ** 2, abs=1e-6
        )
        slope = 1 / (1 + math.exp(w - r - m))
        assert pairs.coefficients[2 * i : 2 * i + 2].tolist() == pytest.approx(
            [-slope + 2 * center * (w + r), slope + 2 * center * (w + r)], abs=1e-6
        )
    total = (pairs.coefficients * scores).sum() + pairs.constants.sum()
    assert float(total) == pytest.approx(float(losses.sum()), abs=1e-5)


def test_calibration_error_equals_a_loop() -> None:
    margin = torch.randn(500, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2
    bins: dict[int, list[tuple[float, bool]]] = {}
    for value in margin.tolist():
        confidence = 1 / (1 + math.exp(-abs(value)))
        bins.setdefault(int((confidence - 0.5) * 20), []).append((confidence, value > 0))
    expected = sum(
        abs(sum(confidence for confidence, _ in each) - sum(right for _, right in each))
        for each in bins.values()
    )
    assert calibration_error(margin) == pytest.approx(expected / 500, abs=1e-9)
    assert calibration_error(torch.full((4,), 50.0, dtype=torch.float64)) == pytest.approx(0)
    assert calibration_error(torch.full((4,), -50.0, dtype=torch.float64)) == pytest.approx(1)


def test_running_scale_is_that_of_all_scores() -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(4)) * 5 + 3
    scale = Scale()
    for part in values.split([7, 1, 0, 42]):
        scale.update(part)
    normalized = scale.normalize(values).double()
    assert float(normalized.mean()) == pytest.approx(0, abs=1e-6)
    assert float(normalized.std(correction=0)) == pytest.approx(1, abs=1e-5)
    restored = Scale()
    restored.load_state_dict(scale.state_dict())
    assert restored == scale


def gradient(
    where: RankInfo, model: str, max_rows: int | None, more: tuple[str, ...] = ()
) -> tuple[torch.Tensor, float]:
    """Return the gradient of an update, flat, and its loss."""
    given = [f"reward.reward_model.model.path={model}", "reward.reward_model.grad_clip=1000"]
    if max_rows:
        more = (*more, f"reward.reward_model.micro_batch_size_per_gpu={max_rows}")
    config = configured("rm", given, more)
    algorithm = load_algorithm(config, num_steps=1)
    worker = RewardLearnerWorker(
        where, RewardModelSpec(config.reward.reward_model, 0, cast(Any, algorithm))
    )
    found: list[torch.Tensor] = []

    def keep(*_: object) -> None:
        for parameter in worker.learner.model.parameters():
            assert parameter.grad is not None
            grad = parameter.grad
            found.append(
                (grad.full_tensor() if isinstance(grad, DTensor) else grad).flatten().clone()
            )

    assert worker.learner.optimizer is not None
    worker.learner.optimizer.register_step_pre_hook(keep)
    batch = rows()
    scores = torch.randn(8, generator=torch.Generator().manual_seed(1))
    pairs, _ = with_coefficients(batch, scores, None, BradleyTerryParams())
    ranks_per_row = worker.learner.model.ranks_per_row
    parts = split(pairs, where.world_size // ranks_per_row, balanced=True)
    mine = pairs.chunk(parts)[where.rank // ranks_per_row]
    metrics = worker.update(mine, lr=1e-3)
    return torch.cat(found), metrics["reward_model/loss"].value


def test_ranks_and_micro_batches_do_not_change_the_gradient(model: Path) -> None:
    whole, loss = gradient(rank_info(), str(model), None)
    with float64():
        exact, _ = gradient(rank_info(), str(model), None, PASSES)
    assert whole.norm() > 1e-3
    others = [gradient(rank_info(), str(model), 3), *on_ranks(2, gradient, str(model), 2)]
    for other, other_loss in others:
        assert_as_exact(other, whole, exact)
        assert other_loss == pytest.approx(loss, rel=1e-5)
