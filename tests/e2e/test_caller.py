"""A program that calls the API keeps its process, however a run ends."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import rlctl
from rlctl.errors import ConfigError, Terminated, TimeUp
from rlctl.runtime.workers.interrupts import INTERRUPTS

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGALRM)
TIMER_S = 3600.0  # of the program
ROLLOUT = "actor_rollout_ref.rollout"
CODE = """
import os, signal, torch
from pathlib import Path

class Parser:
    def __init__(self): raise KeyError("parser")

def fail(inputs, config): return undefined

def interrupt(inputs, config):
    os.kill(os.getpid(), signal.SIGINT)
    return 2 * (torch.zeros_like(inputs.rewards),)

def terminate(inputs, config):
    os.kill(os.getpid(), signal.SIGTERM)
    return 2 * (torch.zeros_like(inputs.rewards),)

def request(inputs, config):
    next(Path.cwd().glob("runs/*/x")).joinpath("stop").touch()
    return 2 * (torch.zeros_like(inputs.rewards),)
"""
ENDS: dict[str, tuple[str, type[BaseException]]] = {
    "parser": (f"{ROLLOUT}.multi_turn.enable=true {ROLLOUT}.multi_turn.format={{}}", ConfigError),
    "fail": ("algorithm.adv_estimator={}", ConfigError),
    "interrupt": ("algorithm.adv_estimator={}", KeyboardInterrupt),
    "terminate": ("algorithm.adv_estimator={}", Terminated),
}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Be a program with handlers and a timer of its own; yield the signals that it gets."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    timer = signal.getitimer(signal.ITIMER_REAL)
    for number in SIGNALS:
        signal.signal(number, lambda number, _: received.append(number))
    signal.setitimer(signal.ITIMER_REAL, TIMER_S)
    try:
        yield received
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        for number, handler in before.items():
            signal.signal(number, handler)


def state() -> dict[str, Any]:
    """Return what a run must leave as it was."""
    return {
        "handlers": {number: signal.getsignal(number) for number in signal.Signals},
        "threads": {each for each in threading.enumerate() if each.is_alive()},
        "children": {*psutil.Process().children(recursive=True)},
        # oneDNN reads its sizes once, with the first model of the process.
        "environment": {
            name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name
        },
        "folder": os.getcwd(),
        "umask": (os.umask(0o22), os.umask(0o22))[0],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    }


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("parser", marks=pytest.mark.plugin("agents")),
        *("fail", "interrupt", "terminate", "request", "time"),
    ],
)
def test_a_run_leaves_the_process_of_its_caller_as_it_was(
    end: str,
    here: Path,
    settings: list[str],
    program: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    module = f"ending_{end}"
    (here / f"{module}.py").write_text(CODE)
    words, error = ENDS.get(end, ("algorithm.adv_estimator={}", Terminated))
    part = {"parser": "Parser", "time": "request"}.get(end, end)
    chosen = words.format(f"{module}:{part}").split()
    begin: Callable[[], object] = functools.partial(
        rlctl.train,
        "grpo",
        [*settings, "data.val_files=null", "trainer.experiment_name=x", *chosen],
        inline=True,
        end_by=time.monotonic() if end == "time" else None,
    )
    before = state()
    with pytest.raises(TimeUp if end == "time" else error):
        begin()
    assert state() == before
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    assert 0 < left_s <= TIMER_S
    assert program == [], "the run has received them"
    signal.raise_signal(signal.SIGINT)
    assert program == [signal.SIGINT], "the program receives the next one"
    # A later run is not asked to stop.
    assert not INTERRUPTS.requested
