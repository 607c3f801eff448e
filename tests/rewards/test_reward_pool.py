"""Tests of the reward pool: order, components, failures, timeouts and the end of the workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError, InternalError, ResourceError
from rlctl.runtime.rewards.pool import RewardPool, RewardSpec
from tests.processes import gone

SOURCE = """
import os, sys, time

def length(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str), "index": extra_info["index"]}

def who(solution_str, **kwargs):
    heavy = ("torch", "ray", "transformers", "numpy", "pyarrow", "typer")
    return {"score": os.getpid(), "heavy": sum(name in sys.modules for name in heavy)}

def slow(solution_str, **kwargs):
    time.sleep(float(solution_str))
    return 1.0

def misbehave(solution_str, **kwargs):
    if solution_str == "raise":
        raise RuntimeError("boom")
    if solution_str == "hang":
        time.sleep(3600)
    if solution_str == "stubborn":
        while True:
            try:
                time.sleep(3600)
            except BaseException:
                pass
    if solution_str == "die":
        os._exit(3)
    if solution_str == "none":
        return None
    print("printed by a reward function")
    return 1.0
"""


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., RewardSpec]:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return lambda name, weight=1.0, **kwargs: RewardSpec(f"{path}:{name}", weight, kwargs)


@pytest.fixture
def rows() -> Callable[[int], list[PromptRow]]:
    return lambda count: [
        PromptRow("test", [{"role": "user", "content": "?"}], "truth", extra_info={"index": i})
        for i in range(count)
    ]


def has_exited(pid: int) -> bool:
    """Wait up to 5 minutes for the process to exit."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if gone(pid):
            return True
        time.sleep(0.02)
    return False


def test_many_rows_keep_their_order(
    spec: Callable[..., RewardSpec], rows: Callable[[int], list[PromptRow]]
) -> None:
    responses = ["x" * (i * 37 % 101) for i in range(203)]
    with RewardPool([spec("length")], timeout_s=300, num_processes=2) as pool:
        for _ in range(2):
            report = pool.score(rows(203), responses)
            assert report.scores == [len(text) for text in responses]
            assert report.components() == {"index": list(map(float, range(203)))}
            assert (report.num_errors, report.num_timeouts, report.first_error) == (0, 0, None)
        assert pool.score([], []).results == []


def test_workers_start_once_share_the_work_and_import_nothing_heavy(
    spec: Callable[..., RewardSpec], rows: Callable[[int], list[PromptRow]]
) -> None:
    with RewardPool([spec("who")], timeout_s=300, num_processes=2) as pool:
        first, second = pool.score(rows(40), [""] * 40), pool.score(rows(40), [""] * 40)
    assert len(set(first.scores + second.scores)) == 2
    assert os.getpid() not in first.scores
    assert set(first.components()["heavy"]) == {0.0}


def test_only_failed_calls_score_zero(
    spec: Callable[..., RewardSpec],
    rows: Callable[[int], list[PromptRow]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    responses = ["ok", "raise", "ok", "hang", "ok", "die", "ok", "none", "ok", "ok"]
    with RewardPool([spec("misbehave")], timeout_s=4, num_processes=2) as pool:
        report = pool.score(rows(10), responses)
        assert report.scores == [float(text == "ok") for text in responses]
        assert (report.num_errors, report.num_timeouts) == (3, 1)
        errors = {
            text: result.error for text, result in zip(responses, report.results, strict=True)
        }
        assert errors["ok"] is None
        assert "RuntimeError: boom" in str(errors["raise"])
        assert errors["hang"] == "took longer than 4 s"
        assert errors["die"] == "the reward worker exited (exit status 3)"
        assert "returned None" in str(errors["none"])
        assert report.first_error == errors["raise"]
        assert pool.score(rows(4), ["ok"] * 4).scores == [1.0] * 4  # the worker was replaced
    assert "printed" not in capfd.readouterr().out


def test_a_call_that_cannot_be_interrupted_is_killed(
    spec: Callable[..., RewardSpec],
    rows: Callable[[int], list[PromptRow]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlctl.runtime.sandbox.worker_process.GRACE_S", 0.3)
    with RewardPool([spec("misbehave")], timeout_s=3, num_processes=1) as pool:
        report = pool.score(rows(5), ["ok", "stubborn", "ok", "stubborn", "ok"])
    assert report.scores == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert report.num_timeouts == 2
    assert report.first_error == "took longer than 3 s and could not be interrupted"


def test_timeout_applies_to_a_call_not_to_the_batch(
    spec: Callable[..., RewardSpec], rows: Callable[[int], list[PromptRow]]
) -> None:
    with RewardPool([spec("slow")], timeout_s=3, num_processes=1) as pool:
        assert pool.score(rows(8), ["0.4"] * 8).scores == [1.0] * 8  # 3.2 s together


def test_weights_and_components_of_several_functions(
    spec: Callable[..., RewardSpec], rows: Callable[[int], list[PromptRow]]
) -> None:
    functions = [
        RewardSpec("gsm8k", 2.0, {"method": "flexible"}),
        spec("length", 0.5),
        spec("misbehave", 10.0),
    ]
    with RewardPool(functions, timeout_s=300, num_processes=2) as pool:
        report = pool.score(
            [PromptRow("", [], "3", extra_info={"index": 7})] * 2, ["it is 3", "raise"]
        )
    assert report.scores == [2.0 * 1 + 0.5 * 7 + 10.0, 0.5 * 5]
    assert report.results[0].components == {
        "gsm8k": 1.0,
        "length": 7.0,
        "length/index": 7.0,
        "misbehave": 1.0,
    }
    assert report.results[1].components == {
        "gsm8k": 0.0,
        "length": 5.0,
        "length/index": 7.0,
        "misbehave": 0.0,
    }
    assert report.num_errors == 1


def test_the_same_function_twice_gives_two_components(
    rows: Callable[[int], list[PromptRow]],
) -> None:
    functions = [
        RewardSpec("gsm8k", 1.0, {"method": "flexible"}),
        RewardSpec("gsm8k", 0.1, {"method": "strict"}),
    ]
    with RewardPool(functions, timeout_s=300, num_processes=2) as pool:
        report = pool.score([PromptRow("", [], "3")], ["it is 3"])
        assert not pool.workers.pool.workers
    assert report.results[0].components == {"gsm8k_1": 1.0, "gsm8k_2": 0.0}


def test_rows_without_functions_have_results() -> None:
    """Environments score all episodes of a recipe without reward functions."""
    with RewardPool([], timeout_s=300, num_processes=1) as pool:
        scoring = pool.open([0, 0, 1])
        for row in range(3):
            scoring.skip(row)
        assert [each.score for each in scoring.finish().results] == [0.0, 0.0, 0.0]


def test_missing_component_of_a_row_is_absent(
    spec: Callable[..., RewardSpec], rows: Callable[[int], list[PromptRow]]
) -> None:
    with RewardPool([spec("length")], timeout_s=300, num_processes=1) as pool:
        without_index = PromptRow("", [], "3")
        report = pool.score([*rows(2), without_index], ["a", "b", "c"])
    assert [str(value) for value in report.components()["index"]] == ["0.0", "1.0", "nan"]
    assert "KeyError" in str(report.results[2].error)


def test_unknown_function_raises(
    spec: Callable[..., RewardSpec],
) -> None:
    with pytest.raises(ConfigError, match="has no 'lenght'"):
        RewardPool([spec("lenght")], timeout_s=300, num_processes=2)


def test_file_that_fails_to_load_raises(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("assert False\ndef f(**kwargs): return 1\n")
    with pytest.raises(ConfigError, match="does not import: AssertionError"):
        RewardPool([RewardSpec(f"{tmp_path}/mine.py:f", 1.0)], timeout_s=300, num_processes=2)
    (tmp_path / "mine.py").write_text("import os\nos._exit(9)\ndef f(**kwargs): return 1\n")
    with pytest.raises(ResourceError, match="exited while starting \\(exit status 9\\)"):
        RewardPool([RewardSpec(f"{tmp_path}/mine.py:f", 1.0)], timeout_s=300, num_processes=1)


def test_close_kills_the_workers_and_a_closed_pool_raises(
    spec: Callable[..., RewardSpec], rows: Callable[[int], list[PromptRow]]
) -> None:
    pool = RewardPool([spec("who")], timeout_s=300, num_processes=2)
    pids = [worker.process.pid for worker in pool.workers.pool.workers]
    pool.close()
    pool.close()
    assert all(has_exited(pid) for pid in pids)
    with pytest.raises(InternalError, match="closed"):
        pool.score(rows(1), ["x"])


def test_worker_that_exits_while_idle_is_replaced_without_a_failed_call(
    spec: Callable[..., RewardSpec], rows: Callable[[int], list[PromptRow]]
) -> None:
    with RewardPool([spec("length")], timeout_s=300, num_processes=1) as pool:
        worker = pool.workers.pool.workers[0]
        assert worker.pid is not None
        worker.process.kill()
        worker.process.wait()
        assert has_exited(worker.pid)  # it dies with its guard, somewhat later
        assert pool.score(rows(3), ["a", "bb", "ccc"]).scores == [1.0, 2.0, 3.0]


def test_built_in_scorer_is_fast(rows: Callable[[int], list[PromptRow]]) -> None:
    steps = [PromptRow("", [], "44")] * 256
    responses = [
        "So 12 + 5 = 17 apples and then she gives away some more of them. " * 12 + "#### 44"
    ] * 256
    with RewardPool(
        [RewardSpec("gsm8k", 1.0, {"method": "flexible"})], timeout_s=300, num_processes=2
    ) as pool:
        pool.score(steps, responses)
        times: list[float] = []
        while len(times) < 200 and min(times, default=1.0) >= 0.05:  # others may use the machine
            started = time.perf_counter()
            assert sum(pool.score(steps, responses).scores) == 256
            times.append(time.perf_counter() - started)
    assert min(times) < 0.05  # seconds; 0.01 on an idle machine
