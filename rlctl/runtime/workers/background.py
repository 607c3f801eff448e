"""Writing to disk while work goes on: a worker copies what is to be saved, and a thread of its own writes the copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch.distributed as dist

from rlctl.errors import RlctlError
from rlctl.runtime.rank_info import RankInfo

# A folder of torch.distributed.checkpoint gets this file last, from the coordinator, when every rank has written its part.
WRITTEN = ".metadata"
FAILED = "failed.txt"
_POLL_S = 0.02


class BackgroundWriter:
    """Jobs of one worker, done one after the other in a thread. What goes wrong is left in the job's folder as `FAILED`."""

    def __init__(self, rank_info: RankInfo) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        # Its own group: the thread's collectives must never mix with those of the step that runs meanwhile.
        timeout = timedelta(seconds=rank_info.timeout_s)
        self.group: dist.ProcessGroup | None = None
        if rank_info.world_size > 1:
            self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))

    def submit(self, folder: Path, write: Callable[[], None]) -> None:
        """Do `write`, which writes into `folder`, after everything that was submitted before."""
        self._thread.submit(_guarded, folder, write)


def _guarded(folder: Path, write: Callable[[], None]) -> None:
    try:
        write()
    except BaseException as error:
        with suppress(
            OSError
        ):  # the disk may be full; the file's name alone says that something failed
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FAILED).touch()
            (folder / FAILED).write_text(_reason(error))


def _reason(error: BaseException) -> str:
    """The first cause of all ranks' errors, in one line."""
    inner = next((cause for cause, _ in getattr(error, "failures", {}).values()), error)
    return f"{type(inner).__name__}: {str(inner).strip().splitlines()[0] if str(inner).strip() else ''}"


def await_written(folders: Sequence[Path], timeout_s: float) -> None:
    """Wait until all ranks have written all of `folders`. `RlctlError` when one says that it failed, or after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not all((folder / WRITTEN).exists() for folder in folders):
        for folder in {inner for each in folders for inner in each.parent.iterdir()}:
            if (folder / FAILED).exists():
                time.sleep(_POLL_S)  # its text is written after its name
                raise RlctlError((folder / FAILED).read_text() or "a rank could not write its part")
        if time.monotonic() > deadline:
            missing = ", ".join(
                folder.name for folder in folders if not (folder / WRITTEN).exists()
            )
            raise RlctlError(
                f"{missing} was not written within {timeout_s:.0f} s",
                hint="trainer.timeouts.call_s sets the deadline",
            )
        time.sleep(_POLL_S)
