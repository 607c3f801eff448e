"""Soak cases of sweeps: killed and resumed, they must end as undisturbed ones.

Each trial must be there once, with the values, the result and every byte of its run.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.command import environment, remove_run, rlctl, wait_until_gone, with_marker
from tests.e2e.killed_runs import EXIT_CODES, differing
from tests.forks import PRELUDE, Forked

WRITE = "RLCTL_TEST_KILL_AT_WRITE"
WRITES = "RLCTL_TEST_WRITES"
LR = "actor_rollout_ref.actor.optim.lr"
SHORT = ["trainer.total_training_steps=3", "ray_kwargs.ray_init.num_cpus=2", "--parallel", "2"]
KINDS = {
    "random": [*SHORT, f"{LR}=interval(1e-4,1e-2)", "--sampler", "random", "--trials", "3"],
    "grid": [*SHORT, f"{LR}=1e-3,1e-2", "--seeds", "2"],
}
# Kills of one case, by what is killed.
NUM_KILLS = {"driver": 2, "child": 2, "power": 2, "write": 3}
CASES = [
    f"sweep-{kind}/{victim}/{name}"
    for kind in KINDS
    for victim in NUM_KILLS
    for name in (EXIT_CODES if victim == "driver" else ["SIGKILL"])
    if name != "SIGUSR1"
]
_DEADLINE_S = 900.0  # of one attempt, which takes a minute


def kill_at_write() -> None:
    """Kill this process at the n-th write of its sweep, after a delay; list the writes in a file.

    The environment has `n:seconds`. No-op in the runs of a sweep.
    """
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    from rlctl.runs.run_dir import SWEEP_VARIABLE

    if SWEEP_VARIABLE in os.environ or WRITES not in os.environ:
        return
    wanted, _, delay = os.environ.get(WRITE, "0:0").partition(":")
    numbers, file = itertools.count(1), os.open(os.environ[WRITES], os.O_WRONLY | os.O_APPEND)

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write(what: str) -> None:
        os.write(file, f"{what}\n".encode())
        if next(numbers) != int(wanted):
            return
        if float(delay):
            threading.Timer(float(delay), kill).start()
        else:
            kill()

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "os.rename" and str(arguments[1]).endswith((".json", ".jsonl")):
            write(f"replaces {Path(str(arguments[1])).name}")
        elif name == "os.mkdir":
            write(f"makes {Path(str(arguments[0])).name}")

    event.listen(Engine, "commit", lambda _: write("commits"))
    sys.addaudithook(audit)


@dataclass
class Harried:
    """Sweep that is killed `kills` times; `doing` is what was killed, and when."""

    command: Sequence[str]
    folder: Path
    generator: random.Random
    name: str = "harried"
    doing: list[str] = field(default_factory=list)
    more: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / "runs" / "quickstart" / self.name

    @property
    def marker(self) -> str:
        return f"{os.getpid()}-{self.name}"

    def begin(self) -> Forked:
        """Start the sweep, or resume it if it has a record."""
        known = (self.path / "sweep.json").exists()
        words = ["resume", self.name] if known else [*self.command, "--name", self.name]
        own = environment() | {"RLCTL_TEST_MARKER": self.marker} | self.more
        return Forked(words, self.folder, own)

    def end(self, process: Forked, code: int) -> None:
        """Wait for the end of an attempt and check its exit code."""
        deadline = time.monotonic() + _DEADLINE_S
        while process.poll() is None:
            assert time.monotonic() < deadline, f"{self.doing}: hangs\n{process.stderr.read()}"
            time.sleep(0.05)
        talk = process.stdout.read() + process.stderr.read()
        assert process.returncode == code, (
            f"{self.doing}; exit {process.returncode}, not {code}\n{talk}"
        )

    def kill(self, victim: str, number: signal.Signals, rows: int) -> None:
        """Run an attempt, and kill it or a part of it, at a random row of its `rows` or before."""
        first = self.num_rows()
        wanted = self.generator.randint(first, max(first, rows - 1))
        delay = self.generator.uniform(0, 6.0 if wanted == first else 1.5)
        process, due = self.begin(), math.inf
        targets = {"driver": self._driver, "child": self._child, "power": self._all}
        while process.poll() is None:
            if due == math.inf and self.num_rows() >= wanted:
                due = time.monotonic() + delay
            if time.monotonic() > due and (chosen := targets[victim](process)):
                self.doing.append(f"{victim}, {delay:.1f} s after row {wanted}: {self._stage()}")
                for each in chosen:
                    with suppress(psutil.NoSuchProcess):
                        each.send_signal(number)
                break
            time.sleep(0.02)
        else:
            self.end(process, 0)
            return
        self.end(process, 0 if victim == "child" else EXIT_CODES[number.name])

    def kill_at_write(self, writes: int) -> None:
        """Run an attempt that is killed at one of its first `writes` writes."""
        number = self.generator.randint(1, writes)
        delay = self.generator.choice((0.0, self.generator.uniform(0, 0.004)))
        file = self.folder / f"{self.name}.writes"
        file.write_text("")
        self.more = armed(file) | {WRITE: f"{number}:{delay:.4f}"}
        process = self.begin()
        while process.poll() is None:
            time.sleep(0.05)
        self.more = {}
        lines = file.read_text().splitlines()
        if process.returncode != 0 and len(lines) >= number:
            self.doing.append(f"write {number}, {delay * 1000:.1f} ms: {lines[number - 1]}")
        self.end(process, -9 if len(lines) >= number else 0)

    def _driver(self, process: Forked) -> list[psutil.Process]:
        return [psutil.Process(process.pid)]

    def _child(self, process: Forked) -> list[psutil.Process]:
        """Return a run's process, whose record names it, and that has not been killed before."""
        found: list[psutil.Process] = []
        for record in self.path.parent.glob(f"{self.name}-*/run.json"):
            with suppress(OSError, ValueError, KeyError, psutil.NoSuchProcess):
                content = json.loads(record.read_text())
                is_first = content["attempts"] == 1 and content["state"] in ("running", "starting")
                if is_first and (one := psutil.Process(content["process"]["pid"])).is_running():
                    found.append(one)
        return [self.generator.choice(found)] if found else []

    def _all(self, process: Forked) -> list[psutil.Process]:
        """Return all processes of the sweep, its driver first, as if the power failed."""
        more = [each for each in with_marker(self.marker) if each.pid != process.pid]
        return [psutil.Process(process.pid), *more]

    def num_rows(self) -> int:
        files = self.path.parent.glob(f"{self.name}-*/metrics.jsonl")
        return sum(file.read_text().count("\n") for file in files)

    def _stage(self) -> str:
        """Return the trials and the steps of each that exist."""
        found: list[str] = []
        for record in sorted(self.path.parent.glob(f"{self.name}-*/run.json")):
            with suppress(OSError, ValueError, KeyError):
                lines = record.with_name("metrics.jsonl")
                rows = lines.read_text().count("\n") if lines.exists() else 0
                state = json.loads(record.read_text())["state"]
                found.append(f"{record.parent.name.partition('-')[2]} {state} {rows}")
        return ", ".join(found) or "no runs"

    def remove(self) -> None:
        """Remove the sweep, its runs and their files elsewhere; kill what is left."""
        for each in with_marker(self.marker):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        shutil.rmtree(self.path, ignore_errors=True)
        for run in self.path.parent.glob(f"{self.name}-*"):
            remove_run(run, self.folder / "elsewhere")


def armed(writes: Path) -> dict[str, str]:
    """Return the variables with which a sweep lists its writes in a file."""
    return {PRELUDE: f"{__name__}:kill_at_write", WRITES: str(writes)}


def survive(case: str, settings: Sequence[str], seed: int, folder: Path) -> str | None:
    """Return what differs between a sweep that is killed as `case` says and an undisturbed one."""
    kind, victim, signal_name = case.removeprefix("sweep-").split("/")
    command = ["sweep", "grpo", *settings, *KINDS[kind]]
    generator = random.Random(f"{seed} {case}")
    straight, writes = _undisturbed(Harried(command, folder, generator, f"straight{kind}"))
    sweep = Harried(command, folder, generator)
    try:
        for _ in range(NUM_KILLS[victim]):
            if victim == "write":
                sweep.kill_at_write(writes // 2)
            else:
                sweep.kill(victim, signal.Signals[signal_name], straight.num_rows())
        sweep.end(sweep.begin(), 0)
        print(f"killed {len(sweep.doing)}: {sweep.doing}", flush=True)
        wait_until_gone(sweep.marker)
        wrong = _differing(sweep, straight) if sweep.doing else ["nothing was killed"]
    finally:
        sweep.remove()
    return ", ".join(wrong) or None


def _undisturbed(sweep: Harried) -> tuple[Harried, int]:
    """Return the undisturbed sweep, made once, and the number of its writes."""
    file = sweep.folder / f"{sweep.name}.writes"
    if not file.exists():
        file.write_text("")
        sweep.more = armed(file)
        sweep.end(sweep.begin(), 0)
        sweep.more = {}
    return sweep, file.read_text().count("\n")


def _differing(sweep: Harried, straight: Harried) -> list[str]:
    """Return in what the killed sweep differs from the undisturbed one."""
    parts: dict[str, Callable[[Harried], object]] = {
        "trials": _trials,
        "runs": lambda each: [path.name.removeprefix(each.name) for path in _runs(each)],
        "record": _end,
        "what `rlctl sweeps` shows": _listed,
    }
    wrong = [
        f"{name}: {read(sweep)}, undisturbed {read(straight)}"
        for name, read in parts.items()
        if read(sweep) != read(straight)
    ]
    for one, other in zip(_runs(sweep), _runs(straight), strict=False):
        wrong += [f"{one.name}: {part}" for part in differing(one, other)]
    return wrong


def _runs(sweep: Harried) -> list[Path]:
    return sorted(sweep.path.parent.glob(f"{sweep.name}-*"))


def _trials(sweep: Harried) -> list[list[Any]]:
    found = json.loads(rlctl("show", sweep.name, "--json", cwd=sweep.folder).stdout)["trials"]
    fields = ("number", "overrides", "state", "value", "reason")
    return sorted([trial[name] for name in fields] for trial in found)


def _end(sweep: Harried) -> list[Any]:
    record = json.loads((sweep.path / "sweep.json").read_text())
    runs = [json.loads((run / "run.json").read_text()) for run in _runs(sweep)]
    ends = [[run["state"], run["exit_code"], run["sweep"] == sweep.name] for run in runs]
    return [record["state"], record["exit_code"], ends]


def _listed(sweep: Harried) -> list[Any]:
    rows = json.loads(rlctl("sweeps", "--json", cwd=sweep.folder).stdout)
    fields = ("state", "trials", "best")
    return [[row[name] for name in fields] for row in rows if row["name"] == sweep.name]
