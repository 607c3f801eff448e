"""Soak cases of the processes around a run: the board, and the supervisor of `--retries`.

A board that is killed must leave the run as it is, and show the same when it runs again. A run
whose supervisor is killed must record its end, and what the commands show must be true.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil

from rlctl.process import DriverProcess
from tests.e2e.command import (
    environment,
    remove_run,
    rlctl,
    start,
    wait_until_gone,
    with_marker,
)
from tests.e2e.killed_runs import differing, events
from tests.ports import free_port
from tests.progress import wait_until

CASES = [
    "board/serves/SIGKILL",
    "board/resumes/SIGKILL",
    "supervisor/alone/SIGKILL",
    "supervisor/alone/SIGTERM",
    "supervisor/alone/SIGINT",
    "supervisor/driver/SIGKILL",
    "supervisor/both/SIGKILL",
]
NUM_BOARDS = 4
_ROOT = Path(__file__).parents[2]
_DEADLINE_S = 300.0


def survive(case: str, command: Sequence[str], straight: Path, seed: int) -> str | None:
    """Return what is wrong with a run, or what is shown of it, after the kills of `case`.

    `command` trains like `straight` and lacks a name only.
    """
    _, how, name = case.split("/")
    watched = Watched(command, straight, random.Random(f"{seed} {case}"), signal.Signals[name])
    proofs = {
        "serves": _kill_boards,
        "resumes": _kill_board_of_a_resume,
        "alone": _kill_supervisor,
        "driver": _kill_drivers,
        "both": _kill_both,
    }
    try:
        wrong = proofs[how](watched)
        wait_until_gone(watched.marker)
        print(f"killed {len(watched.doing)}: {watched.doing}", flush=True)
        return ", ".join([*wrong, *differing(watched.run, straight)]) or None
    finally:
        for each in with_marker(watched.marker):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        remove_run(watched.run, watched.folder / "elsewhere")


@dataclass
class Watched:
    """Run `watched`, which is to equal `straight`; `doing` is what was killed, and when."""

    command: Sequence[str]
    straight: Path
    generator: random.Random
    signal: signal.Signals
    doing: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.straight.with_name("watched")

    @property
    def folder(self) -> Path:
        return self.straight.parents[2]

    @property
    def marker(self) -> str:
        return f"{os.getpid()}-watched"

    @property
    def rows(self) -> int:
        """Number of rows that the run has written."""
        lines = self.run / "metrics.jsonl"
        return lines.read_text().count("\n") if lines.exists() else 0

    def begin(self, *options: str) -> subprocess.Popen[Any]:
        """Start the run, or resume it if it has a record."""
        known = (self.run / "run.json").exists()
        words = ["resume", "watched"] if known else [*self.command, "watched"]
        own = environment() | {"RLCTL_TEST_MARKER": self.marker}
        own["PYTHONPATH"] = str(_ROOT)
        return subprocess.Popen(
            [sys.executable, "-m", "rlctl", *words, *options],
            cwd=self.folder,
            env=own,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for_row(self, process: subprocess.Popen[Any]) -> bool:
        """Wait until a random row, and a moment longer; False if the process has ended before."""
        last = len((self.straight / "metrics.jsonl").read_text().splitlines()) - 2
        wanted = self.generator.randint(min(self.rows, last), last)
        wait_until(
            lambda: process.poll() is not None or self.rows >= wanted, process.pid, f"row {wanted}"
        )
        time.sleep(self.generator.uniform(0, 1.0))
        return process.poll() is None

    def end(self, process: subprocess.Popen[Any], *codes: int) -> None:
        """Wait for the end of a process and check its exit code."""
        try:
            _, talk = process.communicate(timeout=_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode in codes, f"{self.doing}; exit {process.returncode}\n{talk}"

    def record(self) -> dict[str, Any]:
        return json.loads((self.run / "run.json").read_text())

    def driver(self) -> psutil.Process | None:
        """Return the process that the run's record names, if it is alive."""
        with suppress(OSError, ValueError, KeyError, psutil.NoSuchProcess):
            named = DriverProcess.from_dict(self.record()["process"])
            return psutil.Process(named.pid) if named.alive(self.run) else None
        return None

    def shown(self) -> set[str]:
        """Return the states that `rlctl runs` and `rlctl show` have for the run."""
        rows = json.loads(rlctl("runs", "--json", cwd=self.folder).stdout)
        one = json.loads(rlctl("show", "watched", "--json", cwd=self.folder).stdout)
        return {row["state"] for row in rows if row["name"] == "watched"} | {one["state"]}

    def kill(self, what: str, *processes: psutil.Process | subprocess.Popen[Any]) -> None:
        self.doing.append(f"{what} at row {self.rows}")
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(self.signal)


def _kill_supervisor(watched: Watched) -> list[str]:
    """Kill the supervisor twice; its driver saves and stops, and a resume continues."""
    wrong: list[str] = []
    for _ in range(2):
        process = watched.begin("--inline", "--retries", "2")
        if not watched.wait_for_row(process):
            watched.end(process, 0)
            return wrong
        watched.kill("supervisor", process)
        states = watched.shown() if watched.driver() else set[str]()
        if watched.driver() and states != {"running"}:
            wrong.append(f"shown as {states} while the driver saves")
        code = {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130}[watched.signal.name]
        watched.end(process, code)
        wait_until(lambda: watched.driver() is None, os.getpid(), "the driver")
        wrong += _untrue(watched, "stopped", 143 if code == -9 else code)
    watched.end(watched.begin("--inline", "--retries", "2"), 0)
    return wrong + _untrue(watched, "finished", 0)


def _kill_drivers(watched: Watched) -> list[str]:
    """Kill the driver of two attempts; the supervisor resumes it."""
    process = watched.begin("--inline", "--retries", "2")
    for _ in range(2):
        if not watched.wait_for_row(process):
            break
        if (driver := watched.driver()) is not None:
            watched.kill("driver", driver)
            wait_until(
                lambda gone=driver.pid: (found := watched.driver()) is None or found.pid != gone,
                process.pid,
                "the driver",
            )
            wait_until(
                lambda: process.poll() is not None or watched.driver() is not None,
                process.pid,
                "the next driver",
            )
    watched.end(process, 0)
    retried = len(events(watched.run, "retry"))
    wrong = [] if retried == len(watched.doing) else [f"{retried} retries: {watched.doing}"]
    return wrong + _untrue(watched, "finished", 0)


def _kill_both(watched: Watched) -> list[str]:
    """Kill supervisor and driver together, twice."""
    wrong: list[str] = []
    for _ in range(2):
        process = watched.begin("--inline", "--retries", "2")
        if not watched.wait_for_row(process):
            watched.end(process, 0)
            return wrong
        driver = watched.driver()
        watched.kill("supervisor and driver", process, *([driver] if driver else []))
        watched.end(process, -9)
        wait_until(lambda: watched.driver() is None, os.getpid(), "the driver")
        if (watched.run / "run.json").exists() and watched.shown() != {"lost"}:
            wrong.append(f"shown as {watched.shown()}, and it is lost")
    watched.end(watched.begin("--inline"), 0)
    return wrong + _untrue(watched, "finished", 0)


def _untrue(watched: Watched, state: str, code: int) -> list[str]:
    """Return in what the record and the commands differ from the end that they must have."""
    if not (watched.run / "run.json").exists():
        return []
    record = watched.record()
    found = [record["state"], record["exit_code"], *watched.shown()]
    return [] if found == [state, code, state] else [f"{watched.doing}: shown {found}"]


class Board:
    """Board in its own process; every reply must be one of a working server."""

    def __init__(self, folder: Path, port: int, marker: str) -> None:
        self.folder, self.port = folder, port
        self.environment = environment() | {
            "PYTHONPATH": str(_ROOT),
            "RLCTL_TEST_MARKER": marker,
        }
        self.wrong: list[str] = []
        self.served = 0
        self.start()

    def start(self) -> None:
        words = ["-m", "rlctl", "board", "--no-open", "--json", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the board has not started"
        self.token: str = json.loads(line)["token"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def request(self, path: str, body: object = None, **headers: str) -> str:
        """Return the text of a reply. Raises OSError without one."""
        data = None if body is None else json.dumps(body).encode()
        own = {"Authorization": f"Bearer {self.token}", **headers}
        address = f"http://127.0.0.1:{self.port}{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(address, data, own), None, 60) as it:
                self.served += 1
                return it.read().decode()
        except urllib.error.HTTPError as error:
            if error.code not in (404, 409):  # the run does not exist yet, or is active
                self.wrong.append(f"{path}: {error.code} {error.read()[:500]!r}")
            return ""

    def get(self, path: str, **query: str) -> Any:
        text = self.request(f"/api/{path}?{urlencode(query)}")
        return json.loads(text) if text else None

    def act(self, action: str, text: str = "") -> None:
        found = re.search('"csrf": "([^"]+)"', self.request("/"))
        assert found
        given = {"run": "quickstart/watched", "action": action, "text": text}
        self.request("/api/act", given, **{"X-CSRF-Token": found[1]})

    def visit(self, ended: threading.Event) -> None:
        """Ask for views and change tags until `ended`; a board that is killed is no error."""
        for number in range(10**6):
            if ended.wait(0.05):
                return
            with suppress(OSError, AssertionError, ValueError):
                for path in ("view", "logs", "samples", "system", "curves"):
                    self.get(path, run="quickstart/watched")
                self.get("runs")
                self.act("tag", f"a{number} -a{number - 1}")


@contextmanager
def _board(watched: Watched) -> Iterator[Board]:
    board = Board(watched.folder, free_port(), watched.marker)
    try:
        yield board
    finally:
        board.kill()


def _kill_boards(watched: Watched) -> list[str]:
    """Kill the board four times while it serves and the run writes."""
    ended = threading.Event()
    with _board(watched) as board:
        token = board.token
        visitor = threading.Thread(target=board.visit, args=[ended])
        visitor.start()
        try:
            process = start(*watched.command, "watched", cwd=watched.folder, marker=watched.marker)
            for _ in range(NUM_BOARDS):
                time.sleep(watched.generator.uniform(0, 2.5))
                watched.doing.append(f"board at row {watched.rows} after {board.served} replies")
                board.kill()
                board.start()
            _, talk = process.communicate()
            assert process.returncode == 0, talk
            wait_until(lambda: watched.driver() is None, os.getpid(), "the driver")
        finally:
            ended.set()
            visitor.join()
        before = _views(board)
        board.kill()
        board.start()
        wrong = [] if board.token == token else ["the token has changed"]
        wrong += [] if _views(board) == before else ["the views differ after a new start"]
        return [*wrong, *board.wrong, *_untrue(watched, "finished", 0)]


def _views(board: Board) -> list[Any]:
    """Return what the board shows of the run, without the position of its streams."""
    shown: list[Any] = [
        board.get(path, run="quickstart/watched") for path in ("view", "logs", "samples", "curves")
    ]
    for run in shown[0]["runs"]:
        del run["live"]
    return shown


def _kill_board_of_a_resume(watched: Watched) -> list[str]:
    """Let the board stop and resume the run, and kill it while the run continues."""
    process = start(*watched.command, "watched", cwd=watched.folder, marker=watched.marker)
    wait_until(lambda: watched.rows > 2 or process.poll() is not None, process.pid, "three rows")
    with _board(watched) as board:
        board.act("stop")
        _, talk = process.communicate()
        assert process.returncode == 143, talk
        before = watched.record()["attempts"]
        board.act("resume")
        moment = watched.generator.uniform(0, 6.0)
        time.sleep(moment)
        watched.doing.append(f"board {moment:.1f} s after it has started a resume")
        board.kill()
        deadline = time.monotonic() + _DEADLINE_S
        while watched.record()["attempts"] == before or watched.driver() is not None:
            assert time.monotonic() < deadline, f"{watched.doing}: the run does not end"
            time.sleep(0.2)
        board.start()
        return [*board.wrong, *_untrue(watched, "finished", 0)]
