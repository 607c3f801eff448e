"""Baselines that need more than scores: ReMax and the optimal token baseline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlctl.__main__ import main
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.batch import Experience, LogProbs, Prompts, Rollouts, Scored
from rlctl.runtime.roles import Roles
from rlctl.runtime.workers.actor import ActorWorker


def test_remax_subtracts_the_greedy_score(
    settings: list[str], shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overlong responses have a penalty, greedy ones too."""
    (tmp_path / "letters.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(set(solution_str)))\n"
    )
    greedy: list[Rollouts] = []
    sampled: list[Scored] = []
    learned: list[Experience] = []
    generate, collect, update = ActorWorker.generate_sequences, PPO.collect, ActorWorker.update

    def watch_generate(self: ActorWorker, prompts: Prompts, **how: bool | int) -> Rollouts:
        rollouts = generate(self, prompts, **how)
        greedy.extend([rollouts] if how.get("greedy") else [])
        return rollouts

    def watch_collect(self: PPO, prompts: Prompts, roles: Roles, step: int) -> Scored:
        sampled.append(collect(self, prompts, roles, step))
        return sampled[-1]

    def watch_update(
        self: ActorWorker, batch: Experience, lr: float, max_probs_diff: float | None = None
    ) -> object:
        learned.append(batch)
        return update(self, batch, lr, max_probs_diff)

    monkeypatch.setattr(ActorWorker, "generate_sequences", watch_generate)
    monkeypatch.setattr(PPO, "collect", watch_collect)
    monkeypatch.setattr(ActorWorker, "update", watch_update)
    overrides = [
        "algorithm.adv_estimator=remax",
        "actor_rollout_ref.rollout.n=2",
        f"reward.custom_reward_function.path={tmp_path}/letters.py",
        "reward.num_processes=1",
        "reward.overlap=false",
        "algorithm.overlong_buffer.enable=true",
        "algorithm.overlong_buffer.len=4",
        "data.val_files=null",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        f"trainer.run_dir={tmp_path}/runs",
    ]
    assert main(["train", "ppo", "--inline", *settings, *overrides]) == 0
    [answers], [batch], [experience] = greedy, sampled, learned
    assert len(answers) == 8
    assert len(batch) == len(experience) == 16
    assert batch.greedy_scores is not None

    def penalty(length: int) -> float:
        return -max(length - 8, 0) / 4

    tokenizer = AutoTokenizer.from_pretrained(shelf / "model")
    for row in range(16):
        ids = answers.response_ids.rows()[row // 2]
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        baseline = len(set(text)) + penalty(len(ids))
        assert float(batch.greedy_scores[row]) == pytest.approx(baseline)
        score = float(batch.scores[row]) + penalty(len(batch.response_ids.rows()[row]))
        advantages = experience.advantages.rows()[row]
        assert advantages.tolist() == pytest.approx([score - baseline] * len(advantages), abs=1e-5)
    assert torch.equal(batch.prompt_ids.values, answers.repeat(2).prompt_ids.values)


def test_optimal_token_baseline_receives_sum_pi_squared(
    settings: list[str], shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare Σ_v π(v)² of each response token with a plain forward pass of each row."""
    compute, compared = ActorWorker.compute_log_probs, []

    def watch(self: ActorWorker, batch: Rollouts, *how: object) -> LogProbs:
        answer = compute(self, batch, *how)
        assert answer.sum_pi_squared is not None
        for prompt, response, squares in zip(
            batch.prompt_ids.rows(),
            batch.response_ids.rows(),
            answer.sum_pi_squared.rows(),
            strict=True,
        ):
            logits = plain(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(
                squares, logits.softmax(-1).square().sum(-1), rtol=1e-4, atol=1e-6
            )
            compared.append(len(squares))
        return answer

    plain = AutoModelForCausalLM.from_pretrained(shelf / "model", dtype=torch.float32)
    monkeypatch.setattr(ActorWorker, "compute_log_probs", torch.no_grad()(watch))
    overrides = [
        "algorithm.adv_estimator=optimal_token_baseline",
        "actor_rollout_ref.rollout.n=2",
        "data.val_files=null",
        "trainer.total_training_steps=1",
        f"trainer.run_dir={tmp_path}/runs",
    ]
    assert main(["train", "ppo", "--inline", *settings, *overrides]) == 0
    assert len(compared) == 16
    assert min(compared) > 0
