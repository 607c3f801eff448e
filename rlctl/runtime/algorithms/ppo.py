"""The PPO family: one step with a chosen advantage estimator and a chosen policy loss.

PPO (arXiv 1707.06347), GRPO (2402.03300), RLOO (2402.14740), REINFORCE++ (2501.03262), Dr.GRPO,
DAPO's loss, GSPO, CISPO and others are this step. `algorithm.adv_estimator` and
`actor_rollout_ref.actor.policy_loss.loss_mode` name plain functions of tensors; what they declare
to need decides which roles are built.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from rlctl.recipes import schema
from rlctl.runtime.algorithms.advantage_pass import compute_advantages
from rlctl.runtime.algorithms.advantages.base import (
    AdvantageConfig,
    AdvantageInputs,
    Estimator,
    load_estimator,
)
from rlctl.runtime.algorithms.aggregate import aggregate, conversion, count, divided
from rlctl.runtime.algorithms.base import (
    Loss,
    Needs,
    cut,
    generate,
    mini_batch_rows,
    sample,
    sampling_seed,
    step_seed,
)
from rlctl.runtime.algorithms.correction import Correction
from rlctl.runtime.algorithms.kl import (
    KLController,
    KLEstimator,
    load_kl_estimator,
    make_kl_controller,
)
from rlctl.runtime.algorithms.lr_schedule import Schedule
from rlctl.runtime.algorithms.old_log_probs import (
    PassBefore,
    PolicyUpdate,
    choose_update,
    compared_with,
    corrected,
)
from rlctl.runtime.algorithms.policy_losses.base import (
    ClipRange,
    PolicyTokens,
    TokenLoss,
    load_policy_loss,
)
from rlctl.runtime.algorithms.ppo_checks import check_settings
from rlctl.runtime.algorithms.stats import entropy_metric, experience_metrics, spread
from rlctl.runtime.algorithms.token_rewards import overlong_penalty, penalise_kl, score_at_end
from rlctl.runtime.algorithms.value_loss import value_loss
from rlctl.runtime.base.batch import Experience, LogProbs, Prompts, Ragged, Rollouts, Scored
from rlctl.runtime.base.metrics import Mean, Metrics, Sum, merge
from rlctl.runtime.base.ops import PolicyOutputs, lowest_if_missing
from rlctl.runtime.base.ragged import padded
from rlctl.runtime.base.roles import Roles, Total


@dataclass(frozen=True)
class PPO:
    """PPO-family algorithm. Immutable except for the KL controller, which only the controller uses.

    It is pickled to the workers, the plug-in functions by reference.
    """

    algorithm: schema.Algorithm
    actor: schema.Actor
    critic: schema.Critic
    estimator: Estimator
    policy_loss: TokenLoss
    clip: ClipRange
    reward_kl: KLEstimator  # of the KL in the reward
    loss_kl: KLEstimator  # of the KL in the loss
    responses_per_prompt: int
    max_response_length: int
    seed: int
    actor_lr: Schedule
    critic_lr: Schedule
    critic_warmup: int
    kl: KLController
    correction: Correction
    update: PolicyUpdate

    @classmethod
    def from_config(cls, config: schema.Config, num_steps: int) -> Self:
        """Load the plug-ins and build the algorithm.

        Raises ConfigError for unknown plug-ins, wrong settings of plug-ins, and groups of one
        response where responses are compared.
        """
        algorithm = config.algorithm
        actor = config.actor_rollout_ref.actor
        rollout = config.actor_rollout_ref.rollout
        estimator = load_estimator(algorithm.adv_estimator, algorithm.adv_estimator_params)
        correction = Correction.from_config(algorithm.rollout_correction)
        policy_loss = load_policy_loss(actor.policy_loss.loss_mode, actor.policy_loss.params)
        if correction.reinforce:
            from rlctl.runtime.algorithms.policy_losses.gpg import gpg

            policy_loss = TokenLoss(gpg)
        check_settings(config, estimator, policy_loss, correction)
        warmup = config.trainer.critic_warmup if Needs.CRITIC in estimator.needs else 0
        return cls(
            algorithm=algorithm,
            actor=actor,
            critic=config.critic,
            estimator=estimator,
            policy_loss=policy_loss,
            clip=ClipRange.from_config(actor),
            reward_kl=load_kl_estimator(algorithm.kl_penalty),
            loss_kl=load_kl_estimator(actor.kl_loss_type),
            responses_per_prompt=rollout.n,
            max_response_length=config.data.max_response_length,
            seed=sampling_seed(config),
            actor_lr=Schedule.from_config(actor.optim, num_steps - warmup),
            critic_lr=Schedule.from_config(config.critic.optim, num_steps),
            critic_warmup=warmup,
            kl=make_kl_controller(algorithm.kl_ctrl),
            correction=correction,
            update=choose_update(config, estimator.needs, correction, policy_loss),
        )

    @property
    def needs(self) -> Needs:
        """Roles and inputs of the configured step, including those that the estimator declares."""
        needs = Needs.ENGINE | Needs.GROUPS | self.estimator.needs
        if self.algorithm.use_kl_in_reward or self.actor.use_kl_loss:
            needs |= Needs.REFERENCE
        if self.policy_loss.aggregates_apart(self.actor):
            needs |= Needs.SIZES
        return needs | Needs.ENTROPY if self.actor.entropy_coeff else needs

    def collect(self, prompts: Prompts, roles: Roles, step: int) -> Scored:
        """Generate `rollout.n` responses to each prompt and score them."""
        scored = sample(prompts, roles, step_seed(self.seed, step))
        if Needs.GREEDY_BASELINE not in self.needs:
            return scored
        from rlctl.runtime.algorithms.advantages.remax import with_baseline

        greedy = generate(prompts, roles, seed=0, greedy=True)
        # Normalized like the samples, whose moments must not include it.
        baseline = roles.reward.compute_scores(greedy, validate=True).to_scored(greedy)
        return with_baseline(scored, baseline, self._with_penalty)

    def learn(self, scored: Scored, roles: Roles, step: int) -> Metrics:
        """Compute log-probs, values and advantages; update critic and actor in mini-batches."""
        policy = self.policy_update(step)
        old, scored = policy.compute_old_log_probs(roles, scored)
        ref = roles.reference.compute_log_probs(scored) if Needs.REFERENCE in self.needs else None
        values = roles.critic.compute_values(scored) if Needs.CRITIC in self.needs else None
        experience, metrics = compute_advantages(self, roles.actor, scored, old, ref, values)
        experience = self._reweighted(experience, step)
        updates = [metrics]
        if values is not None:
            lr = self.critic_lr(step - 1)
            cuts = self._cuts(experience, self.critic, step)
            updates += [roles.critic.update(batch, lr) for batch in cut(experience, cuts)]
        if step > self.critic_warmup:
            lr = self.actor_lr(step - self.critic_warmup - 1)
            cuts = self._cuts(experience, self.actor, step)
            updates += policy.update(roles, experience, cuts, lr)
        return merge(updates)

    def policy_update(self, step: int) -> PolicyUpdate:
        """Return the way of the actor's updates; during the critic's warm-up there is none."""
        warms_up = step <= self.critic_warmup and not self.correction.bypass
        return PassBefore(self.correction) if warms_up else self.update

    def _cuts(self, experience: Experience, role: schema.Updates, step: int) -> list[Tensor]:
        return mini_batch_rows(experience, self.responses_per_prompt, role, step)

    def _reweighted(self, experience: Experience, step: int) -> Experience:
        """Draw rows by their score if PF-PPO is used; mini-batches are cut as without it."""
        if not self.algorithm.use_pf_ppo:
            return experience
        from rlctl.runtime.algorithms.policy_filtration import draw_rows

        scores = self._with_penalty(experience.scores, experience)
        drawn = draw_rows(scores, self.algorithm.pf_ppo, step_seed(self.seed, step))
        return replace(experience.select(drawn), group=experience.group)

    def loss(self, outputs: PolicyOutputs, batch: Rollouts) -> Loss:
        """Return pg − entropy_coeff · entropy + kl_loss_coef · KL(policy, reference), aggregated.

        `outputs` hold (T,) for the T response tokens of the micro-batch; the total is a scalar. The
        aggregation that a policy loss prescribes is not that of the other terms, as in verl.
        """
        assert isinstance(batch, Experience)
        actor = self.actor
        num_rows = len(batch)
        row = batch.response_ids.row_of_token
        old, mask, weights, corrections = compared_with(batch, outputs, self.correction)
        advantages = batch.advantages.values
        tokens = PolicyTokens(outputs.log_probs, old, advantages, mask, row, num_rows)
        losses, metrics = self.policy_loss(tokens, self.clip)
        metrics |= corrections
        if weights is not None:
            losses = self.policy_loss.weigh(losses, weights, tokens)
        policy_mode = mode = self.policy_loss.aggregation or actor.loss_agg_mode
        if apart := self.policy_loss.aggregates_apart(actor):
            mode = actor.loss_agg_mode
        width = actor.loss_scale_factor or self.max_response_length
        divisors = {name: count(mask, row, num_rows, name, width) for name in {policy_mode, mode}}
        extra = torch.zeros_like(losses)

        def mean_of(x: Tensor, mode: str) -> Mean | Sum:
            return divided(aggregate(x.detach(), mask, row, num_rows, mode), divisors[mode])

        metrics["actor/pg_loss"] = mean_of(losses, policy_mode)
        if actor.entropy_coeff:
            assert outputs.entropy is not None
            extra = extra - actor.entropy_coeff * outputs.entropy
            metrics["actor/entropy_loss"] = mean_of(outputs.entropy, mode)
        if actor.use_kl_loss:
            assert batch.ref_log_probs is not None
            kl = self.loss_kl(outputs.log_probs - batch.ref_log_probs.values)
            extra = extra + actor.kl_loss_coef * kl
            metrics["actor/kl_loss"] = mean_of(kl, mode)
            metrics["actor/kl_coef"] = Mean(actor.kl_loss_coef)
        if apart:
            all_rows, all_tokens = num_rows, float(mask.sum())
            if batch.sizes is not None:
                all_rows, all_tokens = batch.sizes[0].tolist()
            total = aggregate(losses, mask, row, num_rows, policy_mode)
            total = total * conversion(policy_mode, mode, all_rows, all_tokens, width)
            total = total + aggregate(extra, mask, row, num_rows, mode)
        else:
            total = aggregate(losses + extra, mask, row, num_rows, mode)
        return Loss(total, divisors[mode], metrics, num_tokens=float(mask.sum()))

    def value_loss(self, values: Tensor, batch: Rollouts) -> Loss:
        """Return the clipped value loss of `values` (T,), aggregated by `critic.loss_agg_mode`."""
        assert isinstance(batch, Experience)
        assert batch.values is not None
        assert batch.returns is not None
        mask = batch.response_mask.values
        row = batch.response_ids.row_of_token
        losses, metrics = value_loss(
            values, batch.values.values, batch.returns.values, mask, self.critic.cliprange_value
        )
        part = (mask, row, len(batch), self.critic.loss_agg_mode, self.max_response_length)
        total, divisor = aggregate(losses, *part), count(*part)
        metrics["critic/vf_loss"] = divided(total, divisor)
        return Loss(total, divisor, metrics)

    def compute_advantages(
        self,
        scored: Scored,
        old: LogProbs | None,
        ref: LogProbs | None,
        values: Ragged | None,
        total: Total | None = None,
    ) -> tuple[Experience, Metrics]:
        """Return the batch with token rewards, advantages and returns, and metrics; see `Total`.

        Without `old`, the update computes old log-probs in its pass: see `choose_update`.
        """
        mask = scored.response_mask
        metrics = Metrics()
        if scored.greedy_scores is not None:
            metrics |= spread("critic/greedy_score", scored.greedy_scores)
        scores = self._with_penalty(scored.scores, scored)
        rewards = score_at_end(scores, scored.response_ids, scored.step_rewards)
        if self.algorithm.use_kl_in_reward:
            assert ref is not None
            assert old is not None
            rewards, kl_metrics = penalise_kl(
                rewards, old.log_probs, ref.log_probs, mask, self.reward_kl, self.kl
            )
            metrics |= kl_metrics
        old_log_probs = None if old is None else old.log_probs
        inputs = AdvantageInputs(
            rewards=rewards.padded(),
            mask=mask.padded(),
            turn=padded(scored.turn),
            episode=scored.episode_of_row,
            group=scored.group,
            values=padded(values),
            greedy_scores=scored.greedy_scores,
            components={
                name: lowest_if_missing(values, scored.group)
                for name, values in scored.components.items()
            },
            log_probs=padded(old_log_probs),
            sum_pi_squared=padded(None if old is None else old.sum_pi_squared),
            total=total,
        )
        advantages, returns = self.estimator(inputs, AdvantageConfig.from_config(self.algorithm))
        lengths = scored.response_ids.lengths
        experience = scored.grow(
            Experience,
            rewards=rewards,
            old_log_probs=old_log_probs,
            advantages=Ragged.from_padded(advantages, lengths),
            ref_log_probs=None if ref is None else ref.log_probs,
            values=values,
            returns=Ragged.from_padded(returns, lengths),
        )
        metrics |= experience_metrics(experience)
        if old is None or self.correction.bypass:
            return experience, metrics
        metrics |= entropy_metric(experience, old.entropy)
        # After the advantages: rejecting a token must not remove the reward of its response.
        experience, corrections = corrected(experience, old, self.correction)
        return experience, metrics | corrections

    def _with_penalty(self, scores: Tensor, rollouts: Rollouts) -> Tensor:
        """Return scores (B,) minus the overlong penalty of the responses."""
        buffer = self.algorithm.overlong_buffer
        lengths = rollouts.response_ids.lengths
        return scores + overlong_penalty(lengths, self.max_response_length, buffer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the KL controller."""
        return {"kl": self.kl.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the KL controller."""
        self.kl.load_state_dict(state["kl"])
