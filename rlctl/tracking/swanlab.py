"""SwanLab tracker: metrics over the training step, validation samples as tables, alarms as texts.

The tracker chooses the mode, so that SwanLab never prompts: the mode in the recipe, or
`SWANLAB_MODE` (`cloud` means `online`); else online if there is a key and the server responds; else
offline. Offline files are in the run's folder; local ones in the project's, because `swanlab watch`
shows all runs of one folder. `SWANLAB_LOG_DIR` moves both.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TextIO

import swanlab
from pydantic import ValidationError
from pydantic_settings import SettingsError
from swanlab.exceptions import AuthenticationError

from rlctl.errors import ConfigError, MissingExtraError, ResourceError, RlctlError
from rlctl.tracking.alarms import Alarm
from rlctl.tracking.destination import Destination, choices, folder, no_key
from rlctl.tracking.logger_settings import SwanLabParams
from rlctl.tracking.server_api import INIT_TIMEOUT_S, SwanLabRun, swanlab_problem
from rlctl.tracking.shown import SampleTable, flat_config, important_first, job_type, notes
from rlctl.tracking.swanlab_local import close, hide, rename_attempt
from rlctl.tracking.tracker import SAMPLES, RunInfo, Sample

_Mode = Literal["online", "local", "offline", "disabled"]
_MODES: dict[str, _Mode] = {
    "cloud": "online",
    "cloud-only": "online",
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
_USER_TURN = re.compile(
    r"(?:<\|im_start\|>user\n|<\|start_header_id\|>user<\|end_header_id\|>\n\n|\[INST\]"
    r"|<start_of_turn>user\n|<\|user\|>\n?)(.*?)"
    r"(?:<\|im_end\|>|<\|eot_id\|>|\[/INST\]|<end_of_turn>|<\|end\|>|<\|assistant\|>)",
    re.DOTALL,
)
_INSTALL = "pip install 'rlctl[swanlab-local]'"
_NO_NETWORK = (
    "SWANLAB_MODE=offline (or trainer.tracking.modes.swanlab=offline) needs no account, no network"
)


class SwanLabTracker:
    """SwanLab tracker (`Tracker`, `Preflight`, `ShowsAlarms`).

    A later attempt continues an online experiment. In local and offline mode it creates a new one
    with the complete history; `swanlab_local` hides the local ones of earlier attempts.
    """

    shows_samples = True
    confirms = True
    Params = SwanLabParams
    run: swanlab.Run  # from `start` on, like `mode`
    mode: _Mode
    reason: str  # for the mode
    requested = True  # False in `start` if no mode was requested
    server: SwanLabRun | None = None  # online
    known: Mapping[str, Collection[int]] = {}  # steps that the server has, by metric
    error: str | None = None  # that ended the run

    def __init__(self, params: SwanLabParams = SwanLabParams()) -> None:
        self.params = params

    def preflight(self, mode: str | None) -> str:
        """Return the mode and its reason; raise the errors of `_choose_mode`."""
        chosen, reason = _choose_mode(mode, self.params.base_url)
        return f"{chosen}: {reason}"

    def capture_output(self, file: TextIO) -> None:
        """Let SwanLab's threads print to a file: they print while the run trains."""
        console = getattr(sys.modules.get("swanlab.sdk.internal.pkg.console"), "c", None)
        if console is not None:
            console.file = file

    def start(self, run: RunInfo) -> str | None:
        """Open the experiment and return its id.

        Raises the errors of `_choose_mode`, and RlctlError if SwanLab refuses.
        """
        params = self.params
        asked = run.modes.get("swanlab") or os.environ.get("SWANLAB_MODE")
        self.requested = asked is not None
        self.mode, self.reason = _choose_mode(run.modes.get("swanlab"), params.base_url)
        try:
            if self.mode == "online":
                self.run = _in_time(partial(self._open, run))
            else:
                self.run = self._open(run)
        except (RuntimeError, ValueError, OSError, AuthenticationError) as error:
            mode, reason = _choose_mode(
                run.modes.get("swanlab"), params.base_url
            )  # names the cause
            if self.requested or self.mode != "online":
                raise RlctlError(f"SwanLab failed to start: {error}", hint=_NO_NETWORK) from error
            if mode == "online":
                text = " ".join(str(error).split())
                reason = f"SwanLab failed to start: {text}"
            self.mode = "offline"
            self.reason = reason
            self.run = self._open(run)
        if self.mode == "online":
            settings = _settings(params.base_url)
            key = str(settings.api_key)
            self.server = SwanLabRun(str(settings.api_host), key, self.run.path)
        if self.mode == "disabled":
            return None
        return self.run.id

    def _open(self, run: RunInfo) -> swanlab.Run:
        mode = self.mode
        params = self.params
        folder = run.folder
        if mode == "local":
            folder = run.folder.parent
        earlier = run.trackers.get("swanlab")
        log_dir = os.environ.get("SWANLAB_LOG_DIR")
        shown = Path(log_dir or folder / "swanlog")
        if mode == "local":
            (folder / "swanlog").mkdir(mode=0o700, exist_ok=True)
            if earlier is not None:
                rename_attempt(shown, earlier, run.name)
            close(shown, run.lost("swanlab"))
        opened = swanlab.init(
            workspace=params.workspace,
            project=run.project,
            public=params.public,
            name=_name(run, mode),
            id=run.id if mode == "online" else None,
            resume="allow",
            mode=mode,
            log_dir=str(shown),
            config=_config(run),
            tags=["rlctl", *run.tags, *params.tags],
            description=params.notes or notes(run),
            group=params.group or run.sweep,
            job_type=params.job_type or job_type(run),
            settings=_settings(params.base_url),
        )
        if log_dir is None:
            os.environ.pop("SWANLAB_LOG_DIR", None)  # set by the local mode, for later runs, too
        if mode == "local" and earlier is not None:
            hide(shown, earlier)
        return opened

    def destination(self) -> Destination:
        """Return where the experiment is."""
        place = ""
        look = ""
        send = ""
        if self.mode == "online":
            place = self.run.url or ""
        elif self.mode != "disabled":
            place = folder(self.run.dir)
        if self.mode == "local":
            look = f"swanlab watch {shlex.quote(folder(self.run.dir.parent))}"
        elif self.mode == "offline":
            send = f"swanlab sync {shlex.quote(place)}"
        other = choices("swanlab", self.reason, ("local", "offline"))
        if find_spec("swanboard") is None:
            other = tuple(_with_installation(choice) for choice in other)
        return Destination(self.mode, self.reason, place, look, send, other)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, important ones first: SwanLab orders new charts so."""
        new = {name: value for name, value in metrics.items() if step not in self._steps(name)}
        if new:
            self.run.log(important_first(new), step=step)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Log samples under `val/generations`: a table; in local mode, which has none, texts."""
        if step in self._steps(SAMPLES):
            return
        if self.mode == "local":
            texts = [swanlab.Text(_text(sample), caption=_caption(sample)) for sample in samples]
            self.run.log({"val/generations": texts}, step=step)
            return
        table = SampleTable.of(samples)
        shown = swanlab.echarts.Table()
        shown.add(table.columns, table.rows(step, samples))
        self.run.log({"val/generations": shown}, step=step)

    def received(self, names: Collection[str]) -> Mapping[str, Collection[int]] | None:
        """Return what the server has; None unless online.

        Earlier steps that are missing may then be logged, which SwanLab ignores otherwise.
        """
        if self.server is None:
            return None
        self.known = self.server.received(names)
        if self.run.alive:
            _accept_earlier_steps(self.run)
        return self.known

    def _steps(self, name: str) -> Collection[int]:
        return self.known.get(name, ())

    def alarm(self, alarm: Alarm) -> None:
        """Log an alarm or its end as a text under `alarms/NAME`."""
        caption = "alarm"
        if alarm.over:
            caption = "over"
        text = swanlab.Text(str(alarm), caption=caption)
        self.run.log({f"alarms/{alarm.name}": text}, step=alarm.step)

    def failure(self, message: str) -> None:
        """Keep the message for the end of the experiment."""
        self.error = message

    def finish(self, state: str) -> None:
        """Close the experiment with SwanLab's name of the state, and the message of a failure."""
        error = None
        if state == "failed":
            error = self.error or "unknown cause"
        self.run.finish(state=_STATES[state], error=error)


def _in_time(opening: Callable[[], swanlab.Run]) -> swanlab.Run:
    """Return the experiment that `opening` opens; raise TimeoutError after INIT_TIMEOUT_S seconds.

    SwanLab repeats requests for minutes. An experiment that it opens later is closed.
    """
    opened: Future[swanlab.Run] = Future()

    def work() -> None:
        try:
            run = opening()
        except BaseException as error:  # raised in the tracker's thread
            with suppress(InvalidStateError):
                opened.set_exception(error)
            return
        try:
            opened.set_result(run)
        except InvalidStateError:
            run.finish(state="aborted")

    threading.Thread(target=work, name="swanlab opens", daemon=True).start()
    wait([opened], INIT_TIMEOUT_S)
    if opened.cancel():
        raise TimeoutError(f"no experiment within {INIT_TIMEOUT_S:g} s")
    return opened.result()


def _accept_earlier_steps(run: swanlab.Run) -> None:
    """Let a resumed experiment accept steps before its last one, as `swanlab sync` does."""
    metrics = getattr(getattr(run, "_core", None), "_metrics", None)
    for metric in getattr(metrics, "_metrics", {}).values():
        metric.min_step = -1


def _name(run: RunInfo, mode: _Mode) -> str:
    """Return the run's name; that of a later offline experiment has the number of the attempt."""
    if mode == "offline" and "swanlab" in run.trackers:
        return f"{run.name} (attempt {run.attempt})"
    return run.name


def _config(run: RunInfo) -> dict[str, Any]:
    """Return the flat configuration; SwanLab shows nested values and None as [object Object]."""
    return {key: "null" if value is None else value for key, value in flat_config(run).items()}


def _text(sample: Sample) -> str:
    """Return the response, and then the prompt: SwanLab cuts texts after some lines.

    The prompt is its last user message, if its chat template is a known one.
    """
    turns = _USER_TURN.findall(sample.prompt)
    prompt = sample.prompt
    if turns:
        prompt = turns[-1].strip()
    return f"{sample.response}\n\n[prompt]\n{prompt}"


def _caption(sample: Sample) -> str:
    """Return the score, its components, the extracted answer and the ground truth."""
    parts = [f"score {sample.score:g}"]
    parts += [f"{name} {value:g}" for name, value in sample.components.items()]
    if sample.pred is not None:
        parts.append(f"pred {sample.pred}")
    return ", ".join([*parts, f"truth {sample.ground_truth}"])


def _with_installation(choice: str) -> str:
    """Return the command, after that which installs the local dashboard if it needs that."""
    if "=local" not in choice:
        return choice
    return f"{_INSTALL} && {choice}"


def _choose_mode(recipe_mode: str | None, base_url: str | None = None) -> tuple[_Mode, str]:
    """Return the mode and its reason.

    Raises ConfigError for an unknown mode or online without a key, MissingExtraError for local
    without a dashboard, ResourceError if online was requested and the server does not respond.
    """
    given = recipe_mode or os.environ.get("SWANLAB_MODE")
    if given is not None and given not in _MODES:
        where = "SWANLAB_MODE"
        if recipe_mode:
            where = "trainer.tracking.modes.swanlab"
        raise ConfigError(
            f"{where}={given} is not a mode of SwanLab", hint=f"one of {', '.join(_MODES)}"
        )
    mode = None
    if given:
        mode = _MODES[given]
    settings = _settings(base_url)
    if mode == "online" or (mode is None and settings.api_key is not None):
        return _online(settings, requested=mode is not None)
    if mode == "local" and find_spec("swanboard") is None:
        raise MissingExtraError(
            "SwanLab's local mode needs its dashboard",
            hint=f"{_INSTALL}, or use another mode",
        )
    if mode is not None:
        return mode, "as requested"
    local = f"after {_INSTALL}"
    if find_spec("swanboard"):
        local = "`swanlab watch` shows it"
    return "offline", no_key("swanlab", local)


def _online(settings: swanlab.Settings, *, requested: bool) -> tuple[_Mode, str]:
    if settings.api_key is None:
        raise ConfigError(
            "SwanLab's online mode needs a key",
            hint=f"run `swanlab login` or set SWANLAB_API_KEY; {_NO_NETWORK}",
        )
    problem = swanlab_problem(str(settings.api_host), settings.api_key)
    if problem is None:
        return "online", "as requested" if requested else "key found"
    if requested:
        raise ResourceError(f"SwanLab: {problem}", hint=_NO_NETWORK)
    return "offline", f"{problem}; `swanlab sync` sends the files later"


def _settings(base_url: str | None) -> swanlab.Settings:
    """Build settings without prompts, capture of stdout, or probes of hardware and packages.

    Nor of git and the command line: SwanLab sends the password in a remote's URL, and secrets among
    the arguments.

    Raises ConfigError for environment variables that SwanLab cannot parse.
    """
    server: dict[str, Any] = {}
    if base_url:
        server["api_host"] = base_url
    try:
        return swanlab.Settings(
            **server,
            interactive=False,
            terminal=swanlab.Settings.Terminal(proxy_type="none"),
            probe=swanlab.Settings.Probe(
                monitor=False, requirements=False, hardware=False, git=False, runtime=False
            ),
        )
    except (SettingsError, ValidationError) as error:
        names = [name for name in os.environ if name.startswith("SWANLAB_")]
        hint = (
            f"check {', '.join(names) or 'its settings files'}; "
            "the project's name is trainer.project_name, or SWANLAB_PROJ_NAME"
        )
        raise ConfigError(f"SwanLab cannot read its settings: {error}", hint=hint) from error
