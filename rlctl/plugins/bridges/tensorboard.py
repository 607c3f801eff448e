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
from typing import Any

import yaml
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.api_pb2 import Status  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]  # made at import
from tensorboardX.proto.plugin_hparams_pb2 import (
    HParamsPluginData,  # pyright: ignore[reportAttributeAccessIssue]
    SessionEndInfo,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import hparams, scalar, text

from rlctl.tracking.alarms import Alarm
from rlctl.tracking.destination import Destination
from rlctl.tracking.logger_settings import TensorBoardParams
from rlctl.tracking.shown import SampleTable, changed_keys, flat_config, link
from rlctl.tracking.tracker import RunInfo, Sample

_OLD_FOLDER = "tensorboard"  # of earlier versions, which TensorBoard shows in the name of the run
# Settings in the tab HParams, besides those that the user changed.
_COMPARED = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "algorithm.adv_estimator",
    "algorithm.kl_ctrl.kl_coef",
    "critic.optim.lr",
    "data.train_batch_size",
    "data.max_response_length",
    "trainer.seed",
)
_CODE = ("prompt", "response", "ground_truth", "pred")  # columns whose texts are not markup


class TensorBoardTracker:
    """TensorBoard tracker (`Tracker`, `ShowsAlarms`).

    Values are stored as 32-bit floats; characters that tags must not contain become `_`.
    """

    shows_samples = True
    Params = TensorBoardParams
    events: EventsWriter  # from `start` on, like `folder`
    folder: Path
    last_step = 0

    def __init__(self, params: TensorBoardParams = TensorBoardParams()) -> None:
        self.params = params

    def start(self, run: RunInfo) -> str:
        """Open a new event file in the run's folder and return that folder as the run's id.

        TensorBoard names runs by their folders, so that a separate folder would be in each name. A
        run of an earlier version, which has one, continues there. TensorBoard hides steps after
        `resume_step` in the files of earlier attempts.
        """
        root = self.params.log_dir or os.environ.get("TENSORBOARD_DIR")
        earlier = run.trackers.get("tensorboard")
        name = earlier if earlier == _OLD_FOLDER else "."
        self.folder = (run.folder / name).absolute()
        known = name
        if root:
            self.folder = (Path(root) / run.project / run.name).absolute()
            known = str(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.events = EventsWriter(
            str(self.folder / "events"),
            f".{time.time_ns()}",  # else two attempts in one second share a file
        )
        if earlier == known:
            self.events.write_event(
                Event(
                    wall_time=time.time(),
                    step=run.resume_step + 1,
                    session_log=SessionLog(status="START"),
                )
            )
        else:
            config = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
            self._write(0, text("config", f"`{link(run)}`\n```yaml\n{config}```"))
        _, begin, _ = hparams(_compared(run), {})
        self._write(0, begin)
        return known

    def destination(self) -> Destination:
        """Return the folder of the event files."""
        from rlctl.installer import runnable

        look = runnable(f"tensorboard --logdir {shlex.quote(str(self.folder))}", "tensorboard")
        return Destination("local", place=str(self.folder), look=look)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step to disk."""
        parts = [scalar(name, float(value)) for name, value in metrics.items()]
        self._write(step, Summary(value=[value for part in parts for value in part.value]))

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Write samples as a table, the text `val/generations`."""
        table = SampleTable.of(samples)
        names = table.columns[1:]  # the page shows the step
        cells = [names, *(row[1:] for row in table.rows(step, samples))]
        shown = text("val/generations", "")
        (value,) = shown.value
        value.tensor.string_val[:] = [
            _cell(cell, is_code=name in _CODE and row is not names).encode()
            for row in cells
            for name, cell in zip(names, row, strict=True)
        ]
        value.tensor.tensor_shape.dim[0].size = len(cells)
        value.tensor.tensor_shape.dim.add(size=len(names))
        self._write(step, shown)

    def alarm(self, alarm: Alarm) -> None:
        """Write the start or the end of an alarm as a text `alarms/NAME`."""
        self._write(alarm.step, text(f"alarms/{alarm.name}", str(alarm)))

    def failure(self, message: str) -> None:
        """Write the error that ended the run as a text `failure`."""
        self._write(self.last_step, text("failure", _code_block(message)))

    def finish(self, state: str) -> None:
        """Write the state for the tab HParams, and close the event file."""
        status = Status.Value("STATUS_SUCCESS" if state == "finished" else "STATUS_FAILURE")
        end = HParamsPluginData(session_end_info=SessionEndInfo(status=status))
        _, _, summary = hparams({}, {})
        summary.value[0].metadata.plugin_data.content = end.SerializeToString()
        self._write(self.last_step, summary)
        self.events.close()

    def _write(self, step: int, summary: Summary) -> None:
        self.last_step = max(step, self.last_step)
        self.events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        self.events.flush()


def _compared(run: RunInfo) -> dict[str, Any]:
    """Return the settings for the tab HParams: `_COMPARED`, and those that the user changed."""
    flat = flat_config(run)
    compared: dict[str, Any] = {}
    for name in (*_COMPARED, *changed_keys(run)):
        value = flat.get(name)
        if value is not None:
            compared[name] = value if isinstance(value, bool | int | float | str) else str(value)
    return compared


def _cell(value: Any, *, is_code: bool) -> str:
    """Return a cell of a table as Markdown; None is empty."""
    if value is None:
        return ""
    if is_code:
        return _code_block(value)
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def _code_block(content: str) -> str:
    """Format as a Markdown code block, so that generated text is not rendered as markup."""
    return "\n".join(f"    {line}" for line in content.splitlines())
