"""Reward calls whose process something outside kills or stops are repeated once."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from threading import Thread

import pytest

from rlctl.data_prep.rows import PromptRow
from rlctl.runtime.rewards.functions import CallResult, RewardSpec
from rlctl.runtime.rewards.reward_pool import RewardPool
from rlctl.runtime.sandbox import worker_process
from tests.progress import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="states of processes as on Linux")

# A response's file in "starts" has a line for each call. A response is the number of calls that
# never end.
SOURCE = """
import asyncio, os, time
from pathlib import Path

def is_endless(response):
    with open(f"starts/{response}", "a") as file:
        file.write(f"{os.getpid()}\\n")
    return len(Path("starts", response).read_text().splitlines()) <= int(response)

def score(solution_str, **_):
    if is_endless(solution_str):
        time.sleep(3600)
    return 1.0

async def score_async(solution_str, **_):
    if is_endless(solution_str):
        await asyncio.sleep(3600)
    return 1.0
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "starts").mkdir()
    return tmp_path


def results_of(pool: RewardPool, *responses: str) -> tuple[list[CallResult], Thread]:
    """Score responses in a thread; the list gets their results at its end."""
    found: list[CallResult] = []
    rows = [PromptRow("s", [], "")] * len(responses)
    thread = Thread(target=lambda: found.extend(pool.score(rows, responses).results))
    thread.start()
    return found, thread


def process_of(response: str, call: int = 1) -> int:
    """Wait for a call of a response; return the process that runs it."""
    starts = Path("starts", response)
    lines = lambda: starts.read_text("utf-8").splitlines() if starts.exists() else []  # noqa: E731
    wait_until(lambda: len(lines()) >= call, os.getpid(), f"call {call} of {response}")
    return int(lines()[call - 1])


@pytest.mark.parametrize("function", ["score", "score_async"])
def test_a_killed_call_is_repeated_in_another_process(folder: Path, function: str) -> None:
    with RewardPool([RewardSpec(f"{folder}/mine.py:{function}", 1.0)], timeout_s=300) as pool:
        found, thread = results_of(pool, "1", "0", "0")
        os.kill(first := process_of("1"), signal.SIGKILL)
        assert process_of("1", 2) != first
        thread.join()
    assert [(result.score, result.error) for result in found] == [(1.0, None)] * 3


@pytest.mark.parametrize("function", ["score", "score_async"])
def test_a_call_that_is_killed_again_is_lost_and_counted(folder: Path, function: str) -> None:
    with RewardPool([RewardSpec(f"{folder}/mine.py:{function}", 1.0)], timeout_s=300) as pool:
        found, thread = results_of(pool, "2")
        for call in (1, 2):
            os.kill(process_of("2", call), signal.SIGKILL)
        thread.join()
        [result] = found
        assert (result.score, result.timed_out) == (0.0, False)
        assert "the reward worker exited" in str(result.error)
        assert len(Path("starts/2").read_text("utf-8").splitlines()) == 2


@pytest.mark.parametrize("function", ["score", "score_async"])
def test_a_stopped_call_is_repeated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    monkeypatch.setattr(worker_process, "GRACE_S", 0.2)
    monkeypatch.setattr(worker_process, "PING_S", 0.2)
    with RewardPool([RewardSpec(f"{folder}/mine.py:{function}", 1.0)], timeout_s=3) as pool:
        found, thread = results_of(pool, "1")
        os.kill(process_of("1"), signal.SIGSTOP)
        process_of("1", 2)
        thread.join()
    assert [(result.score, result.error) for result in found] == [(1.0, None)]


@pytest.mark.parametrize("function", ["score", "score_async"])
def test_a_call_that_took_too_long_because_it_was_stopped_is_repeated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    monkeypatch.setattr(worker_process, "GRACE_S", 600.0)
    with RewardPool([RewardSpec(f"{folder}/mine.py:{function}", 1.0)], timeout_s=3) as pool:
        found, thread = results_of(pool, "1")
        os.kill(first := process_of("1"), signal.SIGSTOP)
        time.sleep(3.2)  # longer than the limit of the call
        os.kill(first, signal.SIGCONT)
        assert process_of("1", 2) != first
        thread.join()
    assert [(result.score, result.error) for result in found] == [(1.0, None)]
