"""Output of trackers' SDKs: to `trackers.log` of the attempt, not to the console."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rlctl.tracking.tracker import RunInfo

LOG = "trackers.log"
_LOGGERS = (
    "alembic",
    "gradio_client",
    "httpx",
    "huggingface_hub",
    "mlflow",
    "requests",
    "swanlab",
    "trackio",
    "urllib3",
    "wandb",
)


def log_of(run: RunInfo) -> Path | None:
    """Return the file of the attempt, None for a run without folders of attempts."""
    folder = Path(run.folder or "") / "attempts" / str(run.attempt)
    return folder / LOG if folder.is_dir() else None


@contextlib.contextmanager
def captured(run: RunInfo | None) -> Iterator[None]:
    """Write what SDKs print and log to the file of the attempt; stderr if there is none.

    Only the block captures stdout, which is for data. Loggers stay captured after it.
    """
    path = log_of(run) if run is not None else None
    if path is None:
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    file = path.open("a", encoding="utf-8", errors="replace", buffering=1)
    _capture_loggers(file)
    with contextlib.redirect_stdout(file):
        yield
    _capture_console_of_swanlab(file)


def _capture_loggers(file: TextIO) -> None:
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False


def _capture_console_of_swanlab(file: TextIO) -> None:
    """Give SwanLab's console the file: its threads print while the run trains."""
    module = sys.modules.get("swanlab.sdk.internal.pkg.console")
    console = getattr(module, "c", None)
    if console is not None:
        with contextlib.suppress(AttributeError):
            console.file = file
