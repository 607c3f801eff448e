"""Weights & Biases tracker: metrics, validation samples as a table, the config as an artifact.

The tracker chooses the mode and never calls `wandb.login`, so that W&B never prompts: the mode in
the recipe, or `WANDB_MODE`; else online if there is a key and the server responds, else offline.
`wandb sync` sends offline files later, and joins those of several attempts to one run.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

# W&B prints at its exit, and before it reads other settings; its log is in the run's folder.
os.environ.setdefault("WANDB_SILENT", "true")

import wandb
from packaging.version import Version
from wandb.errors import AuthenticationError, CommError, UsageError

from rlctl.errors import ConfigError, ResourceError, RlctlError
from rlctl.tracking.alarms import Alarm
from rlctl.tracking.child_processes import end_children, silent_children
from rlctl.tracking.destination import Destination, choices, folder, no_key
from rlctl.tracking.logger_settings import WandbParams
from rlctl.tracking.netrc_key import netrc_key
from rlctl.tracking.server_api import INIT_TIMEOUT_S, WandbRun, wandb_problem
from rlctl.tracking.shown import (
    SampleTable,
    best_of,
    changed_keys,
    flat_config,
    job_type,
    link,
    notes,
)
from rlctl.tracking.tracker import RunInfo, Sample

log = logging.getLogger(__name__)
_Mode = Literal["online", "offline", "disabled"]
_MODES: dict[str, _Mode] = {"online": "online", "offline": "offline", "disabled": "disabled"}
# W&B's steps must increase, but a resumed run repeats steps. So the training step is a metric,
# and the x-axis of all other metrics.
STEP = "training/global_step"
_HEADER_BYTES = 7
_NO_NETWORK = (
    "WANDB_MODE=offline (or trainer.tracking.modes.wandb=offline) needs no account and no network"
)


class WandbTracker:
    """W&B tracker (`Tracker`, `Preflight`, `ShowsAlarms`); later attempts continue the same run."""

    shows_samples = True
    confirms = True
    apart = ("generations",)
    Params = WandbParams
    run: wandb.Run  # from `start` on, like `mode`
    mode: _Mode
    reason: str  # for the mode
    requested = True  # False in `start` if no mode was requested
    server: WandbRun | None = None  # online
    table: wandb.Table | None = None
    columns = SampleTable(())  # of `table`

    def __init__(self, params: WandbParams = WandbParams()) -> None:
        self.params = params
        self.known: set[str] = set()  # metrics

    def preflight(self, mode: str | None) -> str:
        """Return the mode and its reason; raise the errors of `_choose_mode`."""
        chosen, reason = _choose_mode(mode, self.params.base_url)
        return f"{chosen}: {reason}"

    def start(self, run: RunInfo) -> str | None:
        """Open the run and return its id.

        An offline id differs from the online id of the same run, because the server does not have
        offline steps. If W&B refuses to start, an unrequested online mode becomes offline. Raises
        the errors of `_choose_mode`, and RlctlError if W&B refuses a requested mode.
        """
        asked = run.modes.get("wandb") or os.environ.get("WANDB_MODE")
        self.requested = asked is not None
        self.mode, self.reason = _choose_mode(run.modes.get("wandb"), self.params.base_url)
        _remove_empty_files(run)
        try:
            self.run = _init(run, self.mode, self.params)
        except (AuthenticationError, CommError, UsageError) as error:
            mode, reason = _choose_mode(
                run.modes.get("wandb"), self.params.base_url
            )  # names the cause
            if self.requested or self.mode != "online":
                raise RlctlError(f"W&B failed to start: {error}", hint=_NO_NETWORK) from error
            wandb.teardown(exit_code=1)  # else the id is in use
            if mode == "online":
                text = " ".join(str(error).split())
                reason = f"W&B failed to start: {text}"
            self.mode = "offline"
            self.reason = reason
            self.run = _init(run, self.mode, self.params)
        if self.mode == "online":
            self.server = _server(self.run)
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)
        if run.attempt > 1:
            self.run.summary["failure"] = None  # of an earlier attempt
        run_id = {"online": run.id, "offline": f"{run.id} (offline)", "disabled": None}[self.mode]
        if run_id is not None and run_id != run.trackers.get("wandb"):
            self._log_config(self.run, run)
            if self.params.save_code:
                self.run.log_code(".", include_fn=_is_users_code)
        return run_id

    def destination(self) -> Destination:
        """Return where the run is; the command that sends it takes the files of all attempts."""
        place = ""
        send = ""
        if self.mode == "online":
            place = self.run.url or ""
        elif self.mode == "offline":
            place = folder(Path(self.run.dir).parent)
            server = self.params.base_url
            account = ""
            if server:
                account = f"WANDB_BASE_URL={shlex.quote(server)} "
            files = folder(Path(place).parent)
            send = f"{account}wandb sync {shlex.quote(files)}/offline-run-*-{self.run.id}"
            if len([*Path(files).glob(f"offline-run-*-{self.run.id}")]) > 1 and not _joins_parts():
                send = f"rlctl runs sync {shlex.quote(str(Path(files).parent))} --logger wandb"
        other = choices("wandb", self.reason, ("offline",))
        return Destination(self.mode, self.reason, place, "", send, other)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, with the step itself as a metric.

        The summary of some has the best value, as `max` or `min`, and the `last`.
        """
        for name in metrics.keys() - self.known:
            if (best := best_of(name)) is not None:  # W&B prefers `*` to other patterns
                self.run.define_metric(name, step_metric=STEP, summary=f"{best},last")
        self.known |= metrics.keys()
        self.run.log({**metrics, STEP: step})

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Append samples to the table `val/generations` and log the new rows.

        Components of the score that the first samples lack share the column `others`.
        """
        if self.table is None:
            self.columns = SampleTable.of(samples, has_others=True)
            self.table = wandb.Table(columns=[*self.columns.columns], log_mode="INCREMENTAL")
        for row in self.columns.rows(step, samples):
            self.table.add_data(*row)
        self.run.log({"val/generations": self.table, STEP: step})

    def alarm(self, alarm: Alarm) -> None:
        """Send an alert for a new alarm."""
        if not alarm.over:
            self.run.alert(alarm.name, str(alarm), level="WARN")

    def failure(self, message: str) -> None:
        """Add the message to the summary as `failure`, and send it as an alert."""
        self.run.summary["failure"] = message
        self.run.alert("run failed", message, level="ERROR")

    def finish(self, state: str) -> None:
        """Close the run; W&B shows a failed or stopped run as failed."""
        self.run.finish(exit_code=int(state != "finished"))

    def received(self, names: Collection[str]) -> Mapping[str, Collection[int]] | None:
        """Return what the server has; None offline."""
        if self.server is None:
            return None
        return self.server.received(names)

    def abandon(self) -> None:
        """End W&B's processes, which else try for long to send what is left."""
        end_children("wandb-core", "wandb-symon")

    def _log_config(self, opened: wandb.Run, run: RunInfo) -> None:
        """Send the configuration's files; a failure is a warning."""
        artifact = wandb.Artifact(f"config-{run.id}", type="config")
        for name in ("config.yaml", "origins.json"):
            if (run.folder / name).exists():
                artifact.add_file(str(run.folder / name))
        try:
            opened.log_artifact(artifact)
        except Exception as error:  # older releases raise a bare Exception
            log.warning("W&B: the configuration's files were not sent: %s", error)


def _joins_parts() -> bool:
    """Return True if `wandb sync` joins the files of several attempts, as since 0.31."""
    return Version(wandb.__version__) >= Version("0.31")


def _server(run: wandb.Run) -> WandbRun:
    address = str(run.settings.base_url)
    key = str(run.settings.api_key)
    return WandbRun(address, key, run.entity, run.project, run.id, STEP)


def _config(run: RunInfo) -> dict[str, Any]:
    """Return the configuration, and the origin of the run and changed settings as `rlctl`."""
    flat = flat_config(run)
    changed = {key: flat[key] for key in changed_keys(run) if key in flat}
    facts = {"show": link(run), "recipe": run.recipe, "commit": run.commit, "changed": changed}
    return {**run.config, "rlctl": facts}


def _remove_empty_files(run: RunInfo) -> None:
    """Remove offline files that have only a header, left by a killed attempt.

    `wandb sync` rejects all files of a run that has such a file.
    """
    for file in Path(os.environ.get("WANDB_DIR") or run.folder).glob(
        f"wandb/offline-run-*-{run.id}/run-{run.id}.wandb"
    ):
        if file.stat().st_size <= _HEADER_BYTES:
            shutil.rmtree(file.parent)


def _is_users_code(path: str, root: str) -> bool:
    """Return True for a Python file, unless its folder is hidden or has installed packages."""
    folders = Path(path).relative_to(root).parts[:-1]
    is_hidden = any(name.startswith(".") or name == "site-packages" for name in folders)
    return path.endswith(".py") and not is_hidden


@silent_children()
def _init(run: RunInfo, mode: _Mode, params: WandbParams) -> wandb.Run:
    server: dict[str, Any] = {}
    if params.base_url:
        server["base_url"] = params.base_url
    return wandb.init(
        entity=params.entity,
        project=run.project,
        name=run.name,
        id=run.id,
        resume="allow",
        mode=mode,
        dir=os.environ.get("WANDB_DIR") or str(run.folder),
        config=_config(run),
        tags=["rlctl", *run.tags, *params.tags],
        notes=params.notes or notes(run),
        group=params.group or run.sweep,
        job_type=params.job_type or job_type(run),
        settings=wandb.Settings(
            **server,
            silent=True,
            console="off",
            init_timeout=INIT_TIMEOUT_S,
            disable_git=True,
            disable_code=not params.save_code,
        ),
    )


def _choose_mode(recipe_mode: str | None, base_url: str | None = None) -> tuple[_Mode, str]:
    """Return the mode and its reason.

    Raises ConfigError for an unknown mode or online without a key, ResourceError if online was
    requested and the server does not respond.
    """
    given = recipe_mode or os.environ.get("WANDB_MODE")
    if given is not None and given not in _MODES:
        where = "WANDB_MODE"
        if recipe_mode:
            where = "trainer.tracking.modes.wandb"
        raise ConfigError(
            f"{where}={given} is not a mode of W&B", hint=f"one of {', '.join(_MODES)}"
        )
    if given is not None and _MODES[given] != "online":
        return _MODES[given], "as requested"
    settings = wandb.Settings()
    settings.update_from_env_vars(dict(os.environ))
    settings.base_url = base_url or settings.base_url
    key = settings.api_key or netrc_key(settings.base_url)
    if key is None:
        if given is None:
            return "offline", no_key("wandb")
        raise ConfigError(
            "W&B's online mode needs a key",
            hint=f"run `wandb login` or set WANDB_API_KEY; {_NO_NETWORK}",
        )
    problem = wandb_problem(settings.base_url, key)
    if problem is None:
        return "online", "as requested" if given else "key found"
    if given is not None:
        raise ResourceError(f"W&B: {problem}", hint=_NO_NETWORK)
    return "offline", f"{problem}; `wandb sync` sends the files later"
