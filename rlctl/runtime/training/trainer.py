"""The outer loop: collect, learn, validate, save, report. What a step means is the algorithm's; everything around it lives here, once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import psutil
import torch
from transformers import PreTrainedTokenizerBase

from rlctl.errors import RlctlError
from rlctl.recipes import schema
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.algorithms.base import Algorithm
from rlctl.runtime.algorithms.stats import rollout_metrics
from rlctl.runtime.batch import Scored
from rlctl.runtime.checkpoint.saver import Saver
from rlctl.runtime.checkpoint.store import ControllerState
from rlctl.runtime.roles import Roles
from rlctl.runtime.training.clock import Clock, timed_roles
from rlctl.runtime.training.collector import Collector
from rlctl.runtime.training.mismatch import MismatchGuard
from rlctl.runtime.training.stopping import Stopping
from rlctl.runtime.training.validation import Validator, samples_of
from rlctl.runtime.workers.dispatch import split
from rlctl.runtime.workers.rng import rng_state
from rlctl.tracking.fanout import Trackers
from rlctl.tracking.jsonl import write_samples
from rlctl.tracking.metrics import to_floats

# Which phases are divided by response tokens and which by all tokens to give `timing_per_token_ms/*`.
_PER_RESPONSE_TOKEN = ("gen",)
_PER_TOKEN = ("ref", "values", "adv", "update_critic", "update_actor")


@dataclass(frozen=True)
class RunContext:
    """What a run is made of."""

    algorithm: Algorithm
    roles: Roles
    collector: Collector
    validator: Validator | None
    tokenizer: PreTrainedTokenizerBase
    trackers: Trackers
    run: RunDir
    num_steps: int
    num_devices: int  # of all pools
    num_ranks: int  # of the actor
    max_response_length: int
    on_phase: Callable[[str], None]  # something else begins
    on_checkpoint: Callable[[], None]  # there is a new whole one
    end_by: float | None  # seconds since the epoch: when it should be saved and over


@dataclass(frozen=True)
class TrainerState:
    """Where training stands: the last step that is done, and how many in a row until then had skipped updates. A run that goes on has
    validated what it starts from; a `new_run` has not."""

    step: int = 0
    skipped_in_a_row: int = 0
    new_run: bool = True


class Trainer:
    """Runs the steps of one run. `run` returns when all are done, or raises."""

    def __init__(self, parts: RunContext, config: schema.Trainer, progress: TrainerState) -> None:
        self.parts = parts
        self.config = config
        self.progress = progress
        self.clock = Clock(parts.on_phase)
        self.mismatch = MismatchGuard(config.mismatch.halt, parts.run)
        self.roles = self.mismatch.watch(timed_roles(parts.roles, self.clock))
        self.saver = Saver(parts.run, parts.roles, parts.tokenizer, config, parts.on_checkpoint)
        self.stopping = Stopping(
            config.timeouts.stop_s,
            lambda line: print(line, file=sys.stderr, flush=True),
            parts.run.stop_request,
            parts.end_by,
        )
        self.skipped_in_a_row = progress.skipped_in_a_row

    def run(self) -> None:
        """Validation before training, then every step: learn, validate and save as often as the config says, report."""
        done = self.progress.step
        with self.stopping, self.saver:
            if self.progress.new_run and (self.config.val_before_train or self.config.val_only):
                self.parts.trackers.log(done, self._validate(done))
            if self.stopping.asked:
                raise self.stopping.error()
            for step in range(done + 1, 0 if self.config.val_only else self.parts.num_steps + 1):
                metrics = self._train(step)
                if self._due(self.config.test_freq, step):
                    metrics |= self._validate(step)
                self.stopping.look(self.saver.longest_s)
                saved = self._due(self.config.save_freq, step) or self.stopping.asked
                if saved:
                    metrics |= self._save(step, metrics)
                self.parts.trackers.log(step, metrics)
                self.saver.commit()
                if self.stopping.asked:
                    if not saved:  # it was asked for a moment ago
                        self._save(step, metrics)
                        self.saver.commit()
                    self.saver.close()
                    raise self.stopping.error()

    def _due(self, every: int, step: int) -> bool:
        """Every so many steps, and at the end; never for -1."""
        return every > 0 and (step % every == 0 or step == self.parts.num_steps)

    def _train(self, step: int) -> dict[str, float]:
        begin = time.perf_counter()
        self.clock.take()
        self.mismatch.step = step
        with self.clock.phase("adv"):  # what the controller itself does between the calls of roles
            scored, filtered = self.parts.collector.collect(self.roles, step)
            metrics = to_floats(self.parts.algorithm.learn(scored, self.roles, step)) | filtered
        seconds = time.perf_counter() - begin
        self._stop_on_skipped_updates(step, metrics, scored)
        metrics |= self._report_oom_retries(step)
        metrics |= to_floats(rollout_metrics(scored, self.parts.max_response_length)) | self._dump(
            step, scored
        )
        return (
            metrics
            | self._speed(scored, seconds)
            | {"training/global_step": step, "training/epoch": self.parts.collector.epoch()}
        )

    def _dump(self, step: int, scored: Scored) -> dict[str, float]:
        """Write the step's answers down, where that is asked for."""
        if self.config.rollout_data_dir is None:
            return {}
        begin = time.perf_counter()
        write_samples(self.parts.run.rollouts(step), samples_of(scored, self.parts.tokenizer))
        return {"timing_s/dump_rollout_generations": time.perf_counter() - begin}

    def _validate(self, step: int) -> dict[str, float]:
        if self.parts.validator is None:
            return {}
        begin = time.perf_counter()
        validation = self.parts.validator.run(self.roles)
        self.parts.trackers.generations(step, validation.samples)
        return validation.metrics | {"timing_s/testing": time.perf_counter() - begin}

    def _save(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Only the copy is made here; `Saver` writes it while the next step runs."""
        begin = time.perf_counter()
        self.parts.on_phase("save_checkpoint")
        record = self.parts.run.record
        state = ControllerState(
            step=step,
            run=record.id,
            algorithm=self.parts.algorithm.state_dict(),
            skipped_in_a_row=self.skipped_in_a_row,
            rng=rng_state(),
            metrics=dict(metrics),
            loader=self.parts.collector.state_dict(),
            trackers=dict(record.trackers),
            num_ranks=self.parts.num_devices,
            seeds=dict(record.seeds),
        )
        self.saver.begin(state)
        return {"timing_s/save_checkpoint": time.perf_counter() - begin}

    def _stop_on_skipped_updates(
        self, step: int, metrics: dict[str, float], scored: Scored
    ) -> None:
        """An update whose gradient was not finite has been skipped by the workers. Keep the batch; too many in a row end the run."""
        skipped = sum(value for name, value in metrics.items() if name.endswith("/skipped_updates"))
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if not skipped:
            return
        dump = self.parts.run.attempt / f"non_finite_step_{step:06d}.pt"
        torch.save(scored, dump)
        self.parts.run.event("skipped_update", step=step, batch=str(dump))
        if self.skipped_in_a_row >= self.config.max_skipped_updates:
            raise RlctlError(
                f"the gradient was not finite in {self.skipped_in_a_row} steps in a row, the last being step {step}",
                where=str(dump),
                hint="a lower learning rate, or look at the batch with torch.load; trainer.max_skipped_updates sets the limit",
            )

    def _report_oom_retries(self, step: int) -> dict[str, float]:
        """Passes that lacked memory were done again in smaller micro-batches: if there were any, an event, a line and a metric say so."""
        roles = {
            "actor": self.roles.actor,
            "critic": self.roles.critic_role,
            "reference": self.roles.reference_role,
        }
        taken = {name: role.pop_oom_retries() for name, role in roles.items() if role is not None}
        for name, halvings in taken.items():
            for halving in halvings:
                self.parts.run.event("oom_retry", step=step, role=name, **asdict(halving))
                print(f"warning: step {step}, {name}: {halving}", file=sys.stderr, flush=True)
        return {
            f"{name}/oom_retries": float(len(halvings))
            for name, halvings in taken.items()
            if halvings
        }

    def _speed(self, scored: Scored, seconds: float) -> dict[str, float]:
        phases = self.clock.take()
        num_response, num_tokens = (
            int(scored.response_ids.lengths.sum()),
            int(scored.num_tokens.sum()),
        )
        metrics = {f"timing_s/{name}": value for name, value in phases.items()} | {
            "timing_s/step": seconds
        }
        per_token = dict.fromkeys(_PER_RESPONSE_TOKEN, num_response) | dict.fromkeys(
            _PER_TOKEN, num_tokens
        )
        metrics |= {
            f"timing_per_token_ms/{name}": 1000 * phases[name] / n
            for name, n in per_token.items()
            if name in phases
        }
        return metrics | {
            "perf/total_num_tokens": num_tokens,
            "perf/time_per_step": seconds,
            "perf/throughput": num_tokens / seconds / self.parts.num_devices,
            "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
            **_global_lengths(scored, self.parts.num_ranks),
        }


def _global_lengths(scored: Scored, num_ranks: int) -> dict[str, float]:
    """Tokens of a rank if rows were dealt out in order, and their mean; `balanced_*` after sharing them out by cost."""
    plain, balanced = (
        [int(scored.num_tokens[part].sum()) for part in split(scored, num_ranks, balanced=by_cost)]
        for by_cost in (False, True)
    )
    return {
        "global_seqlen/min": min(plain),
        "global_seqlen/max": max(plain),
        "global_seqlen/minmax_diff": max(plain) - min(plain),
        "global_seqlen/balanced_min": min(balanced),
        "global_seqlen/balanced_max": max(balanced),
        "global_seqlen/mean": sum(plain) / num_ranks,
    }
