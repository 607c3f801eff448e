"""Worker of the policy: it generates responses with a rollout engine, and learns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rlctl.errors import InternalError
from rlctl.plugins import load
from rlctl.plugins.result_check import check_result
from rlctl.recipes import schema
from rlctl.recipes.role_table import ACTOR, ROLLOUT
from rlctl.runtime.algorithms.aggregate import with_sizes
from rlctl.runtime.algorithms.base import Loss, Needs, PolicyLoss, training_temperature
from rlctl.runtime.base.batch import Experience, LogProbs, Prompts, Ragged, Rollouts
from rlctl.runtime.base.budget import Budget
from rlctl.runtime.base.metrics import Metrics
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.base.roles import Actor, G, Generator, Published, R, Total, Weights
from rlctl.runtime.model.activations import save_activation_memory
from rlctl.runtime.model.adapter_names import adapt, without_adapters
from rlctl.runtime.model.causal_lm import PolicyModel
from rlctl.runtime.model.load import compute_dtype, load_model, master_dtype, with_local_path
from rlctl.runtime.model.sequences import Sequences
from rlctl.runtime.model.sharding import is_sharded
from rlctl.runtime.model.tower import freeze_tower
from rlctl.runtime.rollout.engine import EngineSpec, RolloutEngine
from rlctl.runtime.rollout.engine_startup import start_in_phases
from rlctl.runtime.rollout.engine_weights import EngineWeights, Selection
from rlctl.runtime.rollout.requests import Completion, Request, Slice
from rlctl.runtime.rollout.sampling_params import SamplingConfig, to_rollouts
from rlctl.runtime.rollout.sync_contents import adapter_sync
from rlctl.runtime.workers.base import LearningWorker, prepare
from rlctl.runtime.workers.dispatch import Dispatch, dispatch
from rlctl.runtime.workers.interrupts import INTERRUPTS
from rlctl.runtime.workers.learner import Learner
from rlctl.runtime.workers.scoring import install_routers, score, with_agreement

if TYPE_CHECKING:
    from rlctl.runtime.model.average import Average
    from rlctl.runtime.rollout.exchange import WeightVersions
    from rlctl.runtime.rollout.weight_sync import WeightChannel

T = TypeVar("T")


@dataclass(frozen=True)
class ActorSpec:
    """Settings of an actor."""

    model: schema.Model
    actor: schema.Actor
    sampling: SamplingConfig
    max_prompt_length: int
    algorithm: PolicyLoss
    seed: int

    @property
    def fsdp(self) -> schema.FSDP:
        """See `ShardedSpec`."""
        return self.actor.fsdp_config


def _phase_of_log_probs(_: object = None, weights: Weights = "current", top_k: int = 0) -> str:
    del top_k
    return "old_log_prob" if weights == "current" else "ref"


class ActorWorker(LearningWorker, Actor, Generator):
    """Implements `Actor` and `Generator` on one rank.

    It generates responses only after its engine is started. With separate rollout engines it has
    none, and `send_weights` syncs their weights.
    """

    def __init__(self, rank_info: RankInfo, spec: ActorSpec) -> None:
        self.rank_info = rank_info
        self.spec = spec
        dtype = compute_dtype(spec.model, rank_info.device)
        stored = master_dtype(spec.actor.fsdp_config)
        hf = load_model(spec.model, "policy", stored, spec.seed, mapped=True)
        freeze_tower(hf, spec.actor.freeze_vision_tower)
        adapt(hf, spec.model, spec.seed)
        save_activation_memory(hf, spec.model)
        install_routers(hf, spec.actor.router_replay.mode)
        policy = PolicyModel(hf, training_temperature(spec.algorithm.needs, spec.sampling.rollout))
        compiled = spec.actor.use_torch_compile
        fsdp = spec.actor.fsdp_config
        self.policy = prepare(policy, spec.model, fsdp, rank_info, compiled)
        self.learner = Learner(self.policy, rank_info, spec.actor.optim, fsdp, ACTOR.name)
        if Needs.AVERAGE in spec.algorithm.needs:
            self.learner.keep_average()
        self.engine: RolloutEngine | None = None
        self._startup: Iterator[str] | None = None
        self.engine_is_stale, self.engine_lacks = True, Selection.ALL  # while it is stale
        self.engine_version = 0  # of its weights, in updates
        rollout = spec.sampling.rollout
        sync = adapter_sync(rollout, spec.model, rank_info.device)
        self.engine_weights = EngineWeights(policy.hf, sync, dtype)
        ranks = spec.fsdp.ulysses_sequence_parallel_size
        self.budget = Budget.of_updates(ACTOR.section, spec.actor, ranks)
        self.infer_budget = Budget.of_log_probs(ROLLOUT.section, rollout, ranks)

    def start_engine(self) -> None:
        """Start the rollout engine in this process. Collective for ranks that share an engine."""
        while self.continue_startup() is not None:
            pass

    @dispatch(Dispatch.BROADCAST, reads=True)
    def continue_startup(self) -> str | None:
        """Start the rollout engine up to the next phase.

        Returns a description of that phase, which the next call runs; None once the engine is
        ready. Then it sleeps: the models of other roles are loaded next.
        """
        if self._startup is None:
            self._startup = self._startup_phases()
        phase = next(self._startup, None)
        if phase is None:
            self._let_sleep()
        return phase

    def _startup_phases(self) -> Iterator[str]:
        """Build the engine, yielding a description of each phase before it runs."""
        spec = EngineSpec(
            model=with_local_path(self.spec.model),
            rollout=self.spec.sampling.rollout,
            dtype=compute_dtype(self.spec.model, self.rank_info.device),
            rank_info=self.rank_info,
            max_length=self.spec.max_prompt_length + self.spec.sampling.max_response_length,
            seed=self.spec.seed,
            on_oom=lambda retry: self.learner.oom_retries.append(retry),
            routing=self.spec.sampling.routing,
        )
        # The engine cannot share a sharded model, or one with adapters that it does not compute.
        separate = is_sharded(self.policy) or self.engine_weights.merges
        parameters = self.learner.parameters
        parameters.used_by_engine = not separate
        parameters.begin_generation()
        engine = load("engines", self.spec.sampling.rollout.name)
        shared = None if separate else self.policy.hf
        self.engine = yield from start_in_phases(engine, spec, shared)
        parameters.used_by_engine &= getattr(self.engine, "uses_policy", True)  # plug-ins may

    @dispatch(Dispatch.BROADCAST, phase="update_weights", reads=True)
    def update_weights(self) -> None:
        """See `Generator`. The engine sleeps again after the next `generate_sequences`."""
        assert self.engine is not None, "this actor's rollout engine was not started"
        self.engine_version = self.learner.num_updates
        self.engine.wake()
        if self.engine_is_stale:
            self.learner.parameters.enter()
            self.engine.load_weights(self.engine_weights.parameters(self.engine_lacks))
            self.engine_is_stale, self.engine_lacks = False, Selection.CHANGING
        self.learner.parameters.begin_generation()

    @dispatch(Dispatch.RANK_ZERO, phase="update_weights", reads=True)
    def publish_weights(self) -> Published:
        return Published(self.learner.num_updates)

    @dispatch(Dispatch.RANKS, phase="gen", reads=True)
    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        engine = self._ready_engine()
        sampling = self.spec.sampling.params(prompts.group, seed, validate, greedy, prompts.images)
        ids = prompts.prompt_ids.to(self.rank_info.device)
        with self._interruptible():
            responses = engine.generate(ids, sampling)
            is_right = hasattr(responses, "response_ids")
            check_result(engine.generate, is_right, responses, "Responses")
        self._let_sleep()
        return to_rollouts(prompts, sampling.n, responses)

    @dispatch(Dispatch.EACH, reads=True)
    def exchange(
        self, requests: list[list[Request]], limit: Slice, cancelled: Collection[int] = ()
    ) -> list[list[Completion]]:
        """Submit the requests of each rank's engine and advance it: see `rollout.exchange`.

        `update_weights` comes before the first call of a batch of episodes, `end_exchange` after
        the last. Ranks that share an engine need the same requests, and a limit in steps.
        """
        from rlctl.runtime.rollout.exchange import exchange

        (of_this_rank,) = requests
        engine = self._ready_engine()
        self.versions.now = self.engine_version
        with self._interruptible():
            return [exchange(engine, of_this_rank, limit, cancelled, self.versions)]

    @cached_property
    def versions(self) -> WeightVersions:
        """Versions of the weights that write the tokens of turns."""
        from rlctl.runtime.rollout.exchange import WeightVersions

        return WeightVersions()

    @dispatch(Dispatch.BROADCAST, reads=True)
    def end_exchange(self) -> None:
        """Release the engine's memory until the next `update_weights`."""
        self._let_sleep()

    def _interruptible(self) -> AbstractContextManager[None]:
        """Permit interruptions of the block, unless other ranks compute with this one's engine."""
        rollout = self.spec.sampling.rollout
        return INTERRUPTS.allowed(rollout.tensor_model_parallel_size == 1)

    def _let_sleep(self) -> None:
        if self.engine is not None and self.engine.sleep():
            self.engine_is_stale, self.engine_lacks = True, Selection.ALL

    @dispatch(collect_fn=lambda _, results: list(chain(*results)), reads=True)
    def send_weights(self, channel: WeightChannel[T]) -> list[T]:
        """Send the current weights, in compute dtype, to a channel; return the results of ranks.

        Each rank sends its shards; rank 0 whole parameters if adapters are merged or layers split.
        """
        from rlctl.runtime.workers.weight_sending import send_weights

        self.learner.parameters.enter()
        return send_weights(self, channel)

    @dispatch(Dispatch.SPLIT, phase=_phase_of_log_probs, reads=True)
    def compute_log_probs(
        self, batch: Rollouts, weights: Weights = "current", top_k: int = 0
    ) -> LogProbs:
        if weights == "current":
            with_squares = Needs.SUM_PI_SQUARED in self.spec.algorithm.needs
            replay = self.spec.actor.router_replay.mode
            return score(self.learner, self.policy, batch, self.infer_budget, with_squares, replay)
        batch = replace(batch, routing=None)  # another policy chooses other experts
        if weights == "average":
            changed = self._average().in_place_of_weights()
        else:
            changed = without_adapters(self.policy)
        with changed:
            return self.learner.infer_policy(self.policy, batch, self.infer_budget, top_k)

    @dispatch(Dispatch.GROUPS, reads=True)
    def map_groups(self, batch: G, function: Callable[[G, Total], R]) -> R:
        return function(batch, self.learner.sum_over_ranks)

    @dispatch(Dispatch.BROADCAST)
    def update_average(self, decay: float) -> None:
        self._average().update(decay)

    def _average(self) -> Average:
        assert self.learner.average is not None, "the algorithm does not declare Needs.AVERAGE"
        self.learner.parameters.enter()
        return self.learner.average

    @dispatch(Dispatch.SPLIT, phase="update_actor")
    def update(self, batch: Rollouts, lr: float, max_probs_diff: float | None = None) -> Metrics:
        return self._learn(batch, lr, max_probs_diff)[0]

    @dispatch(Dispatch.SPLIT, phase="update_actor")
    def update_with_log_probs(
        self, batch: Rollouts, lr: float, max_probs_diff: float | None = None
    ) -> tuple[LogProbs, Metrics]:
        metrics, log_probs = self._learn(batch, lr, max_probs_diff, keep=True)
        assert log_probs is not None
        return LogProbs(log_probs, None), metrics

    def _learn(
        self, batch: Rollouts, lr: float, max_probs_diff: float | None, keep: bool = False
    ) -> tuple[Metrics, Ragged | None]:
        # The metric of the entropy comes with the old log-probs.
        own_pass = isinstance(batch, Experience) and batch.old_log_probs is None
        with_entropy = own_pass or Needs.ENTROPY in self.spec.algorithm.needs
        self.engine_is_stale = True
        if Needs.SIZES in self.spec.algorithm.needs:
            assert isinstance(batch, Experience)
            batch = with_sizes(batch, self.learner.sum_over_ranks)

        def loss(sequences: Sequences, part: Rollouts) -> Loss:
            outputs = self.policy(sequences, with_entropy=with_entropy)
            found = self.spec.algorithm.loss(outputs, part)
            check_result(self.spec.algorithm.loss, isinstance(found, Loss), found, "a Loss")
            found = with_agreement(found, sequences)
            if keep:
                found = replace(found, values=outputs.log_probs.detach())
            return found

        return self.learner.learn(
            batch, self.budget, loss, lr, self.spec.actor.grad_clip, max_probs_diff
        )

    @dispatch(Dispatch.BROADCAST)
    def load(self, folder: Path, with_optimizer: bool = True) -> None:
        self.engine_is_stale = True
        super().load(folder, with_optimizer)

    def _ready_engine(self) -> RolloutEngine:
        """Wake and return the engine. Raises InternalError if its weights are stale."""
        assert self.engine is not None, "this actor's rollout engine was not started"
        if self.engine_is_stale:
            raise InternalError(
                "the engine's weights are stale: call update_weights before generating"
            )
        self.learner.parameters.begin_generation()
        self.engine.wake()
        return self.engine

    def close(self) -> None:
        """Close the engine."""
        super().close()
        if self.engine is not None:
            self.engine.close()
