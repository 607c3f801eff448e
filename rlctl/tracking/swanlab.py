"""The run as a SwanLab experiment: scalars at the training step, validation answers as texts.

The mode is decided here, so that nothing ever asks a question: what the recipe says, or `SWANLAB_MODE` (`cloud` is `online`); else online
where there is a key and its server answers; else local where SwanLab's own dashboard is installed; else offline. Offline files lie in the
run's folder, local ones in the project's, for `swanlab watch` shows one folder with many runs; `SWANLAB_LOG_DIR` moves both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Literal

import swanlab
from pydantic import ValidationError
from pydantic_settings import SettingsError

from rlctl.errors import ConfigError, MissingExtraError, ResourceError, RlctlError
from rlctl.tracking.connectivity import reachable
from rlctl.tracking.tracker import RunInfo, Sample

_Mode = Literal["online", "local", "offline", "disabled"]
_MODES: dict[str, _Mode] = {
    "cloud": "online",
    "online": "online",
    "local": "local",
    "offline": "offline",
    "disabled": "disabled",
}
_STATES: dict[str, Literal["success", "aborted", "crashed"]] = {
    "finished": "success",
    "stopped": "aborted",
    "failed": "crashed",
}
_NO_NETWORK = "SWANLAB_MODE=offline (or trainer.tracking.modes.swanlab=offline) needs no account and no network"


class SwanLabTracker:
    """Implements `Tracker` and `Preflight`. Only an online experiment can be continued; local and offline ones begin anew."""

    run: swanlab.Run | None = None

    @classmethod
    def preflight(cls, mode: str | None) -> str:
        chosen, why = _decide(mode)
        return f"{chosen}: {why}"

    def start(self, run: RunInfo) -> str | None:
        """Open the experiment; returns its id. Errors: as `_decide`; RlctlError when SwanLab refuses."""
        mode, _ = _decide(run.modes.get("swanlab"))
        folder = run.folder.parent if mode == "local" else run.folder
        try:
            self.run = swanlab.init(
                project=run.project,
                name=run.name,
                id=run.id if mode == "online" else None,
                resume="allow",
                mode=mode,
                log_dir=os.environ.get("SWANLAB_LOG_DIR") or str(folder / "swanlog"),
                config=dict(run.config),
                tags=["rlctl", *run.tags],
                description=run.description,
                job_type="train",
                settings=_settings(),
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise RlctlError(f"SwanLab does not start: {error}", hint=_NO_NETWORK) from error
        return None if mode == "disabled" else self.run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self.run is not None
        self.run.log(dict(metrics), step=step)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        assert self.run is not None
        texts = [
            swanlab.Text(
                f"{each.prompt}\n\n{each.response}",
                caption=f"score {each.score:g}, truth {each.ground_truth}",
            )
            for each in samples
        ]
        self.run.log({"val/generations": texts}, step=step)

    def finish(self, state: str) -> None:
        assert self.run is not None
        self.run.finish(state=_STATES[state])


def _decide(asked: str | None) -> tuple[_Mode, str]:
    """The mode and why. Errors: ConfigError for a mode that does not exist, or for online without a key; MissingExtraError for local
    without a dashboard; ResourceError where online was asked for and nobody answers."""
    given = asked or os.environ.get("SWANLAB_MODE")
    if given is not None and given not in _MODES:
        where = "trainer.tracking.modes.swanlab" if asked else "SWANLAB_MODE"
        raise ConfigError(
            f"{where}={given} is no mode of SwanLab", hint=f"one of {', '.join(_MODES)}"
        )
    mode = _MODES[given] if given else None
    settings = _settings()
    if mode == "online" or (mode is None and settings.api_key is not None):
        return _online(settings, asked=mode is not None)
    if mode == "local" and find_spec("swanboard") is None:
        raise MissingExtraError(
            "SwanLab's local mode needs its dashboard",
            hint="pip install 'swanlab[dashboard]', or another mode",
        )
    if mode is not None:
        return mode, "as asked"
    return (
        ("local", "no key")
        if find_spec("swanboard")
        else ("offline", "no key; `swanlab sync` sends the files later")
    )


def _online(settings: swanlab.Settings, *, asked: bool) -> tuple[_Mode, str]:
    if settings.api_key is None:
        raise ConfigError(
            "SwanLab's online mode needs a key",
            hint=f"`swanlab login` or SWANLAB_API_KEY; {_NO_NETWORK}",
        )
    if reachable(str(settings.api_host)):
        return "online", "as asked" if asked else "there is a key"
    if asked:
        raise ResourceError(
            f"SwanLab's server {settings.api_host} does not answer", hint=_NO_NETWORK
        )
    return "offline", f"{settings.api_host} does not answer; `swanlab sync` sends the files later"


def _settings() -> swanlab.Settings:
    """Without questions, and without hands on stdout or hardware. Errors: ConfigError for variables that SwanLab cannot read."""
    try:
        return swanlab.Settings(
            interactive=False,
            terminal=swanlab.Settings.Terminal(proxy_type="none"),
            probe=swanlab.Settings.Probe(monitor=False, requirements=False, hardware=False),
        )
    except (SettingsError, ValidationError) as error:
        names = [name for name in os.environ if name.startswith("SWANLAB_")]
        hint = f"one of {', '.join(names) or 'its settings files'}; the project's name is trainer.project_name, or SWANLAB_PROJ_NAME"
        raise ConfigError(f"SwanLab cannot read its settings: {error}", hint=hint) from error
