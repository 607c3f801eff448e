"""The run as a SwanLab experiment: scalars at the training step, validation answers as texts.

The mode is decided here, so that nothing ever asks a question: `SWANLAB_MODE` where it is set (`cloud` is `online`), else online where
there is a key, else offline. Offline files lie in the run's folder (`SWANLAB_LOG_DIR` moves them); `swanlab sync` sends them later.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Literal

import swanlab

from rlctl.errors import ConfigError, RlctlError
from rlctl.tracking.tracker import RunInfo, Sample

_Mode = Literal["online", "local", "offline", "disabled"]
_MODES: dict[str, _Mode] = {"cloud": "online", "online": "online", "local": "local", "offline": "offline", "disabled": "disabled"}
_STATES: dict[str, Literal["success", "aborted", "crashed"]] = {"finished": "success", "stopped": "aborted", "failed": "crashed"}


class SwanLabTracker:
    """Implements `Tracker`. Non-finite values, which its charts cannot show, are left out."""

    run: swanlab.Run | None = None

    def start(self, run: RunInfo) -> str | None:
        """Open the experiment; returns its id. Errors: ConfigError for a mode that does not exist, RlctlError when SwanLab refuses."""
        mode = _mode()
        settings = swanlab.Settings(
            interactive=False,
            terminal=swanlab.Settings.Terminal(proxy_type="none"),
            probe=swanlab.Settings.Probe(monitor=False, requirements=False, hardware=False),
        )
        try:
            self.run = swanlab.init(
                project=run.project,
                name=run.name,
                id=run.id,
                resume="allow",
                mode=mode,
                log_dir=os.environ.get("SWANLAB_LOG_DIR") or str(run.folder / "swanlog"),
                config=dict(run.config),
                tags=["rlctl"],
                job_type="train",
                settings=settings,
            )
        except RuntimeError as error:
            raise RlctlError(f"SwanLab does not start: {error}", hint="SWANLAB_MODE=offline needs no account and no network") from error
        return self.run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.run is not None:
            self.run.log({name: float(value) for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        if self.run is not None and samples:
            texts = [
                swanlab.Text(f"{each.prompt}\n\n{each.response}", caption=f"score {each.score:g}, truth {each.ground_truth}")
                for each in samples
            ]
            self.run.log({"val/generations": texts}, step=step)

    def finish(self, state: str) -> None:
        if self.run is not None:
            self.run.finish(state=_STATES[state])
            self.run = None


def _mode() -> _Mode:
    given = os.environ.get("SWANLAB_MODE")
    if given is None:
        return "online" if swanlab.Settings().api_key is not None else "offline"
    if given not in _MODES:
        raise ConfigError(f"SWANLAB_MODE={given} is no mode of SwanLab", hint=f"one of {', '.join(_MODES)}")
    return _MODES[given]
