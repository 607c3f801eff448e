"""The run in Weights & Biases: metrics over the training step, validation answers as a growing table, the configuration as an artifact.

The mode is decided here, and `wandb.login` is never called, so that nothing asks or waits: what the recipe says, or `WANDB_MODE`; else
online where there is a key and its server answers, else offline. `wandb sync` sends offline files later; those of one run, written by
several attempts, become one run there.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import wandb
from wandb.errors import AuthenticationError, CommError, UsageError
from wandb.sdk.lib.wbauth import read_netrc_auth

from rlctl.errors import ConfigError, ResourceError, RlctlError
from rlctl.monitoring.alarms import Alarm
from rlctl.tracking.connectivity import reachable
from rlctl.tracking.tracker import RunInfo, Sample

_Mode = Literal["online", "offline", "disabled"]
_MODES: dict[str, _Mode] = {"online": "online", "offline": "offline", "disabled": "disabled"}
# W&B wants its own steps to grow. A resumed run steps back, so the training step is a metric, and the axis of all others.
STEP = "training/global_step"
INIT_TIMEOUT_S = 20
_HEADER_BYTES = 7
_COLUMNS = (
    "step",
    "prompt",
    "response",
    "ground_truth",
    "score",
    "right",
    "length",
    "finish",
    "data_source",
)
_NO_NETWORK = (
    "WANDB_MODE=offline (or trainer.tracking.modes.wandb=offline) needs no account and no network"
)


class WandbTracker:
    """Implements `Tracker`, `Preflight` and `ShowsAlarms`. A later attempt goes on with the same run."""

    def __init__(self) -> None:
        self.run: wandb.Run | None = None
        self.table: wandb.Table | None = None

    @classmethod
    def preflight(cls, mode: str | None) -> str:
        chosen, why = _decide(mode)
        return f"{chosen}: {why}"

    def start(self, run: RunInfo) -> str | None:
        """Open the run; returns its id. What was written offline is not known online, so an offline id is another one.

        Errors: as `_decide`; RlctlError when W&B refuses a mode that was asked for. One that was not asked for becomes offline.
        """
        asked = run.modes.get("wandb") or os.environ.get("WANDB_MODE")
        mode, _ = _decide(run.modes.get("wandb"))
        _remove_empty_files(run)
        try:
            self.run = _init(run, mode)
        except (AuthenticationError, CommError, UsageError) as error:
            if asked is not None or mode != "online":
                raise RlctlError(f"W&B does not start: {error}", hint=_NO_NETWORK) from error
            print(
                f"note: W&B does not start ({error}); it writes offline files, `wandb sync` sends them later",
                file=sys.stderr,
            )
            mode = "offline"
            self.run = _init(run, mode)
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)
        given = {"online": run.id, "offline": f"{run.id} (offline)", "disabled": None}[mode]
        if given is not None and given != run.trackers.get("wandb"):
            self._keep_configuration(self.run, run)
        return given

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self.run is not None
        self.run.log({**metrics, STEP: step})

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        assert self.run is not None
        if self.table is None:
            self.table = wandb.Table(columns=list(_COLUMNS), log_mode="INCREMENTAL")
        for each in samples:
            truth, data = str(each.ground_truth), each.data_source
            self.table.add_data(
                step,
                each.prompt,
                each.response,
                truth,
                each.score,
                each.right,
                each.length,
                each.finish,
                data,
            )
        self.run.log({"val/generations": self.table, STEP: step})

    def alarm(self, alarm: Alarm) -> None:
        if self.run is not None and not alarm.over:
            self.run.alert(alarm.name, str(alarm), level="WARN")

    def finish(self, state: str) -> None:
        assert self.run is not None
        self.run.finish(exit_code=0 if state == "finished" else 1)

    def _keep_configuration(self, opened: wandb.Run, run: RunInfo) -> None:
        artifact = wandb.Artifact(f"config-{run.id}", type="config")
        for name in ("config.yaml", "origins.json"):
            if (run.folder / name).exists():
                artifact.add_file(str(run.folder / name))
        opened.log_artifact(artifact)


def _remove_empty_files(run: RunInfo) -> None:
    """An attempt that was killed leaves offline files with W&B's header and nothing else, for which `wandb sync` refuses all of a run."""
    for file in Path(os.environ.get("WANDB_DIR") or run.folder).glob(
        f"wandb/offline-run-*-{run.id}/run-{run.id}.wandb"
    ):
        if file.stat().st_size <= _HEADER_BYTES:
            shutil.rmtree(file.parent)


def _init(run: RunInfo, mode: _Mode) -> wandb.Run:
    return wandb.init(
        project=run.project,
        name=run.name,
        id=run.id,
        resume="allow",
        mode=mode,
        dir=os.environ.get("WANDB_DIR") or str(run.folder),
        config=dict(run.config),
        tags=["rlctl", *run.tags],
        notes=run.description,
        job_type="train",
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_TIMEOUT_S,
            disable_git=True,
            disable_code=True,
        ),
    )


def _decide(asked: str | None) -> tuple[_Mode, str]:
    """The mode and why. Errors: ConfigError for a mode that does not exist, or for online without a key; ResourceError where online was
    asked for and nobody answers."""
    given = asked or os.environ.get("WANDB_MODE")
    if given is not None and given not in _MODES:
        where = "trainer.tracking.modes.wandb" if asked else "WANDB_MODE"
        raise ConfigError(f"{where}={given} is no mode of W&B", hint=f"one of {', '.join(_MODES)}")
    if given is not None and _MODES[given] != "online":
        return _MODES[given], "as asked"
    settings = wandb.Settings()
    settings.update_from_env_vars(dict(os.environ))
    key = settings.api_key or read_netrc_auth(host=settings.base_url)
    if key is None:
        if given is None:
            return "offline", "no key; `wandb sync` sends the files later"
        raise ConfigError(
            "W&B's online mode needs a key", hint=f"`wandb login` or WANDB_API_KEY; {_NO_NETWORK}"
        )
    if reachable(settings.base_url):
        return "online", "as asked" if given else "there is a key"
    if given is not None:
        raise ResourceError(f"W&B's server {settings.base_url} does not answer", hint=_NO_NETWORK)
    return "offline", f"{settings.base_url} does not answer; `wandb sync` sends the files later"
