"""Tests of the reward pool: order, components, failures, timeouts and the end of the workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ResourceError
from rlctl.runtime.rewards.reward_pool import RewardPool, RewardSpec
from rlctl.runtime.sandbox.worker_settings import WorkerSettings

SOURCE = """
import os, sys, time

def length(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str), "index": extra_info["index"]}

def sees(images, **kwargs):
    return {"score": len(images)}

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


Spec = Callable[..., RewardSpec]


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return lambda name, weight=1.0, **kwargs: RewardSpec(f"{path}:{name}", weight, kwargs)


def rows(count: int) -> list[PromptRow]:
    return [
        PromptRow("test", [{"role": "user", "content": "?"}], "truth", extra_info={"index": i})
        for i in range(count)
    ]


def test_only_functions_that_take_images_get_them(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [{"role": "user", "content": "<image>"}]
    row = PromptRow("test", chat, "t", extra_info={"index": 1}, images=(b"x" * 1000,))
    sent: list[list[tuple[bytes | str, ...]]] = []
    with RewardPool([spec("length"), spec("sees")], timeout_s=300) as pool:
        submit = pool.submit

        def record(index: int, calls: Any) -> Any:
            sent.append([call.images for call in calls])
            return submit(index, calls)

        monkeypatch.setattr(pool, "submit", record)
        report = pool.score([row, row], ["a", "bb"])
    assert report.scores == [2.0, 3.0]
    assert sorted(sent) == [[()], [()], [row.images], [row.images]]


def test_many_rows_keep_their_order_and_share_workers_that_import_nothing_heavy(spec: Spec) -> None:
    responses = ["x" * (i * 37 % 101) for i in range(203)]
    with RewardPool(
        [spec("length"), spec("who", 0.0)], timeout_s=300, workers=WorkerSettings(2)
    ) as pool:
        processes = set()
        for _ in range(2):
            report = pool.score(rows(203), responses)
            assert report.scores == [len(text) for text in responses]
            components = report.components()
            assert components["length/index"] == list(map(float, range(203)))
            assert set(components["who/heavy"]) == {0.0}
            processes |= set(components["who"])
            assert (report.num_errors, report.num_timeouts, report.first_error) == (0, 0, None)
        assert len(processes - {os.getpid()}) == 2
        assert pool.score([], []).results == []
        report = pool.score([*rows(2), PromptRow("", [], "3")], ["a", "b", "c"])
    index = [str(value) for value in report.components()["length/index"]]
    assert index == ["0.0", "1.0", "nan"], "a component that a row lacks is absent"
    assert "KeyError" in str(report.results[2].error)


def test_only_failed_calls_score_zero(spec: Spec, capfd: pytest.CaptureFixture[str]) -> None:
    responses = ["ok", "raise", "ok", "hang", "ok", "die", "ok", "none", "ok", "ok"]
    with RewardPool([spec("misbehave")], timeout_s=4, workers=WorkerSettings(2)) as pool:
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
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.runtime.sandbox.worker_process.GRACE_S", 0.3)
    with RewardPool([spec("misbehave")], timeout_s=3) as pool:
        report = pool.score(rows(3), ["ok", "stubborn", "ok"])
    assert report.scores == [1.0, 0.0, 1.0]
    assert report.num_timeouts == 1
    assert report.first_error == "took longer than 3 s and could not be interrupted"


def test_timeout_applies_to_a_call_not_to_the_batch(spec: Spec) -> None:
    with RewardPool([spec("slow")], timeout_s=3) as pool:
        assert pool.score(rows(8), ["0.4"] * 8).scores == [1.0] * 8  # 3.2 s together


def test_weights_and_components_of_several_functions(spec: Spec) -> None:
    functions = [
        RewardSpec("gsm8k", 2.0, {"method": "flexible"}),
        spec("length", 0.5),
        spec("misbehave", 10.0),
    ]
    with RewardPool(functions, timeout_s=300, workers=WorkerSettings(2)) as pool:
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


def test_the_same_function_twice_gives_two_components() -> None:
    functions = [RewardSpec("gsm8k", 1.0, {"method": name}) for name in ("flexible", "strict")]
    with RewardPool(functions, timeout_s=300, workers=WorkerSettings(2)) as pool:
        report = pool.score([PromptRow("", [], "3")], ["it is 3"])
        assert pool.workers is None
    assert report.results[0].components == {"gsm8k_1": 1.0, "gsm8k_2": 0.0}


def test_rows_without_functions_have_results() -> None:
    """Environments score all episodes of a recipe without reward functions."""
    with RewardPool([], timeout_s=300) as pool:
        scoring = pool.open([0, 0, 1])
        for row in range(3):
            scoring.skip(row)
        assert [each.score for each in scoring.finish().results] == [0.0, 0.0, 0.0]


def test_file_that_ends_its_process_raises(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nos._exit(9)\ndef f(**kwargs): return 1\n")
    with pytest.raises(ResourceError, match="exited while starting \\(exit status 9\\)"):
        RewardPool([RewardSpec(f"{tmp_path}/mine.py:f", 1.0)], timeout_s=300)
