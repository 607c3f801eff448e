"""The length of replies changes no loss; batches may be without a token to learn from."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError
from rlctl.plugins.objectives.self_distill import SelfDistill, SelfDistillParams
from rlctl.quickstart import real_path
from rlctl.recipes.compose import compose
from rlctl.runtime.algorithms.mismatch import RolloutMismatch, sampled_log_probs
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.base.batch import Experience, LogProbs, Ragged, Scored
from rlctl.runtime.base.ops import PolicyOutputs
from rlctl.runtime.base.roles import Roles
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.data.tokenizer import tokenizer_of
from rlctl.runtime.training.step_metrics import length_metrics, speed_metrics
from tests.configs import configured
from tests.numerics.batches import scored_batch

TURNS = [[3, 2], [4], [2, 2, 1], [1, 3]]  # tokens of each turn of four episodes, in two groups


def batch(algorithm: PPO, reply_length: int) -> tuple[Experience, Tensor]:
    """Return episodes with replies of `reply_length` tokens, and the policy's new log-probs (T,).

    All that belongs to the policy's own tokens is the same for any length.
    """
    rng = torch.Generator().manual_seed(0)
    rows: list[dict[str, Tensor]] = []
    for turns in TURNS:
        parts: dict[str, list[Tensor]] = {}
        for number, length in enumerate(turns):
            own = torch.rand(5, length, generator=rng)
            reward = torch.zeros(length)
            reward[-1] = own[0, 0]
            pieces = [torch.ones(length), -own[1], -own[2], own[3], reward, number + 0 * own[0]]
            if number:
                gap = torch.full((reply_length,), -7.0)
                before = [0 * gap, 0 * gap, gap, gap, 0 * gap, 0 * gap + number - 1]
                pieces = [torch.cat(pair) for pair in zip(before, pieces, strict=True)]
            names = ("mask", "old", "new", "values", "rewards", "turn")
            for name, piece in zip(names, pieces, strict=True):
                parts.setdefault(name, []).append(piece)
        rows.append({name: torch.cat(pieces) for name, pieces in parts.items()})

    def field(name: str, dtype: torch.dtype = torch.float32) -> Ragged:
        return Ragged.from_rows([row[name] for row in rows], dtype)

    mask, old, values = field("mask"), field("old"), field("values")
    scored = Scored(
        prompt_ids=Ragged.from_rows([[1]] * len(rows), torch.int64),
        group=torch.tensor([0, 0, 1, 1]),
        rows=[],
        response_ids=field("turn", torch.int64),
        response_mask=mask,
        rollout_log_probs=old,
        finish=["stop"] * len(rows),
        turn=field("turn", torch.int64),
        step_rewards=field("rewards"),
        scores=torch.tensor([1.0, 0.0, 2.0, 0.5]) + field("rewards").sums(),
        components={},
        failed=torch.zeros(len(rows), dtype=torch.bool),
    )
    squares = Ragged(torch.rand(len(mask.values), generator=rng).fill_(0.3), mask.lengths)
    logs = LogProbs(old, old, squares)
    experience, _ = algorithm.compute_advantages(scored, logs, logs, values)
    return experience, field("new").values


ESTIMATORS = ("gae", "grpo", "grpo_turns", "rloo", "reinforce_plus_plus", "opo")
MODES = ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
FIXED = [
    "data.train_files=[t.parquet]",
    "actor_rollout_ref.model.path=m",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.entropy_coeff=0.1",
    "actor_rollout_ref.actor.use_kl_loss=true",
]


@pytest.mark.parametrize(
    ("estimator", "mode"),
    [*((name, "token-mean") for name in ESTIMATORS), *(("grpo", mode) for mode in MODES)],
)
def test_ten_times_longer_replies_change_no_loss(estimator: str, mode: str) -> None:
    settings = [
        f"algorithm.adv_estimator={estimator}",
        f"actor_rollout_ref.actor.loss_agg_mode={mode}",
    ]
    algorithm = PPO.from_config(configured("ppo", FIXED, settings), 1)
    found = []
    for length in (3, 30):
        experience, new = batch(algorithm, length)
        written = experience.response_mask.values.bool()
        outputs = PolicyOutputs(new, -new, None)
        loss = algorithm.loss(outputs, experience)
        value = algorithm.value_loss(new, experience)
        found.append(
            [
                experience.advantages.values[written],
                loss.total / (loss.count or 1),
                value.total / (value.count or 1),
            ]
        )
    for short, long in zip(*found, strict=True):
        torch.testing.assert_close(short, long, rtol=1e-6, atol=1e-6)


def test_a_batch_whose_tokens_are_all_masked_is_no_mismatch() -> None:
    scored = scored_batch()
    far = LogProbs(scored.response_mask.like(-9 * torch.ones(9)), None)
    actor: Any = SimpleNamespace(compute_log_probs=lambda _: far)
    roles = Roles(actor, cast(Any, None), max_probs_diff=0.1)
    with pytest.raises(RolloutMismatch):
        sampled_log_probs(roles, scored)
    assert sampled_log_probs(roles, scored, has_updated=True) is far
    masked = replace(scored, response_mask=scored.response_mask.like(torch.zeros(9)))
    sampled_log_probs(roles, masked)


def test_responses_without_tokens_have_no_speed_per_token() -> None:
    none = Ragged.from_rows([[]] * 4, torch.int64)
    floats = none.like(torch.empty(0))
    scored = Scored(
        **{
            **vars(scored_batch()),
            "response_ids": none,
            "response_mask": floats,
            "rollout_log_probs": floats,
        }
    )
    found = speed_metrics({"gen": 1.0, "adv": 2.0}, scored, 3.0, 1)
    assert "timing_per_token_ms/gen" not in found
    assert found["timing_per_token_ms/adv"] == pytest.approx(2000 / 8)
    assert length_metrics(scored, 2)["global_seqlen/mean"] == 4.0


def test_the_teacher_continues_the_same_message_as_the_student() -> None:
    path = f"actor_rollout_ref.model.path={real_path('quickstart')}"
    algorithm = load_algorithm(compose("self_distill", [path]).config, 1)
    assert isinstance(algorithm, SelfDistill)
    begun = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "So: "}]
    row = PromptRow("s", begun, "4", extra_info={"answer": "It is 4."})
    tokenizer = tokenizer_of(algorithm.model)
    seen = tokenizer.decode(algorithm._privileged(row))
    assert seen.endswith("own reasoning.<|end|><|assistant|>So: ")
    assert "2 + 2?\n\nHere is a reference solution to this problem:\nIt is 4.\n" in seen


def test_self_distillation_refuses_episodes() -> None:
    config = compose("self_distill", ["actor_rollout_ref.rollout.multi_turn.enable=true"]).config
    with pytest.raises(ConfigError, match="self_distill is for single responses"):
        SelfDistill.from_config(config, 10, SelfDistillParams())
