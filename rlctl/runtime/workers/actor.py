"""The policy on one rank: it answers prompts with a rollout engine, and learns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlctl.plugins import load
from rlctl.recipes import schema
from rlctl.runtime.algorithms.base import Loss, Needs, PolicyLoss
from rlctl.runtime.batch import LogProbs, Prompts, Rollouts
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.load import compute_dtype, load_model, master_dtype
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.model.sharding import full_parameters, is_sharded, shard
from rlctl.runtime.place import Place
from rlctl.runtime.rollout.engine import EngineSpec, RolloutEngine, SamplingParams, random_streams
from rlctl.runtime.workers.dispatch import Dispatch, dispatch
from rlctl.runtime.workers.learner import Learner, LearningWorker, MicroBatching
from rlctl.tracking.metrics import Metrics


@dataclass(frozen=True)
class ActorSpec:
    """What an actor is made of."""

    model: schema.Model
    actor: schema.Actor
    rollout: schema.Rollout
    max_prompt_length: int
    max_response_length: int
    stop_token_ids: tuple[int, ...]
    algorithm: PolicyLoss
    seed: int


class ActorWorker(LearningWorker):
    """Implements `Actor`."""

    def __init__(self, place: Place, spec: ActorSpec) -> None:
        self.place = place
        self.spec = spec
        hf = load_model(spec.model, "policy", master_dtype(spec.actor.fsdp_config), spec.seed)
        if spec.model.enable_gradient_checkpointing:
            hf.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy = PolicyModel(hf, spec.rollout.temperature)
        shard(self.policy, hf, place, spec.actor.fsdp_config, compute_dtype(spec.model, place.device))
        self.learner = Learner(self.policy, place, spec.actor.optim)
        self.engine = self._build_engine() if Needs.ENGINE in spec.algorithm.needs else None
        self.engine_is_stale = True
        self.cut_update = _cutting(
            spec.actor.use_dynamic_bsz, spec.actor.ppo_max_token_len_per_gpu, spec.actor.ppo_micro_batch_size_per_gpu
        )
        self.cut_infer = _cutting(
            spec.actor.use_dynamic_bsz, spec.rollout.log_prob_max_token_len_per_gpu, spec.rollout.log_prob_micro_batch_size_per_gpu
        )

    @dispatch(Dispatch.SPLIT)
    def generate_sequences(self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False) -> Rollouts:
        """See `Actor`."""
        assert self.engine is not None, "this actor was built without a rollout engine"
        sampling = self._greedy() if greedy else self._sampling(prompts.group, seed, validate)
        self.engine.wake()
        if self.engine_is_stale:
            self.engine.load_weights(full_parameters(self.policy.hf))
        responses = self.engine.generate(prompts.prompt_ids.to(self.place.device), sampling)
        self.engine_is_stale = self.engine.sleep()
        ids = responses.response_ids.to("cpu")
        return prompts.repeat(sampling.n).grow(
            Rollouts,
            response_ids=ids,
            response_mask=ids.like(torch.ones(len(ids.values))),
            rollout_log_probs=responses.log_probs.to("cpu"),
            finish=responses.finish,
        )

    @dispatch(Dispatch.SPLIT)
    def compute_log_probs(self, batch: Rollouts) -> LogProbs:
        """See `Actor`."""

        def forward(sequences: Sequences) -> tuple[Tensor, Tensor]:
            outputs = self.policy(sequences, with_entropy=True)
            return outputs.log_probs, outputs.entropy

        log_probs, entropy = self.learner.infer(batch, self.cut_infer, forward)
        return LogProbs(log_probs, entropy)

    @dispatch(Dispatch.SPLIT)
    def update(self, batch: Rollouts, lr: float) -> Metrics:
        """See `Actor`."""
        with_entropy = Needs.ENTROPY in self.spec.algorithm.needs
        self.engine_is_stale = True

        def loss(sequences: Sequences, part: Rollouts) -> Loss:
            return self.spec.algorithm.loss(self.policy(sequences, with_entropy=with_entropy), part)

        return self.learner.learn(batch, self.cut_update, loss, lr, self.spec.actor.grad_clip, "actor")

    @dispatch(Dispatch.BROADCAST)
    def load(self, folder: Path) -> None:
        """See `Actor`."""
        self.engine_is_stale = True
        super().load(folder)

    @dispatch(Dispatch.BROADCAST)
    def export(self, folder: Path) -> None:
        """Copy the weights; rank 0 writes a folder that `AutoModelForCausalLM.from_pretrained` loads, in the background and before what is
        saved after it. The controller adds the tokenizer. Collective."""
        weights: dict[str, Tensor] = {}
        for name, value in full_parameters(self.policy.hf):
            if self.place.rank == 0:
                weights[name] = value.to("cpu", copy=True)
        if weights:
            self.learner.writer.submit(folder, lambda: self.policy.hf.save_pretrained(folder, state_dict=weights))

    def close(self) -> None:
        """End the engine."""
        if self.engine is not None:
            self.engine.close()

    def _sampling(self, prompts: Tensor, seed: int, validate: bool) -> SamplingParams:
        """For `prompts` (B,), numbers in the whole batch: a row's random stream does not hang on the rank that answers it."""
        rollout = self.spec.rollout
        chosen = rollout.val_kwargs if validate else rollout
        greedy = validate and not rollout.val_kwargs.do_sample
        sampling = SamplingParams(
            temperature=rollout.temperature if not validate else rollout.val_kwargs.temperature,
            top_p=chosen.top_p,
            top_k=chosen.top_k,
            max_tokens=self.spec.max_response_length,
            stop_token_ids=self.spec.stop_token_ids,
            seed=random_streams(seed, (prompts[:, None] * chosen.n + torch.arange(chosen.n)).flatten()),
            n=chosen.n,
        )
        return replace(sampling, temperature=0.0) if greedy else sampling

    def _greedy(self) -> SamplingParams:
        return SamplingParams(0.0, 1.0, -1, self.spec.max_response_length, self.spec.stop_token_ids, seed=0, n=1)

    def _build_engine(self) -> RolloutEngine:
        spec = EngineSpec(
            model=self.spec.model,
            rollout=self.spec.rollout,
            dtype=compute_dtype(self.spec.model, self.place.device),
            place=self.place,
            max_length=self.spec.max_prompt_length + self.spec.max_response_length,
            seed=self.spec.seed,
        )
        return load("engines", self.spec.rollout.name).from_spec(spec, None if is_sharded(self.policy) else self.policy.hf)


def _cutting(dynamic: bool, max_tokens: int, max_rows: int | None) -> MicroBatching:
    return MicroBatching(max_tokens, None if dynamic else max_rows)
