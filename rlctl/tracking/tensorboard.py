"""The run as TensorBoard's event files, in the run's folder (`TENSORBOARD_DIR` moves them): scalars, validation answers as texts.

tensorboardX's own `SummaryWriter` hands everything to a thread that dies silently of a full disk and is then waited for for ever, also
when the process ends. Its record writer below that raises instead, and a step is on disk when `log` returns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]  # made at import
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import scalar, text

from rlctl.tracking.tracker import RunInfo, Sample


class TensorBoardTracker:
    """Implements `Tracker`. Values are 32-bit floats, as TensorBoard's are; characters that its tags must not have become `_`."""

    def __init__(self) -> None:
        self.events: EventsWriter | None = None

    def start(self, run: RunInfo) -> str:
        """Open a file beside those of earlier attempts, whose steps after `resume_step` are hidden from then on."""
        root = os.environ.get("TENSORBOARD_DIR")
        folder = Path(root) / run.project / run.name if root else run.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self.events = EventsWriter(
            str(folder / "events"), f".{time.time_ns()}"
        )  # two in a second are two files
        known = str(folder.absolute()) if root else folder.name
        if run.trackers.get("tensorboard") == known:
            self.events.write_event(
                Event(
                    wall_time=time.time(),
                    step=run.resume_step + 1,
                    session_log=SessionLog(status="START"),
                )
            )
        else:
            self._write(
                0,
                text(
                    "config",
                    f"```yaml\n{yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)}```",
                ),
            )
        self.events.flush()
        return known

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = [scalar(name, float(value)) for name, value in metrics.items()]
        self._write(step, Summary(value=[value for part in parts for value in part.value]))

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        for number, each in enumerate(samples):
            answer = f"score {each.score:g}, truth {each.ground_truth}\n\n{_quoted(each.prompt)}\n\n{_quoted(each.response)}"
            self._write(step, text(f"val/generations/{number}", answer))

    def finish(self, state: str) -> None:  # noqa: ARG002
        assert self.events is not None
        self.events.close()

    def _write(self, step: int, summary: Summary) -> None:
        assert self.events is not None
        self.events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        self.events.flush()


def _quoted(words: str) -> str:
    """As a block of Markdown's code, in which nothing that a model writes is markup."""
    return "\n".join(f"    {line}" for line in words.splitlines())
