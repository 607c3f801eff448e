"""PPO over worker groups: rollout, experience with critic and reward model, training.

    python docs/examples/workers/ppo.py

The models of PPO are rlctl's own roles; the reward model is a worker of this file. Actor and
reference share the pool `main`, critic and reward model the pool `critic`.
"""

import torch
from transformers import AutoModelForSequenceClassification

import rlctl
from rlctl.quickstart import real_path
from rlctl.runtime.base.metrics import to_floats
from rlctl.workers import (
    Dispatch,
    ResourcePool,
    Rollouts,
    Scores,
    Worker,
    dispatch,
    make_plan,
    session,
    spawn,
    spawn_roles,
)

SETTINGS = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "trainer.placement.critic=critic",
    "trainer.placement.pools={main: 1, critic: 1}",
    "trainer.n_gpus_per_node=2",
    "data.train_batch_size=16",
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "critic.ppo_mini_batch_size=16",
]


class RewardModel(Worker):
    """A sequence classifier with one output: the score of a prompt with its response."""

    def __init__(self, rank_info, path):
        super().__init__(rank_info)
        torch.manual_seed(0)  # the head of a folder without one
        self.model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
        self.model.to(rank_info.device).eval()

    @dispatch(Dispatch.SPLIT)
    @torch.no_grad()
    def compute_scores(self, rollouts: Rollouts) -> Scores:
        rows = zip(rollouts.prompt_ids.rows(), rollouts.response_ids.rows(), strict=True)
        inputs = [torch.cat(row)[None].to(self.model.device) for row in rows]
        scores = torch.cat([self.model(input_ids=ids).logits[0].float().cpu() for ids in inputs])
        return Scores(scores, components={}, failed=torch.zeros(len(scores), dtype=torch.bool))


def main_task(num_steps, reward_model=real_path("quickstart"), settings=()):
    plan = make_plan(rlctl.compose("ppo", [*SETTINGS, *settings]))
    ppo, history = plan.algorithm, []
    with ResourcePool(1, name="main") as main, ResourcePool(1, name="critic") as critic_pool:
        reward = spawn(RewardModel, critic_pool, reward_model)
        roles = spawn_roles(plan, {"main": main, "critic": critic_pool}, reward)
        actor, critic, reference = roles.actor, roles.critic, roles.reference
        generator = roles.generator
        for step in range(1, num_steps + 1):
            prompts = plan.loader.batch_at(step)

            # Stage 1: rollout
            generator.update_weights()
            rollout = generator.generate_sequences(prompts, seed=step)

            # Stage 2: experience
            values = critic.compute_values(rollout)
            old_log_prob = actor.compute_log_probs(rollout)
            ref_log_prob = reference.compute_log_probs(rollout)
            scored = reward.compute_scores(rollout).to_scored(rollout)
            batch, _ = ppo.compute_advantages(scored, old_log_prob, ref_log_prob, values)

            # Stage 3: training
            critic_metrics = critic.update(batch, lr=1e-4)
            actor_metrics = actor.update(batch, lr=1e-5)
            metrics = to_floats(critic_metrics | actor_metrics)
            history.append(metrics | {"score": scored.scores.mean().item()})
            print(step, history[-1])
    return history


if __name__ == "__main__":
    with session(num_cpus=2):
        main_task(num_steps=3)
