"""Background writes of checkpoints: a thread of the worker writes a copy of its state."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlctl.errors import RlctlError
from rlctl.runtime.base.rank_info import RankInfo

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# torch.distributed.checkpoint writes this file last, when every rank has written its part.
WRITTEN = ".metadata"
FAILED = "failed.txt"
# File beside the folders of a checkpoint; a failed write deletes it, for which there is always
# room, while `FAILED` cannot be created on a disk without free space or inodes.
WRITING = ".writing"
PARTS = ("model", "optimizer", "extra", "hf_model")  # of `trainer.checkpoint.save_contents`
_POLL_S = 0.02


class BackgroundWriter:
    """Thread that runs the write jobs of one worker in order.

    A job that fails writes the reason to the file `FAILED` in its folder, if that is possible, and
    deletes the file `WRITING` beside the folder.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.stager: Any = None  # with pinned memory for copies of the state, on a GPU
        # A separate group: the thread's collectives must not mix with those of the training step.
        timeout = timedelta(seconds=rank_info.timeout_s)
        self.group: ProcessGroup | None = None
        if rank_info.world_size > 1:
            from torch.distributed import new_group

            self.group = cast("ProcessGroup", new_group(backend="gloo", timeout=timeout))

    def submit(self, folder: Path, write: Callable[[], None]) -> None:
        """Queue the job `write`, which writes into `folder`."""
        self._thread.submit(_guarded, folder, write)

    def wait(self) -> None:
        """Wait until all jobs have ended."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """End the thread after its jobs; those of several ranks are not waited for."""
        self._thread.shutdown(wait=self.group is None)


def _guarded(folder: Path, write: Callable[[], None]) -> None:
    marker = folder.parent / WRITING
    try:
        if marker.exists():  # else another job has failed, and the checkpoint is given up
            write()
    except BaseException as error:
        if marker.exists():
            with suppress(OSError):
                (folder / FAILED).write_text(_reason(error), encoding="utf-8")
            with suppress(OSError):
                marker.unlink(missing_ok=True)
            return
    if not marker.exists():
        # The controller has renamed the complete checkpoint, so that `folder` does not exist, or
        # has removed a checkpoint that it gave up, and this job may have created files since.
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()


def _reason(error: BaseException) -> str:
    """Return the first cause among all ranks' errors, in one line."""
    inner = next((cause for cause, _ in getattr(error, "failures", {}).values()), error)
    first_line, *_ = str(inner).strip().splitlines() or [""]
    return f"{type(inner).__name__}: {first_line}"


def begin_writing(folder: Path) -> None:
    """Prepare an existing folder for jobs of `BackgroundWriter` that write its subfolders."""
    (folder / WRITING).touch()


def await_written(folders: Sequence[Path], timeout_s: float) -> None:
    """Wait until all ranks have written all of `folders`, which are in one prepared folder.

    Raises `RlctlError` if a rank reports a failure, or after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    parent = folders[0].parent
    while not all((folder / WRITTEN).exists() for folder in folders):
        if not (parent / WRITING).exists():
            raise RlctlError(_reported(parent))
        if time.monotonic() > deadline:
            missing = ", ".join(
                folder.name for folder in folders if not (folder / WRITTEN).exists()
            )
            raise RlctlError(
                f"{missing} was not written within {timeout_s:.0f} s",
                hint="trainer.timeouts.call_s sets the deadline",
            )
        time.sleep(_POLL_S)
    if not (parent / WRITING).exists():  # of a folder that has no `WRITTEN`
        raise RlctlError(_reported(parent))


def _reported(parent: Path) -> str:
    """Return the reason of the failure that a rank reported."""
    reasons = (file.read_text(encoding="utf-8") for file in sorted(parent.glob(f"*/{FAILED}")))
    cause = "the disk may be full" if parent.exists() else "its folder has been removed"
    return next(filter(None, reasons), f"a rank could not write its part: {cause}")
