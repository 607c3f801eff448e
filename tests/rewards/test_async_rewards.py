"""Tests of asynchronous reward functions and of functions of groups, in real worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import InternalError
from rlctl.runtime.rewards.functions import RewardSpec
from rlctl.runtime.rewards.request_limits import RequestSettings
from rlctl.runtime.rewards.reward_pool import RewardPool

SOURCE = """
import asyncio, os, time
from rlctl.plugins import declare

active = most = 0

async def calls(data_source, solution_str, ground_truth, extra_info, prompt):
    global active, most
    active += 1
    most = max(most, active)
    try:
        if solution_str == "raise":
            raise RuntimeError("boom")
        if solution_str == "hang":
            await asyncio.sleep(600)
        if solution_str == "stubborn":
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                await asyncio.sleep(600)
        if solution_str == "block":
            time.sleep(600)
        await asyncio.sleep(0.05)
        return {"score": len(solution_str), "pid": os.getpid(), "most": most,
                "question": len(prompt[0]["content"])}
    finally:
        active -= 1

def length(solution_str, **kwargs):
    return len(solution_str)

@declare(scores_groups=True)
def best(data_source, solution_strs, ground_truth, extra_infos):
    longest = max(map(len, solution_strs))
    return [float(len(each) == longest) if each else ValueError("empty") for each in solution_strs]

@declare(scores_groups=True)
async def sizes(data_source, solution_strs, ground_truth, extra_infos):
    return [len(solution_strs)] * (len(solution_strs) - ("short" in solution_strs))
"""

Make = Callable[..., RewardPool]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that builds a pool of functions by name, closed at the end."""
    (tmp_path / "mine.py").write_text(SOURCE)
    pools: list[RewardPool] = []

    def build(*names: str, timeout_s: float = 300.0, max_concurrent: int = 64) -> RewardPool:
        specs = [RewardSpec(f"{tmp_path}/mine.py:{name}", 1.0) for name in names]
        settings = RequestSettings(max_concurrent=max_concurrent)
        pools.append(RewardPool(specs, timeout_s=timeout_s, requests=settings))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def rows(count: int) -> list[PromptRow]:
    return [PromptRow("s", [{"role": "user", "content": "why?"}], "", extra_info={})] * count


def test_async_calls_share_one_process_and_run_at_the_same_time(make: Make) -> None:
    pool = make("calls", "length", max_concurrent=8)
    assert len(pool.workers.pool.workers) == 2
    responses = ["x" * (i * 7 % 31) for i in range(40)]
    report = pool.score(rows(40), responses)
    assert report.scores == [2.0 * len(text) for text in responses]
    parts = report.components()
    assert len(set(parts["calls/pid"])) == 1
    assert max(parts["calls/most"]) == 8  # the limit, and no less: 40 calls wait
    assert set(parts["calls/question"]) == {4.0}


def test_failed_async_calls_cost_only_themselves(make: Make) -> None:
    responses = ["ok", "raise", "hang", "ok", "stubborn", "ok"]
    pool = make("calls", timeout_s=4.0)
    report = pool.score(rows(6), responses)
    assert report.scores == [2.0 * (text == "ok") for text in responses]
    assert (report.num_errors, report.num_timeouts) == (1, 2)
    assert "RuntimeError: boom" in str(report.results[1].error)
    assert report.results[2].error == "took longer than 4 s"


def test_a_call_that_blocks_the_loop_is_interrupted(make: Make) -> None:
    pool = make("calls", timeout_s=4.0, max_concurrent=1)
    report = pool.score(rows(3), ["ok", "block", "ok"])
    assert report.scores == [2.0, 0.0, 2.0]
    assert report.num_timeouts == 1
    assert "blocked the event loop" in str(report.results[1].error)


def test_the_time_limit_begins_with_the_call(make: Make) -> None:
    pool = make("calls", timeout_s=3.0, max_concurrent=1)
    assert pool.score(rows(64), ["ok"] * 64).num_timeouts == 0  # 3.2 s together


def test_functions_of_groups_get_all_responses_to_a_prompt(make: Make) -> None:
    pool = make("best", "sizes")
    texts, groups = ["a", "bbb", "cc", "d", "", "short", "x"], [0, 0, 0, 1, 1, 2, 2]
    report = pool.score(rows(7), texts, groups=groups)
    assert [each.components.get("best") for each in report.results] == [0, 1, 0, 1, 0, 1, 0]
    assert [each.components.get("sizes") for each in report.results] == [3, 3, 3, 2, 2, 0, 0]
    assert "ValueError: empty" in str(report.results[4].error)
    assert "not a list with a score for each of 2 responses" in str(report.results[5].error)
    assert report.num_errors == 3


def test_the_order_in_which_responses_come_changes_nothing(make: Make) -> None:
    pool = make("best", "calls")
    texts, groups = ["a", "bbb", "cc", "dd", "e"], [0, 0, 0, 1, 1]
    expected = pool.score(rows(5), texts, groups=groups).scores
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        scoring = pool.open(groups)
        for number in order:
            scoring.add(number, rows(1)[0], texts[number])
        assert scoring.finish().scores == expected


def test_a_batch_that_is_given_up_leaves_nothing_in_the_next(make: Make) -> None:
    pool = make("length", "calls")
    given_up = pool.open([0, 1])
    given_up.add(0, rows(1)[0], "long text")
    assert pool.score(rows(1), ["ab"]).scores == [4.0]
    with pytest.raises(InternalError, match="neither added"):
        given_up.finish()
