"""Saving of checkpoints during training.

The training step only copies the state. A thread waits for the workers' writes, completes the
checkpoint and removes those that retention drops; one checkpoint at a time. A failed write is
reported and leaves earlier checkpoints intact; if it was the last one, the run ends with its error.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from transformers import PreTrainedTokenizerBase

from rlctl.errors import ResourceError, RlctlError
from rlctl.files import free_space, fsync
from rlctl.recipes import schema
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.base.roles import Roles
from rlctl.runtime.training.checkpoint_store import (
    CONFIG,
    ROWS,
    CheckpointStore,
    ControllerState,
    Retention,
    metrics_at,
)
from rlctl.runtime.workers.background import await_written

LOG = logging.getLogger(__name__)

_ABANDON_S = 10.0  # time left for a write when the run ends by an error or a signal


class Saver:
    """Saver of one run's checkpoints.

    The order of calls is `begin`, which copies the state, the step's line in metrics.jsonl,
    `commit`, and at the end `close`.
    """

    def __init__(
        self,
        run: RunDir,
        roles: Roles,
        tokenizer: PreTrainedTokenizerBase,
        config: schema.Trainer,
        on_checkpoint: Callable[[], None],
    ) -> None:
        self.run = run
        self.roles = roles
        self.tokenizer = tokenizer
        self.on_checkpoint = (
            on_checkpoint  # called when a checkpoint is complete and others are removed
        )
        self.retention = Retention.from_config(config)
        self.contents = config.checkpoint.save_contents
        self.max_optimizers = config.checkpoint.max_optimizers_to_keep
        self.timeout_s = config.timeouts.call_s
        self.store = CheckpointStore(run.path / "checkpoints")
        self.failure: RlctlError | None = None  # of the latest save
        self.longest_s = 0.0  # from the copy to the complete checkpoint
        self._began = 0.0
        self._pending: int | None = None
        self._rollouts: Mapping[str, Callable[[Path], None]] = {}
        self._thread: threading.Thread | None = None
        self._warned = False

    def begin(self, state: ControllerState, rollouts: Mapping[str, Callable[[Path], None]]) -> None:
        """Copy the state of the run, after the previous checkpoint is written.

        `rollouts` write those that no step has learned from, by the name of their folder.
        """
        self._wait()
        self._began = time.monotonic()
        step = state.step
        self.failure = None
        try:
            self._check_space(step)
            aside = self.store.begin(step)
            export = aside / "huggingface" if "hf_model" in self.contents else None
            if export is not None:
                self.tokenizer.save_pretrained(export)
            shutil.copyfile(self.run.path / CONFIG, aside / CONFIG)
            state.write(aside)
        except (OSError, ValueError, ResourceError) as error:  # ValueError: the state is no JSON
            self._failed(step, error)
            return
        self._pending = step
        self._rollouts = rollouts
        trained = self.roles.trained()
        for role, member in self.roles.learning().items():
            member.save(aside / role.name, export if member is trained else None, self.contents)
        best = self.retention.metric
        if (
            self.retention.newest is not None
            and best is not None
            and best not in state.metrics
            and not state.pending
            and not self._warned
        ):
            self._warned = True
            LOG.warning(
                f"trainer.keep_best.metric={best} is not among the metrics of step {step}, "
                "so this checkpoint cannot be one of the best"
            )

    def commit(self, rows: bytes = b"") -> None:
        """Complete the checkpoint in the background, now that the step's metrics are reported.

        It gets the `rows` of `metrics.jsonl` that may not be on disk: a resumed run restores them.
        """
        if self._pending is None:
            return
        self._thread = threading.Thread(
            target=self._write, args=(self._pending, rows), name="checkpoint-commit", daemon=True
        )
        self._pending = None
        self._thread.start()

    def __enter__(self) -> Self:
        self.store.clear()
        self.store.folder.mkdir(parents=True, exist_ok=True)
        for member in self.roles.learning().values():
            member.check_folder(self.store.folder.absolute())
        self.retain()  # the retention settings may have changed since the run started
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self.abandon()
            return
        try:
            self.close()
        except BaseException:  # a signal while it waits
            self.abandon()
            raise

    def close(self) -> None:
        """Wait for the last write; raise its error if it failed."""
        self._wait()
        if self.failure is not None:
            raise self.failure

    def abandon(self) -> None:
        """Give a running write a short time to finish, then remove what is incomplete."""
        if self._thread is not None:
            self._thread.join(_ABANDON_S)
        self.store.clear()

    def retain(self) -> None:
        """Remove the checkpoints in the folder that retention does not keep, as far as possible."""
        metrics = {step: metrics_at(self.store.path(step)) for step in self.store.steps()}
        for step in self.retention.to_delete(metrics):
            try:
                self.store.remove(step)
                self.run.event("checkpoint_removed", step=step)
            except OSError as error:
                LOG.warning("the checkpoint of step %d could not be removed: %s", step, error)
        if self.max_optimizers is not None:
            from rlctl.runtime.training.drop_optimizers import drop_optimizers

            drop_optimizers(self.store, self.max_optimizers)

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()  # the waits of the thread have timeouts
            self._thread = None

    def _write(self, step: int, rows: bytes = b"") -> None:
        aside = self.store.folder / f".{self.store.path(step).name}.partial"
        try:
            for name, write in self._rollouts.items():
                write(aside / name)
            await_written([aside / role.name for role in self.roles.learning()], self.timeout_s)
            if rows:
                (aside / ROWS).write_bytes(rows)
            fsync(self.run.metrics)  # after a power failure no checkpoint is ahead of the metrics
            folder = self.store.finish(step, self.contents)
            self.run.event("checkpoint", step=step, path=str(folder.relative_to(self.run.path)))
        except Exception as error:  # such as safetensors': an unknown one is a failure, too
            self._failed(step, error)
            return
        self.longest_s = max(self.longest_s, time.monotonic() - self._began)
        self.retain()
        self.on_checkpoint()

    def _check_space(self, step: int) -> None:
        need = self.roles.trained().state_bytes() // 3  # the weights again, in `huggingface/`
        need += sum(member.state_bytes() for member in self.roles.learning().values())
        self.store.folder.mkdir(parents=True, exist_ok=True)
        free = free_space(self.store.folder)
        if free < need:
            raise ResourceError(
                f"the checkpoint of step {step} needs {need / 2**20:.0f} MiB and "
                f"{free / 2**20:.0f} MiB are free"
            )

    def _failed(self, step: int, error: Exception) -> None:
        self._pending = None
        with suppress(OSError):
            self.store.clear()
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, RlctlError):
            reason = error.problems[0].message
        steps = self.store.steps()
        hint = "the run has no checkpoint"
        if steps:
            hint = (
                f"the latest checkpoint is that of step {steps[-1]}: free some space, then "
                f"`rlctl resume {self.run.path.name}` continues from it; "
                "trainer.max_ckpt_to_keep=1 keeps fewer"
            )
        self.failure = ResourceError(
            f"the checkpoint of step {step} was not written: {reason}",
            where=str(self.store.folder),
            hint=hint,
        )
        self.run.event("checkpoint_failed", step=step, reason=reason)
        LOG.warning("%s; the run continues", self.failure.problems[0].message)
