"""Tests of the isolation of reward code: environment, signals, limits, deadlines of imports."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError
from rlctl.runtime.rewards.functions import RewardSpec
from rlctl.runtime.rewards.reward_pool import RewardPool
from rlctl.runtime.sandbox.process_limits import allowed_environment
from rlctl.runtime.sandbox.worker_settings import Limits, WorkerSettings
from tests.processes import run_python, scopes_signals
from tests.progress import wait_until

SOURCE = """
import os, signal

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "group":
        os.killpg(0, signal.SIGKILL)
    if solution_str == "zero":
        os.kill(0, signal.SIGKILL)
    if solution_str == "parent":
        os.kill(os.getppid(), signal.SIGKILL)
    if solution_str == "driver":
        os.kill(ground_truth, signal.SIGKILL)
    if solution_str == "memory":
        return len(bytearray(200 * 2**30))
    if solution_str == "endless file":
        with open("endless", "wb") as file:
            while True:
                file.write(bytes(2**20))
    if solution_str == "files":
        return len([open(__file__) for _ in range(10_000)])
    if solution_str == "forge":
        import gc, socket
        for each in gc.get_objects():
            if isinstance(each, socket.socket):
                each.send(b"no json")
    return {"score": 1, "pred": f"{os.getppid()} {os.getpgid(0)} {os.getpid()}"}
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


def run(pool: RewardPool, *responses: str) -> list[tuple[float, str | None, str | None]]:
    """Return score, extracted answer and error of each response."""
    report = pool.score([PromptRow("s", [], os.getpid())] * len(responses), responses)
    return [(each.score, each.pred, each.error) for each in report.results]


def test_allow_list() -> None:
    given = dict.fromkeys(
        ("PATH", "LC_ALL", "OMP_NUM_THREADS", "HF_HOME", "PYTHONPATH", "HF_TOKEN", "MY_TOKEN_CACHE")
    ) | {"CUDA_VISIBLE_DEVICES": "3", "SSH_AUTH_SOCK": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    environment = {name: value or "x" for name, value in given.items()}
    allowed = allowed_environment(environment)
    assert set(allowed) == {*list(given)[:5], "CUDA_VISIBLE_DEVICES"}
    assert allowed["CUDA_VISIBLE_DEVICES"] == ""
    named = allowed_environment(environment, ["CUDA_VISIBLE_DEVICES", "HF_TOKEN", "NOT_SET"])
    assert (named["CUDA_VISIBLE_DEVICES"], named["HF_TOKEN"]) == ("3", "x")
    assert "NOT_SET" not in named


def test_proxies_are_passed_on_without_passwords() -> None:
    given = {"HTTPS_PROXY": "http://proxy:3128", "no_proxy": "a", "http_proxy": "http://u:p@proxy"}
    allowed = set(allowed_environment(given)) - {"CUDA_VISIBLE_DEVICES"}
    assert allowed == {"HTTPS_PROXY", "no_proxy"}
    assert "http_proxy" in allowed_environment(given, ["http_proxy"])


def test_an_error_names_the_setting_for_a_variable_that_is_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")
    read = "os.environ['MY_API_KEY']"
    (tmp_path / "late.py").write_text(f"import os\ndef score(**_):\n    return len({read})\n")
    (tmp_path / "early.py").write_text(f"import os\nKEY = {read}\ndef score(**_): return 1\n")
    with RewardPool([RewardSpec(f"{tmp_path}/late.py:score", 1.0)], timeout_s=9) as p:
        [(_, _, error)] = run(p, "x")
    assert error is not None
    assert f"KeyError: 'MY_API_KEY' ({tmp_path}/late.py:3)" in error
    assert "reward.env=[MY_API_KEY]" in error
    spec = RewardSpec(f"{tmp_path}/early.py:score", 1.0)
    with pytest.raises(ConfigError, match="KeyError") as caught:
        RewardPool([spec], timeout_s=9)
    assert caught.value.problems[0].hint == "reward.env=[MY_API_KEY] passes it on"
    with RewardPool([spec], timeout_s=9, workers=WorkerSettings(env=["MY_API_KEY"])) as pool:
        assert run(pool, "x") == [(1.0, None, None)]


def test_printing_never_fails_and_the_log_stays_small(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "def score(solution_str, **_):\n"
        "    for _ in range(12):\n        print('x' * 2**21)\n"
        "    print('end of', solution_str)\n    return 1.0\n"
    )
    spec = RewardSpec(f"{tmp_path}/loud.py:score", 1.0)
    workers = WorkerSettings(logs=tmp_path, limits=Limits(file_size=2**20))
    with RewardPool([spec], timeout_s=60, workers=workers) as pool:
        assert [each[0] for each in run(pool, "a", "b")] == [1.0, 1.0]
    log = (tmp_path / "reward-0.log").read_bytes()
    assert len(log) < 20 * 2**20
    assert b"earlier output was removed" in log
    assert log.endswith(b"end of b\n")


def test_a_log_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("def score(**_):\n    print('x')\n    return 1.0\n")
    (tmp_path / "reward-0.log").symlink_to("/dev/full")
    spec = RewardSpec(f"{tmp_path}/loud.py:score", 1.0)
    with RewardPool([spec], timeout_s=60, workers=WorkerSettings(logs=tmp_path)) as pool:
        assert run(pool, "a") == [(1.0, None, None)]


@pytest.mark.skipif(sys.platform != "linux", reason="process groups as on Linux")
def test_reward_code_that_kills_costs_only_its_own_call(mine: Path) -> None:
    deeds = ["ok", "group", "ok", "zero", "ok", "parent", "ok", "driver", "ok", "forge", "ok"]
    if not scopes_signals():
        deeds.remove("driver")  # nothing prevents it: the test would end here
    with RewardPool(
        [RewardSpec(f"{mine}:compute_score", 1.0)], timeout_s=300, workers=WorkerSettings(2)
    ) as p:
        found = run(p, *deeds)
        for deed, (score, pred, error) in zip(deeds, found, strict=True):
            if deed != "ok":
                assert (score, error is None) == (0.0, False), deed
                continue
            assert error is None
            parent, group, own = map(int, str(pred).split())
            assert parent != os.getpid()
            assert group == own != os.getpgid(0)
        assert [score for score, _, _ in run(p, "ok", "ok")] == [1.0, 1.0]


def test_computation_after_a_call_is_ended_by_the_cpu_limit() -> None:
    """In a child, and in a thread of the process itself."""
    code = (
        "import subprocess, sys, threading, time\n"
        "from rlctl.runtime.sandbox.process_limits import limit_cpu\n"
        "limit_cpu(0)\n"
        "done = subprocess.run([sys.executable, '-c', 'while True: pass'])\n"
        "print(done.returncode, flush=True)\n"
        "def spin():\n    while True: pass\n"
        "threading.Thread(target=spin, daemon=True).start()\ntime.sleep(600)"
    )
    done = run_python("-c", code)
    assert (int(done.stdout), done.returncode) == (-signal.SIGXCPU, -signal.SIGXCPU)


def test_reward_code_that_exceeds_a_limit_scores_zero(mine: Path) -> None:
    limits = Limits(memory=2 * 2**30, file_size=8 * 2**20, open_files=64)
    spec = RewardSpec(f"{mine}:compute_score", 1.0)
    with RewardPool([spec], timeout_s=300, workers=WorkerSettings(limits=limits)) as pool:
        results = run(pool, "ok", "memory", "endless file", "files", "ok")
    assert [score for score, _, _ in results] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert "MemoryError" in str(results[1][2])
    assert "File too large" in str(results[2][2])
    assert "Too many open files" in str(results[3][2])
    assert (mine.parent / "endless").stat().st_size == 8 * 2**20


def test_idle_workers_that_are_killed_are_replaced(mine: Path) -> None:
    with RewardPool(
        [RewardSpec(f"{mine}:compute_score", 1.0)], timeout_s=300, workers=WorkerSettings(2)
    ) as p:
        for _, pred, _ in run(p, *["ok"] * 8):
            for pid in {int(each) for each in str(pred).split()}:
                with suppress(ProcessLookupError):  # a worker and its guard end together
                    os.kill(pid, signal.SIGKILL)
        ended = lambda: all(each.process.poll() is not None for each in p.workers.pool.workers)  # noqa: E731
        wait_until(ended, os.getpid(), "the guards end")
        assert [score for score, _, _ in run(p, "ok", "ok", "ok")] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("source", "message", "line"),
    [
        ("import time\ntime.sleep(600)\n", "took longer than 2 s", ":2"),
        (
            "import time\ntry:\n    time.sleep(600)\nfinally:\n    time.sleep(600)\n",
            "could not",
            "",
        ),
    ],
)
def test_import_that_hangs_ends_at_its_deadline(
    mine: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str, line: str
) -> None:
    monkeypatch.setattr("rlctl.runtime.sandbox.worker_process.GRACE_S", 0.5)
    monkeypatch.syspath_prepend(mine.parent)
    (mine.parent / "hanging_reward.py").write_text(source)
    with pytest.raises(ConfigError, match=message) as caught:
        RewardPool([RewardSpec("hanging_reward:f", 1.0)], timeout_s=2)
    [problem] = caught.value.problems
    assert str(problem.where or "").endswith(f"hanging_reward.py{line}" if line else "")
    assert problem.hint == "reward.timeout_s=N allows more time"
