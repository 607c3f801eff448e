"""The training loop: collect, learn, validate, save, report.

The algorithm defines `collect` and `learn`; everything around them is here, once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from rlctl.errors import RlctlError
from rlctl.plugins.result_check import check_result
from rlctl.recipes import schema
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.algorithms.base import Algorithm, Needs
from rlctl.runtime.algorithms.mismatch import RolloutMismatch
from rlctl.runtime.base.batch import Rollouts, Scored
from rlctl.runtime.base.clock import Clock
from rlctl.runtime.base.metrics import Metrics, to_floats
from rlctl.runtime.base.roles import Roles
from rlctl.runtime.rewards.role import RuleReward
from rlctl.runtime.training.checkpoint_store import GROUPS, ROLLOUTS, ControllerState
from rlctl.runtime.training.collector import Collector
from rlctl.runtime.training.profile import StepProfiler
from rlctl.runtime.training.rollout_source import (
    Collected,
    CollectionSetup,
    InStep,
    RolloutSource,
    SourceState,
    StreamState,
)
from rlctl.runtime.training.saver import Saver
from rlctl.runtime.training.step_metrics import length_metrics, speed_metrics
from rlctl.runtime.training.stopping import Stopping
from rlctl.runtime.training.validation import ModelValidation, Validator, first_samples, to_samples
from rlctl.runtime.workers.interrupts import INTERRUPTS
from rlctl.runtime.workers.rng import rng_state
from rlctl.tracking.fanout import Trackers

if TYPE_CHECKING:
    from rlctl.runtime.generation.stream import Stream
    from rlctl.runtime.training.listeners import Listeners
    from rlctl.runtime.training.step_failures import StepFailures

logger = logging.getLogger(__name__)

NO_CHECKPOINTS = (
    "no checkpoints are written, so a kill or crash loses every step: trainer.save_every=30m saves "
    "by the clock, trainer.save_freq=N every N steps"
)


@dataclass(frozen=True)
class RunContext:
    """The parts of one run."""

    algorithm: Algorithm
    roles: Roles
    collector: Collector
    max_staleness: int  # steps that rollouts are ahead of learning
    stream: Stream | None  # of `async_training.schedule=eager`
    sampling_seed: int
    engines_apart: bool  # the rollout engines have a separate pool
    validator: Validator | ModelValidation | None
    tokenizer: PreTrainedTokenizerBase
    trackers: Trackers
    run: RunDir
    num_steps: int
    num_devices: int  # of all pools
    num_ranks: int  # of the trained role, with different rows
    measure: Callable[[Scored], Metrics]  # lengths and rewards
    on_phase: Callable[[str], None]  # called when a phase begins
    profiler: StepProfiler
    listeners: Listeners | None  # plug-ins, if one is on
    end_by: float | None  # deadline by time.monotonic; None: no deadline
    interrupt_workers: Callable[[], None]  # interrupts their calls that only read
    reward: RuleReward


@dataclass(frozen=True)
class TrainerState:
    """The point at which training starts."""

    step: int = 0  # the last step that is done
    skipped_in_a_row: int = 0  # steps with skipped updates, up to and including `step`
    ahead: Collected | None = None  # rollouts that step `step` + 1 learns from
    stream: StreamState | None = None  # groups of later steps
    new_run: bool = True  # False for a resumed run, which has validated its checkpoint already
    pending: dict[str, float] | None = None  # metrics of `step`, whose validation is still to run


class Trainer:
    """Runs the steps of one run. `run` returns when all are done, or raises."""

    def __init__(self, context: RunContext, config: schema.Trainer, state: TrainerState) -> None:
        self.context = context
        self.config = config
        self.state = state
        self.clock = Clock(context.on_phase)
        # Engines that generate ahead of learning have another policy on purpose.
        halt = None if context.max_staleness else config.mismatch.halt
        self.roles = replace(context.roles, max_probs_diff=halt)
        if context.listeners is not None:
            self.roles = context.listeners.wrap(self.roles)
        self.saver = Saver(
            context.run, context.roles, context.tokenizer, config, self._report_checkpoint
        )
        self.stopping = Stopping(
            config.timeouts.stop_s,
            logger.info,
            context.run.stop_request,
            context.end_by,
            context.interrupt_workers,
        )
        self.finished: tuple[ControllerState, SourceState] | None = None  # after the last step
        self.saved: ControllerState | None = None  # of the last checkpoint of this attempt
        self.saved_at = time.monotonic()  # or the start
        self.failures: StepFailures | None = None  # of rewards, from the first one on
        self.save_every_s = config.save_every_s
        self.skipped_in_a_row = state.skipped_in_a_row
        with self.clock.running():
            self.source = self._source()

    def _source(self) -> RolloutSource:
        """Return the source of rollouts, ahead of learning if that is configured."""
        context = self.context
        if not context.max_staleness:
            return InStep(context.collector, self.roles, self.state.ahead)
        from rlctl.runtime.training.source_ahead import source_ahead

        # The last step's checkpoint has the rollouts of the next one, in case the run is extended.
        last = context.num_steps + self.config.saves
        if context.stream is not None and self.config.val_only:
            last = 0
        publish = self.roles.generator.publish_weights
        collection = CollectionSetup(
            context.collector, context.roles, publish, self.clock, last, self.state.ahead
        )
        return source_ahead(context, self.state, collection)

    def run(self) -> None:
        """Validate, then train step by step; validate, save and report as configured.

        Raises KeyboardInterrupt, Terminated or TimeUp after a request to stop, once the last
        finished step is saved.
        """
        with self.stopping, self.saver, self.clock.running():
            try:
                self._run()
            except BaseException:
                if not self.stopping.interrupted:
                    raise
                self._save_finished()
                raise self.stopping.error() from None

    def _save_finished(self) -> None:
        """Save the state after the last finished step, if this attempt has finished one."""
        if self.finished is None:
            return
        try:
            self._save()
            self.saver.commit(self.context.trackers.not_certain)
            self.saver.close()
        except RlctlError as error:
            logger.warning("step %d is not saved: %s", self.finished[0].step, error)
            raise

    def _run(self) -> None:
        done = self.state.step
        metrics: dict[str, float] = {}
        if not (self.config.saves or self.config.val_only):
            logger.info(NO_CHECKPOINTS)
        if self.state.pending is not None:
            self._complete(done, dict(self.state.pending), validates=True)
        elif self.state.new_run and (self.config.val_before_train or self.config.val_only):
            metrics = self._validate(done)
            self.context.trackers.log(done, metrics)
        if self.stopping.asked:
            raise self.stopping.error()
        if self._ends(done, metrics) or self.config.val_only:
            return
        for step in range(done + 1, self.context.num_steps + 1):
            self.stopping.watches = step < self.context.num_steps
            metrics = self._train(step)
            self._complete(step, metrics, self._due(self.config.test_freq, step))
            if step < self.context.num_steps and self._ends(step, metrics):
                if self.config.saves:
                    self._save()
                    self.saver.commit(self.context.trackers.not_certain)
                return

    def _complete(self, step: int, metrics: dict[str, float], validates: bool) -> None:
        """Validate, save and report a step that is trained. Raises a request to stop."""
        if validates:
            self._mark(step, metrics, pending=True)
            metrics |= self._validate(step)
        self._mark(step, metrics)
        is_last = step == self.context.num_steps
        if not is_last:  # after the last step there is nothing left to stop
            self.stopping.check(self.saver.longest_s)
        stops = self.stopping.asked and not is_last
        if self._due(self.config.save_freq, step) or self._due_by_clock(step) or stops:
            metrics |= self._save()
        self.context.trackers.log(step, metrics)
        self.saver.commit(self.context.trackers.not_certain)
        if self.stopping.asked and not is_last:
            self._save()  # if the request came after the check above
            self.saver.commit(self.context.trackers.not_certain)
            self.saver.close()
            raise self.stopping.error()

    def _ends(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return True if a listener, such as `trainer.stop_when`, ends the run with this step."""
        listeners = self.context.listeners
        return listeners is not None and listeners.on_step(step, metrics)

    def _report_checkpoint(self) -> None:
        if self.context.listeners is not None:
            self.context.listeners.on_checkpoint()

    def _train(self, step: int) -> dict[str, float]:
        """Run one training step and return its metrics."""
        begin = time.perf_counter()
        self.clock.take()
        try:
            # "adv" is the work of the controller, between the calls of roles
            profiled = self.context.profiler.step(step)
            with profiled, self.clock.phase("adv"), INTERRUPTS.window():
                scored, filter_metrics = self.source.take(step)
                learn = self.context.algorithm.learn
                learned = learn(scored, self.roles, step)
                check_result(learn, isinstance(learned, Mapping), learned, "metrics by name")
            filter_metrics = filter_metrics | self.source.end_step()
        except RolloutMismatch as error:
            from rlctl.runtime.training.skipped_updates import record_mismatch

            raise record_mismatch(error, step, self.context.run, self.roles) from None
        if self.context.run.is_gone():
            from rlctl.runs.lost_folder import folder_gone

            raise folder_gone(self.context.run, step)
        seconds = time.perf_counter() - begin
        metrics = to_floats(learned) | filter_metrics
        self._stop_on_skipped_updates(step, metrics)
        metrics |= self._check_failures(scored, step)
        metrics |= self._report_oom_retries(step)
        metrics |= to_floats(self.context.measure(scored))
        self._keep_some(step, scored)
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

    def _due_by_clock(self, step: int) -> bool:
        """Return whether `trainer.save_every` has passed since the last save, or it is the end."""
        if self.save_every_s is None:
            return False
        since = time.monotonic() - self.saved_at
        return since >= self.save_every_s or step == self.context.num_steps

    def _validate(self, step: int) -> dict[str, float]:
        if self.context.validator is None:
            return {}
        begin = time.perf_counter()
        with INTERRUPTS.window(), self.source.quiet:
            validation = self.context.validator.run(self.roles)
        self.context.trackers.generations(step, validation.samples)
        if validation.images:
            from rlctl.data_prep.thumbnails import write_thumbnails

            write_thumbnails(self.context.run.path, validation.images)
        return validation.metrics | {"timing_s/testing": time.perf_counter() - begin}

    def _mark(self, step: int, metrics: dict[str, float], pending: bool = False) -> None:
        """Keep the state after `step`, which is saved if a later step is interrupted.

        Weights and optimizer change only in updates, which are not interrupted.
        """
        for member in self.roles.learning().values():
            member.mark_step()
        record = self.context.run.record
        source = self.source.state()
        state = ControllerState(
            step=step,
            run=record.id,
            algorithm=self.context.algorithm.state_dict(),
            skipped_in_a_row=self.skipped_in_a_row,
            rng=rng_state(),
            metrics=dict(metrics),
            loader=source.loader,
            reward=source.reward,
            trackers=dict(record.trackers),
            num_ranks=self.context.num_devices,
            seeds=dict(record.seeds),
            ahead=source.ahead
            and {"weights": source.ahead.weights, "metrics": source.ahead.metrics},
            pending=pending,
        )
        self.finished = state, source

    def _save(self) -> dict[str, float]:
        """Copy the marked state to memory; `Saver` writes it while the next step runs.

        No-op for a state that is saved already.
        """
        begin = time.perf_counter()
        assert self.finished is not None, "a step was marked"
        state, source = self.finished
        if state is self.saved:
            return {}
        self.context.on_phase("save_checkpoint")
        stream = source.stream()
        stored = {
            ROLLOUTS: source.ahead and source.ahead.scored,
            GROUPS: stream and stream.finished_rollouts,
        }
        self.saver.begin(
            replace(state, stream=stream and stream.to_dict()),
            {name: self._writer(worker) for name, worker in stored.items() if worker},
        )
        self.saved, self.saved_at = state, time.monotonic()
        return {"timing_s/save_checkpoint": time.perf_counter() - begin}

    def _writer(self, rollouts: Rollouts) -> Callable[[Path], None]:
        """Return the function that writes rollouts to a folder of a checkpoint."""
        numbers = self.context.collector.loader.prompts.rows.positions_of(rollouts.rows)
        from rlctl.runtime.training.stored_rollouts import write_rollouts

        return lambda folder: write_rollouts(folder, rollouts, numbers)

    def _keep_some(self, step: int, scored: Scored) -> None:
        """Record the responses to a few prompts of the step: `trainer.log_train_generations`."""
        number = self.config.log_train_generations
        if not number or Needs.GROUPS not in self.context.algorithm.needs:
            return
        samples = first_samples(scored, number, self.context.tokenizer)
        self.context.trackers.trained_on(step, samples)

    def _dump(self, step: int, scored: Scored) -> dict[str, float]:
        """Write the step's responses to `trainer.rollout_data_dir`, if that is set."""
        if self.config.rollout_data_dir is None:
            return {}
        begin = time.perf_counter()
        self.context.trackers.responses(step, to_samples(scored, self.context.tokenizer))
        return {"timing_s/dump_rollout_generations": time.perf_counter() - begin}

    def _stop_on_skipped_updates(self, step: int, metrics: dict[str, float]) -> None:
        """Record updates that workers skipped, as their gradients were not finite."""
        skipped = sum(value for name, value in metrics.items() if name.endswith("/skipped_updates"))
        if not skipped:
            self.skipped_in_a_row = 0
            return
        from rlctl.runtime.training.skipped_updates import record

        self.skipped_in_a_row += 1
        most = self.config.max_skipped_updates
        record(self.context.run, step, self.roles, self.skipped_in_a_row, most)

    def _check_failures(self, scored: Scored, step: int) -> dict[str, float]:
        """Return metrics of failed rewards. Raises RlctlError after too many steps without any."""
        if self.context.reward.first_error is None:
            return {}
        from rlctl.runtime.training.step_failures import StepFailures

        self.failures = self.failures or StepFailures(self.context.reward)
        return self.failures.check(scored, step, self.context.trackers.alarms)

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
