"""TensorBoard tracker: event files in the run's folder, or in `TENSORBOARD_DIR`.

It uses tensorboardX's record writer and not its `SummaryWriter`: on a full disk the thread of the
latter ends silently, and then the process never exits. The record writer raises, and a step is on
disk when `log` returns.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]  # made at import
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import scalar, text

from rlctl.tracking.destination import Destination
from rlctl.tracking.settings import TensorBoardParams
from rlctl.tracking.tracker import RunInfo, Sample


class TensorBoardTracker:
    """TensorBoard tracker (`Tracker`).

    Values are stored as 32-bit floats; characters that tags must not contain become `_`.
    """

    shows_samples = True
    Params = TensorBoardParams
    events: EventsWriter  # from `start` on, like `folder`
    folder: Path

    def __init__(self, params: TensorBoardParams = TensorBoardParams()) -> None:
        self.params = params

    def start(self, run: RunInfo) -> str:
        """Open a new event file and return its folder as the run's id.

        TensorBoard hides steps after `resume_step` in the files of earlier attempts.
        """
        root = self.params.log_dir or os.environ.get("TENSORBOARD_DIR")
        folder = Path(root) / run.project / run.name if root else run.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.absolute()
        self.events = EventsWriter(
            str(folder / "events"),
            f".{time.time_ns()}",  # else two attempts in one second share a file
        )
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
            config = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
            self._write(0, text("config", f"```yaml\n{config}```"))
        self.events.flush()
        return known

    def destination(self) -> Destination:
        """Return the folder of the event files."""
        look = f"tensorboard --logdir {shlex.quote(str(self.folder))}"
        return Destination("local", place=str(self.folder), look=look)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step to disk."""
        parts = [scalar(name, float(value)) for name, value in metrics.items()]
        self._write(step, Summary(value=[value for part in parts for value in part.value]))

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Write each sample as a text `val/generations/N`."""
        for number, sample in enumerate(samples):
            head = f"score {sample.score:g}, truth {sample.ground_truth}"
            markdown = f"{head}\n\n{_code_block(sample.prompt)}\n\n{_code_block(sample.response)}"
            self._write(step, text(f"val/generations/{number}", markdown))

    def finish(self, state: str) -> None:  # noqa: ARG002
        """Close the event file."""
        self.events.close()

    def _write(self, step: int, summary: Summary) -> None:
        self.events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        self.events.flush()


def _code_block(content: str) -> str:
    """Format as a Markdown code block, so that generated text is not rendered as markup."""
    return "\n".join(f"    {line}" for line in content.splitlines())
