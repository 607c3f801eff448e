"""Output of trackers' SDKs: to `trackers.log` of the attempt, not to the console."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlctl.tracking.tracker import RunInfo, Tracker

LOG = "trackers.log"
_LOGGERS = (
    "alembic",
    "gradio_client",
    "httpx",
    "huggingface_hub",
    "opentelemetry",
    "requests",
    "urllib3",
)


def log_of(run: RunInfo) -> Path | None:
    """Return the file of the attempt, None for a run without folders of attempts."""
    folder = Path(run.folder or "") / "attempts" / str(run.attempt)
    if not folder.is_dir():
        return None
    return folder / LOG


@contextlib.contextmanager
def captured(run: RunInfo | None, trackers: Mapping[str, Tracker]) -> Iterator[None]:
    """Write what the SDKs of trackers print and log to the file of the attempt.

    Without that file, what they print goes to stderr. Only the block captures stdout, which is for
    data; loggers, and the method `capture_output` of trackers that have it, stay so after it.
    """
    path = log_of(run) if run is not None else None
    if path is None:
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    file = path.open("a", encoding="utf-8", errors="replace", buffering=1)
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    for name in (*_LOGGERS, *(name for name in trackers if ":" not in name)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
    for tracker in trackers.values():
        getattr(tracker, "capture_output", lambda _: None)(file)
    with contextlib.redirect_stdout(file):
        yield
