"""When and what to save, and what to keep: the trainer's side of checkpoints.

A step pays for the copy; a thread waits for the workers, makes the folder whole and removes what need not be kept. One at a time. A write
that fails is told and harms nothing that was there; only if it was the run's last, the run ends with the error.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from transformers import PreTrainedTokenizerBase

from rlctl.errors import ConfigError, ResourceError, RlctlError
from rlctl.files import free_space, fsync
from rlctl.recipes import schema
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.checkpoint.store import CONFIG, CheckpointStore, ControllerState
from rlctl.runtime.roles import Roles
from rlctl.runtime.workers.background import await_written

_ABANDON_S = 10.0  # what a write may still take when the run ends by an error or a signal


@dataclass(frozen=True)
class Retention:
    """The newest `newest` (None: all) are kept, and the `k` best by `metric` (None: no metric) besides."""

    newest: int | None
    metric: str | None
    largest: bool
    k: int

    @classmethod
    def of(cls, trainer: schema.Trainer) -> Retention:
        best = trainer.keep_best
        return cls(trainer.max_ckpt_to_keep, best.metric, best.mode == "max", best.k)

    def superfluous(self, metrics: Mapping[int, Mapping[str, float | None]]) -> list[int]:
        """Of checkpoints given as step -> metrics of that step, those that need not be kept; never the newest. Of equals, the older."""
        steps = sorted(metrics)
        if self.newest is None:
            return []
        values = {
            step: value
            for step in steps
            if (value := metrics[step].get(self.metric or "")) is not None
        }
        best = sorted(
            values, key=lambda step: (-values[step] if self.largest else values[step], step)
        )[: self.k]
        return [step for step in steps[: -self.newest] if step not in best]


class Saver:
    """Saves one run. In this order: `begin` (the copy), the step's line into the metrics, `commit`; at the end `close`."""

    def __init__(
        self,
        run: RunDir,
        roles: Roles,
        tokenizer: PreTrainedTokenizerBase,
        config: schema.Trainer,
        on_whole: Callable[[], None],
    ) -> None:
        self.run = run
        self.roles = roles
        self.tokenizer = tokenizer
        self.on_whole = on_whole  # called when a checkpoint is there and superfluous ones are gone
        self.retention = Retention.of(config)
        self.timeout_s = config.timeouts.call_s
        self.store = CheckpointStore(run.path / "checkpoints")
        self.failure: RlctlError | None = None  # of the latest save
        self.longest_s = 0.0  # from the copy until it was whole
        self._began = 0.0
        self._pending: int | None = None
        self._thread: threading.Thread | None = None
        self._warned = False

    def begin(self, state: ControllerState) -> None:
        """Copy everything that belongs to the checkpoint, once the one before is written."""
        self._wait()
        self._began = time.monotonic()
        step = state.step
        self.failure = None
        try:
            self._check_room(step)
            aside = self.store.begin(step)
            self.tokenizer.save_pretrained(aside / "huggingface")
            shutil.copyfile(self.run.path / CONFIG, aside / CONFIG)
            state.write(aside)
        except (OSError, ResourceError) as error:
            self._failed(step, error)
            return
        self._pending = step
        self.roles.actor.export(aside / "huggingface")
        self.roles.actor.save(aside / "actor")
        if self.roles.critic_role is not None:
            self.roles.critic.save(aside / "critic")
        best = self.retention.metric
        if (
            self.retention.newest is not None
            and best is not None
            and best not in state.metrics
            and not self._warned
        ):
            self._warned = True
            self._warn(
                f"trainer.keep_best.metric={best} is not among the metrics of step {step}, so this checkpoint cannot be a best one"
            )

    def commit(self) -> None:
        """The step's metrics are written: from here on its checkpoint may become whole."""
        if self._pending is None:
            return
        self._thread = threading.Thread(
            target=self._write, args=(self._pending,), name="checkpoint-commit", daemon=True
        )
        self._pending = None
        self._thread.start()

    def __enter__(self) -> Self:
        self.store.clear()
        self.retain()  # what to keep may have changed since the run began
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abandon()
            return
        try:
            self.close()
        except BaseException:  # a signal while it waits
            self.abandon()
            raise

    def close(self) -> None:
        """Wait for the last write. Raises if it failed: a run without its last checkpoint has not given what it was asked for."""
        self._wait()
        if self.failure is not None:
            raise self.failure

    def abandon(self) -> None:
        """The run ends before its time: a write that is about to end may do so, another leaves nothing behind."""
        if self._thread is not None:
            self._thread.join(_ABANDON_S)
        self.store.clear()

    def retain(self) -> None:
        """Remove the checkpoints that need not be kept, judged by the folder alone."""
        metrics = {step: _metrics(self.store.path(step)) for step in self.store.steps()}
        for step in self.retention.superfluous(metrics):
            self.store.remove(step)
            self.run.event("checkpoint_removed", step=step)

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()  # its own waits have deadlines
            self._thread = None

    def _write(self, step: int) -> None:
        aside = self.store.folder / f".{self.store.path(step).name}.partial"
        roles = ["actor"] if self.roles.critic_role is None else ["actor", "critic"]
        try:
            await_written([aside / role for role in roles], self.timeout_s)
            fsync(self.run.metrics)  # after a power cut, no checkpoint is ahead of the metrics
            folder = self.store.finish(step)
            self.run.event("checkpoint", step=step, path=str(folder.relative_to(self.run.path)))
            self.retain()
            self.on_whole()
            self.longest_s = max(self.longest_s, time.monotonic() - self._began)
        except (OSError, RlctlError) as error:
            self._failed(step, error)

    def _check_room(self, step: int) -> None:
        need = self.roles.actor.state_bytes() * 4 // 3  # its weights once more, for `huggingface/`
        need += self.roles.critic.state_bytes() if self.roles.critic_role is not None else 0
        self.store.folder.mkdir(parents=True, exist_ok=True)
        free = free_space(self.store.folder)
        if free < need:
            raise ResourceError(
                f"the checkpoint of step {step} needs {need / 2**20:.0f} MiB and {free / 2**20:.0f} MiB are free"
            )

    def _failed(self, step: int, error: Exception) -> None:
        self._pending = None
        self.store.clear()
        reason = (
            error.problems[0].message
            if isinstance(error, RlctlError)
            else f"{type(error).__name__}: {error}"
        )
        there: Sequence[int] = self.store.steps()
        self.failure = ResourceError(
            f"the checkpoint of step {step} was not written: {reason}",
            where=str(self.store.folder),
            hint=f"the newest that is there: step {there[-1]}"
            if there
            else "no checkpoint is there",
        )
        self.run.event("checkpoint_failed", step=step, reason=reason)
        self._warn(f"{self.failure.problems[0].message}; the run goes on")

    def _warn(self, message: str) -> None:
        print(f"warning: {message}", file=sys.stderr, flush=True)


def _metrics(checkpoint: Path) -> Mapping[str, float | None]:
    """The metrics of a checkpoint's step; none of one whose state cannot be read, which so is no best one."""
    try:
        return ControllerState.read(checkpoint).metrics
    except ConfigError:
        return {}
