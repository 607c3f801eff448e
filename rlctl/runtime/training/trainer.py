"""The training loop: collect, learn, validate, save, report.

The algorithm defines `collect` and `learn`; everything around them is here, once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from rlctl.errors import RlctlError
from rlctl.recipes import schema
from rlctl.runs.run_dir import RunDir
from rlctl.runs.thumbnails import write_thumbnails
from rlctl.runtime.algorithms.base import Algorithm
from rlctl.runtime.algorithms.stats import rollout_metrics
from rlctl.runtime.batch import Rollouts, Scored
from rlctl.runtime.batch.stored import fetched
from rlctl.runtime.checkpoint.saver import Saver
from rlctl.runtime.checkpoint.store import GROUPS, ROLLOUTS, ControllerState
from rlctl.runtime.checkpoint.stored_rollouts import write_rollouts
from rlctl.runtime.roles import Roles
from rlctl.runtime.training.collector import Collector
from rlctl.runtime.training.profile import StepProfiler
from rlctl.runtime.training.rollout_source import (
    Collected,
    CollectionSetup,
    InStep,
    OneStepAhead,
    RolloutSource,
    StreamState,
)
from rlctl.runtime.training.step_metrics import (
    CheckedActor,
    RolloutMismatch,
    length_metrics,
    record_mismatch,
    speed_metrics,
)
from rlctl.runtime.training.stopping import Stopping
from rlctl.runtime.training.validation import PairValidator, Validator, to_samples
from rlctl.runtime.workers.rng import rng_state
from rlctl.tracking.clock import Clock
from rlctl.tracking.fanout import Trackers
from rlctl.tracking.jsonl import write_samples
from rlctl.tracking.metrics import to_floats

if TYPE_CHECKING:
    from rlctl.runtime.agents.stream import Stream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunContext:
    """The parts of one run."""

    algorithm: Algorithm
    roles: Roles
    collector: Collector
    max_staleness: int  # steps that rollouts are ahead of learning
    stream: Stream | None  # of `async_training.schedule=eager`
    sampling_seed: int
    engines_apart: bool  # the rollout engines have a pool of their own
    validator: Validator | PairValidator | None
    tokenizer: PreTrainedTokenizerBase
    trackers: Trackers
    run: RunDir
    num_steps: int
    num_devices: int  # of all pools
    num_ranks: int  # of the trained role, with rows of their own
    max_response_length: int
    on_phase: Callable[[str], None]  # called when a phase begins
    profiler: StepProfiler
    on_checkpoint: Callable[[], None]  # called when a checkpoint is complete
    end_by: float | None  # deadline by time.monotonic; None: no deadline


@dataclass(frozen=True)
class TrainerState:
    """The point at which training starts."""

    step: int = 0  # the last step that is done
    skipped_in_a_row: int = 0  # steps with skipped updates, up to and including `step`
    ahead: Collected | None = None  # rollouts that step `step` + 1 learns from
    stream: StreamState | None = None  # groups of later steps
    new_run: bool = True  # False for a resumed run, which has validated its checkpoint already


class Trainer:
    """Runs the steps of one run. `run` returns when all are done, or raises."""

    def __init__(self, context: RunContext, config: schema.Trainer, state: TrainerState) -> None:
        self.context = context
        self.config = config
        self.state = state
        self.clock = Clock(context.on_phase)
        self.roles = context.roles
        halt = None if context.max_staleness else config.mismatch.halt
        if halt is not None and self.roles.actor_role is not None:
            checked = CheckedActor(self.roles.actor, halt)
            self.roles = replace(self.roles, actor_role=checked)
        self.saver = Saver(
            context.run, context.roles, context.tokenizer, config, context.on_checkpoint
        )
        self.stopping = Stopping(
            config.timeouts.stop_s, logger.info, context.run.stop_request, context.end_by
        )
        self.skipped_in_a_row = state.skipped_in_a_row
        with self.clock.running():
            self.source = self._source()

    def _source(self) -> RolloutSource:
        """Return the source of rollouts, one step ahead if that is configured."""
        context, state = self.context, self.state
        if not context.max_staleness:
            return InStep(context.collector, self.roles, state.ahead)
        # The last step's checkpoint has the rollouts of the next one, in case the run is extended.
        last = context.num_steps + (self.config.save_freq > 0)
        if context.stream is not None and self.config.val_only:
            last = 0
        publish = self.roles.actor.publish_weights
        collection = CollectionSetup(
            context.collector, context.roles, publish, self.clock, last, state.ahead
        )
        if context.stream is None:
            return OneStepAhead(collection, in_thread=context.engines_apart)
        from rlctl.runtime.training.eager import Eager

        return Eager(
            collection,
            context.stream,
            seed=context.sampling_seed,
            max_staleness=context.max_staleness,
            step=state.step,
            state=state.stream,
        )

    def run(self) -> None:
        """Validate, then train step by step; validate, save and report as configured.

        Raises KeyboardInterrupt, Terminated or TimeUp after a request to stop, once the current
        step is finished and saved.
        """
        done = self.state.step
        with self.stopping, self.saver, self.clock.running():
            if self.state.new_run and (self.config.val_before_train or self.config.val_only):
                self.context.trackers.log(done, self._validate(done))
            if self.stopping.asked:
                raise self.stopping.error()
            for step in range(done + 1, 0 if self.config.val_only else self.context.num_steps + 1):
                metrics = self._train(step)
                if self._due(self.config.test_freq, step):
                    metrics |= self._validate(step)
                is_last = step == self.context.num_steps
                if not is_last:  # after the last step there is nothing left to stop
                    self.stopping.check(self.saver.longest_s)
                stops = self.stopping.asked and not is_last
                saved = self._due(self.config.save_freq, step) or stops
                if saved:
                    metrics |= self._save(step, metrics)
                self.context.trackers.log(step, metrics)
                self.saver.commit()
                if self.stopping.asked and not is_last:
                    if not saved:  # the request came after the check above
                        self._save(step, metrics)
                        self.saver.commit()
                    self.saver.close()
                    raise self.stopping.error()

    def _train(self, step: int) -> dict[str, float]:
        """Run one training step and return its metrics."""
        begin = time.perf_counter()
        self.clock.take()
        try:
            # "adv" is the controller's own work, between the calls of roles
            with self.context.profiler.step(step), self.clock.phase("adv"):
                scored, filter_metrics = self.source.take(step)
                learned = self.context.algorithm.learn(scored, self.roles, step)
            filter_metrics = filter_metrics | self.source.end_step()
        except RolloutMismatch as error:
            raise record_mismatch(error, step, self.context.run) from None
        seconds = time.perf_counter() - begin
        metrics = to_floats(learned) | filter_metrics
        self._stop_on_skipped_updates(step, metrics, scored)
        metrics |= self._report_oom_retries(step)
        metrics |= to_floats(rollout_metrics(scored, self.context.max_response_length))
        metrics |= self._dump(step, scored)
        phases = self.clock.take() | self.source.seconds
        metrics |= speed_metrics(phases, scored, seconds, self.context.num_devices)
        metrics |= length_metrics(scored, self.context.num_ranks)
        return metrics | {
            "training/global_step": step,
            "training/epoch": self.context.collector.epoch(),
        }

    def _due(self, every: int, step: int) -> bool:
        """Return whether something done `every` so many steps and at the end is due; -1: never."""
        return every > 0 and (step % every == 0 or step == self.context.num_steps)

    def _validate(self, step: int) -> dict[str, float]:
        if self.context.validator is None:
            return {}
        begin = time.perf_counter()
        with self.source.quiet:
            validation = self.context.validator.run(self.roles)
        self.context.trackers.generations(step, validation.samples)
        write_thumbnails(self.context.run.path, validation.images)
        return validation.metrics | {"timing_s/testing": time.perf_counter() - begin}

    def _save(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Copy the state to memory; `Saver` writes it while the next step runs."""
        begin = time.perf_counter()
        self.context.on_phase("save_checkpoint")
        record, source = self.context.run.record, self.source
        with source.quiet:
            ahead, stream = source.ahead, source.state()
            state = ControllerState(
                step=step,
                run=record.id,
                algorithm=self.context.algorithm.state_dict(),
                skipped_in_a_row=self.skipped_in_a_row,
                rng=rng_state(),
                metrics=dict(metrics),
                loader=self.context.collector.state_dict(),
                reward=self.context.roles.reward.state_dict(),
                trackers=dict(record.trackers),
                num_ranks=self.context.num_devices,
                seeds=dict(record.seeds),
                ahead=ahead and {"weights": ahead.weights, "metrics": ahead.metrics},
                stream=stream and stream.to_dict(),
            )
        stored = {ROLLOUTS: ahead and ahead.scored, GROUPS: stream and stream.finished_rollouts}
        self.saver.begin(
            state, {name: self._writer(worker) for name, worker in stored.items() if worker}
        )
        return {"timing_s/save_checkpoint": time.perf_counter() - begin}

    def _writer(self, rollouts: Rollouts) -> Callable[[Path], None]:
        """Return the function that writes rollouts to a folder of a checkpoint."""
        numbers = self.context.collector.loader.prompts.rows.positions_of(rollouts.rows)
        return lambda folder: write_rollouts(folder, rollouts, numbers)

    def _dump(self, step: int, scored: Scored) -> dict[str, float]:
        """Write the step's responses to `trainer.rollout_data_dir`, if that is set."""
        if self.config.rollout_data_dir is None:
            return {}
        begin = time.perf_counter()
        try:
            samples = to_samples(scored, self.context.tokenizer)
            write_samples(self.context.run.rollouts(step), samples)
        except (OSError, TypeError, ValueError) as error:  # a full disk, or no JSON
            logger.warning("the responses of step %d are not written: %s", step, error)
            self.context.run.event("rollouts_not_written", step=step, reason=str(error))
        return {"timing_s/dump_rollout_generations": time.perf_counter() - begin}

    def _stop_on_skipped_updates(
        self, step: int, metrics: dict[str, float], scored: Scored
    ) -> None:
        """Dump the batch of a skipped update; raise RlctlError after too many such steps in a row.

        Workers skip an update whose gradient is not finite.
        """
        skipped = sum(value for name, value in metrics.items() if name.endswith("/skipped_updates"))
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if not skipped:
            return
        dump = self.context.run.attempt / f"non_finite_step_{step:06d}.pt"
        torch.save(fetched(scored), dump)
        self.context.run.event("skipped_update", step=step, batch=str(dump))
        if self.skipped_in_a_row >= self.config.max_skipped_updates:
            raise RlctlError(
                f"the gradient was not finite in {self.skipped_in_a_row} steps in a row, "
                f"the last being step {step}",
                where=str(dump),
                hint="lower the learning rate, or inspect the batch with torch.load; "
                "trainer.max_skipped_updates sets the limit",
            )

    def _report_oom_retries(self, step: int) -> dict[str, float]:
        """Report out-of-memory retries of the step as events, warnings and metrics."""
        metrics: dict[str, float] = {}
        for role, worker in self.roles.models().items():
            retries = worker.pop_oom_retries()
            for retry in retries:
                self.context.run.event("oom_retry", step=step, role=role.name, **asdict(retry))
                logger.warning("step %d, %s: %s", step, role.name, retry)
            if retries:
                metrics[f"{role.name}/oom_retries"] = float(len(retries))
        return metrics
