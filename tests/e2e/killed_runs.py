"""Runs that are killed at a chosen moment, and the records that they leave.

The run kills itself through a tracker that receives every phase, so each moment of a step can be
hit.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rlctl.tracking.tracker import RunInfo, Sample
from tests.e2e.command import environment as usual_environment
from tests.e2e.command import reproducible
from tests.forks import completed

KILL_AT = "RLCTL_TEST_KILL_AT"
KILLED_FILE = "RLCTL_TEST_KILLED_FILE"
VICTIMS = "RLCTL_TEST_VICTIMS"  # seed of the choice: other processes of the run are killed
LOGGER = "trainer.logger=['tests.e2e.killed_runs:Killer']"
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    total = sum(map(ord, solution_str))
    return {"score": (total % 7) / 6, "even": float(total % 2 == 0)}
"""


# Moments by name: the beginning of a phase's name, or an event that Python audits and its path.
PHASES = {"start-up": "building the", "first step": "adv", "resume": "loading the checkpoint"}
AUDITED = {
    "checkpoint write": ("open", re.compile(r".*/checkpoints/\..*\.partial/actor/.*")),
    "commit": ("os.rename", re.compile(r".*/checkpoints/\..*\.partial")),
}
WRITTEN = "written"  # later than a phase: see `run`
_SECONDS = re.compile(rb'"seconds": [^,}]+')  # of turns, calls and episodes
EXIT_CODES = {"SIGKILL": -9, "SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 143, "SIGHUP": 129}


class Killer:
    """Tracker that signals its own run at the moment that the environment names (see `run`).

    It writes what the run was doing into a file that the environment names. With `VICTIMS` it kills
    processes that the run has started, again and again, and writes what they were.
    """

    def __init__(self) -> None:
        self.moment, delay, name = ([*os.environ.get(KILL_AT, "").split(":"), "", ""])[:3]
        self.left = int(self.moment) if self.moment.isdigit() else 0
        self.waits = delay == WRITTEN
        self.delay = 0.0 if self.waits else float(delay or 0)
        self.signal = signal.Signals[name or "SIGKILL"]
        self.doing = "starting"
        self.folder: Path | None = None
        self.timer: threading.Timer | None = None
        self.generator: random.Random | None = None

    def start(self, run: RunInfo) -> None:
        self.folder = run.folder
        if self.moment in AUDITED:
            sys.addaudithook(self._audit)

    def phase(self, name: str) -> None:
        self.doing = name
        self.left -= 1
        if self.left == 0 or name.startswith(PHASES.get(self.moment, "\0")):
            self.left, self.moment = 0, ""
            while self.waits and self._is_writing():
                time.sleep(0.01)
            self._kill_later()

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def generations(self, step: int, samples: Sequence[Sample]) -> None: ...

    def finish(self, state: str) -> None:
        """Stop the timer: a run that is recorded as finished cannot be resumed after a kill."""
        self.moment = ""
        if self.timer is not None:
            self.timer.cancel()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        wanted, path = AUDITED.get(self.moment, ("", None))
        if event == wanted and path is not None and path.fullmatch(str(arguments[0])):
            self._kill_later()

    def _kill_later(self) -> None:
        """Kill after the delay; without one at once, so that the moment is exact."""
        self.moment = ""
        if self.delay:
            self.timer = threading.Timer(self.delay, self._kill)
            self.timer.start()
        else:
            self._kill()

    def _kill(self) -> None:
        if VICTIMS in os.environ:
            self._kill_another()
            return
        if file := os.environ.get(KILLED_FILE):
            writing = " while writing a checkpoint" if self._is_writing() else ""
            Path(file).write_text(self.doing + writing, encoding="utf-8")
        os.kill(os.getpid(), self.signal)

    def _kill_another(self) -> None:
        self.generator = self.generator or random.Random(os.environ[VICTIMS])
        self.left = self.generator.randint(8, 25)  # phases until the next one
        found = sorted(psutil.Process().children(recursive=True), key=lambda each: each.pid)
        if found:
            victim = self.generator.choice(found)
            with (
                suppress(psutil.Error),
                Path(os.environ[KILLED_FILE]).open("a", encoding="utf-8") as file,
            ):
                words = [word for word in victim.cmdline() if len(word) < 60]
                victim.kill()
                file.write(f"{self.doing}: {' '.join(words)[-60:]}\n")

    def _is_writing(self) -> bool:
        return self.folder is not None and any(self.folder.glob("checkpoints/.*.partial"))


@dataclass(frozen=True)
class Ended:
    code: int  # negative: the signal
    talk: str


def run(
    *arguments: object,
    cwd: Path,
    kill_at: str = "",
    largest_file: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run `rlctl` with these arguments to its end.

    `kill_at` is `<n>:<seconds>[:SIGNAL]`, the delay after the n-th phase begins, or with a moment
    of `PHASES` or `AUDITED` in the place of `<n>`. In the place of seconds, `WRITTEN` waits until
    no checkpoint is being written. A write beyond `largest_file` bytes fails, as on a full disk.
    """
    variables = usual_environment() | {
        "TOKENIZERS_PARALLELISM": "false",
        KILL_AT: kill_at,
        **(environment or {}),
    }
    done = completed([str(each) for each in arguments], cwd, variables, largest_file)
    return Ended(done.returncode, done.stdout + done.stderr)


def finish_despite(
    kills: Sequence[str], name: str, command: Sequence[str], cwd: Path, *options: str
) -> list[str]:
    """Start, kill and resume a run until it finishes; return what it was doing at each kill.

    `options` are those of `rlctl resume`.
    """
    doing: list[str] = []
    file = cwd / f"{name}.killed.txt"
    arguments = command
    for kill_at in [*kills, ""]:
        ended = run(*arguments, cwd=cwd, kill_at=kill_at, environment={KILLED_FILE: str(file)})
        if ended.code == 0:
            return doing
        at = f"killed at {kills}, {doing}; attempt {len(doing) + 1} to be killed at {kill_at!r}"
        wanted = EXIT_CODES[[*kill_at.split(":"), "SIGKILL"][2]] if kill_at else 0
        assert ended.code == wanted, f"{at}; exit {ended.code}, not {wanted}\n{ended.talk}"
        assert file.exists(), f"{at}: killed by something else"
        doing.append(file.read_text())
        file.unlink()
        arguments = ["resume", name, *options]
    raise AssertionError(f"{name} did not finish")


def random_kills(number: int, phases: int, generator: random.Random) -> list[str]:
    """Return `number` random moments in an attempt of about `phases` phases."""
    return [
        f"{generator.randint(4, phases)}:{generator.uniform(0, 0.06):.3f}" for _ in range(number)
    ]


def learned(run: Path) -> dict[str, str]:
    """Return the SHA-256 of the last checkpoint's files with weights, moments or random state."""
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    files = [
        *newest.glob("*/*.distcp"),
        *newest.glob("*/rng_*.json"),
        *newest.glob("huggingface/*.safetensors"),
    ]
    return {
        str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


def responses(run: Path) -> dict[str, str]:
    """Return the SHA-256 of each file with training or validation responses, but for seconds."""
    folders = ("generations", "generations_train", "rollouts")
    files = [file for name in folders for file in (run / name).glob("*.jsonl")]
    return {
        f"{file.parent.name}/{file.name}": hashlib.sha256(
            _SECONDS.sub(b"", file.read_bytes())
        ).hexdigest()
        for file in files
    }


def state(run: Path) -> dict[str, Any]:
    """Return the controller's part of the last checkpoint, without values of the clock."""
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    whole: dict[str, Any] = json.loads((newest / "state.json").read_text())
    return {name: value for name, value in whole.items() if name not in ("run", "metrics")}


def differing(killed: Path, straight: Path) -> list[str]:
    """Return the parts in which two runs differ in a byte that the seed determines."""
    parts: dict[str, Callable[[Path], object]] = {
        "metrics": reproducible,
        "weights, moments, random state": learned,
        "controller": state,
        "responses": responses,
    }
    return [part for part, read in parts.items() if read(killed) != read(straight)]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]
