"""Calls on a worker handle, through a transport in this process, and the phases that they are."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import InternalError, UsageError
from rlctl.runtime.base.batch import LogProbs, Prompts, Ragged, Rollouts
from rlctl.runtime.base.clock import Clock, timed
from rlctl.runtime.base.metrics import Mean, Metrics, Sum
from rlctl.runtime.workers.actor import ActorWorker
from rlctl.runtime.workers.critic import CriticWorker
from rlctl.runtime.workers.dispatch import Dispatch, Worker, bind, dispatch, join, split
from rlctl.runtime.workers.reference import ReferenceWorker
from rlctl.workers import ResourcePool, spawn
from tests.architecture.source import ROOT
from tests.distributed.ranks import rank_info
from tests.generation import respond

LENGTHS = [3, 1, 4, 2, 5]


def prompts(num_rows: int = 5) -> Prompts:
    ids = Ragged.from_rows([[10 + row] * 2 for row in range(num_rows)], torch.int64)
    rows = [PromptRow("x", [{"role": "user", "content": str(i)}], str(i)) for i in range(num_rows)]
    return Prompts(ids, torch.arange(num_rows), rows)


def rollouts(lengths: list[int]) -> Rollouts:
    """Rows whose response tokens are all the row's number."""
    return respond(prompts(len(lengths)), [[row] * n for row, n in enumerate(lengths)])


class Recorder(Worker):
    """A worker that works on row numbers and records its calls."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[str] = []

    @dispatch(Dispatch.SPLIT)
    def squares(self, batch: Rollouts, scale: float = 1.0) -> Ragged:
        """Return the scaled square of each response token, and no row of the controller's own."""
        self.calls.append(f"squares of {len(batch)} rows, {len(batch.rows)} prompt rows")
        return batch.response_ids.like(batch.response_ids.values.float() ** 2 * scale)

    @dispatch(Dispatch.SPLIT)
    def log_probs(self, batch: Rollouts) -> LogProbs:
        return LogProbs(batch.response_ids.like(batch.response_ids.values.float()), None)

    @dispatch(Dispatch.SPLIT)
    def respond(self, batch: Prompts, n: int) -> Rollouts:
        """Return n responses per prompt: response i is the prompt's group number, i + 1 times."""
        rows = [[int(group)] * (i + 1) for group in batch.group for i in range(n)]
        return respond(batch.repeat(n), rows)

    @dispatch(Dispatch.SPLIT)
    def update(self, batch: Rollouts, lr: float) -> Metrics:
        return {"loss": Mean(float(len(batch.response_ids.values)), len(batch)), "lr": Sum(lr)}

    @dispatch(Dispatch.SPLIT)
    def count(self, batch: Rollouts) -> int:
        return len(batch)

    @dispatch(Dispatch.BROADCAST)
    def load(self, path: str) -> int:
        self.calls.append(f"load {path}")
        return self.rank

    @dispatch(Dispatch.RANK_ZERO)
    def size(self) -> int:
        self.calls.append("size")
        return 7

    def helper(self) -> int:
        return self.rank


class LocalTransport:
    """The group transport without Ray: as many workers in this process."""

    def __init__(self, num_workers: int, balanced: bool) -> None:
        self.workers = [Recorder(rank) for rank in range(num_workers)]
        self.balanced = balanced

    def send(
        self, method: str, mode: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if mode is not Dispatch.SPLIT:
            workers = self.workers if mode is Dispatch.BROADCAST else self.workers[:1]
            results = [getattr(worker, method)(*args, **kwargs) for worker in workers]
            return results[0]
        batch, *rest = args
        parts = split(batch, len(self.workers), self.balanced)
        shards = batch.without_local().chunk(parts)
        results = [
            getattr(worker, method)(shard, *rest, **kwargs)
            for worker, shard in zip(self.workers, shards, strict=True)
        ]
        return join(results, parts, batch)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_split_results_return_in_the_order_of_the_batch(num_workers: int, balanced: bool) -> None:
    transport = LocalTransport(num_workers, balanced)
    handle = bind(Recorder, transport)
    batch = rollouts(LENGTHS)
    result = handle.squares(batch, scale=2.0)
    assert result.lengths.tolist() == LENGTHS
    assert result.values.tolist() == [
        2.0 * row**2 for row, n in enumerate(LENGTHS) for _ in range(n)
    ]
    assert handle.log_probs(batch).log_probs.values.tolist() == batch.response_ids.values.tolist()
    assert all("0 prompt rows" in worker.calls[0] for worker in transport.workers)
    sizes = [int(worker.calls[0].split()[2]) for worker in transport.workers]
    assert sum(sizes) == 5
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_several_rows_per_prompt_stay_adjacent_and_get_their_prompt_rows_back(
    num_workers: int,
) -> None:
    handle = bind(Recorder, LocalTransport(num_workers, balanced=True))
    result = handle.respond(prompts(), 3)
    assert result.group.tolist() == [group for group in range(5) for _ in range(3)]
    assert result.response_ids.lengths.tolist() == [1, 2, 3] * 5
    assert [row.ground_truth for row in result.rows] == [str(g) for g in range(5) for _ in range(3)]


def test_broadcast_calls_all_workers_and_rank_zero_only_the_first() -> None:
    transport = LocalTransport(3, balanced=False)
    handle = bind(Recorder, transport)
    assert handle.load("a") == 0
    assert handle.size() == 7
    assert [worker.calls for worker in transport.workers] == [
        ["load a", "size"],
        ["load a"],
        ["load a"],
    ]


def test_a_method_without_dispatch_is_refused_on_a_handle() -> None:
    handle = bind(Recorder, LocalTransport(2, balanced=False))
    with pytest.raises(InternalError, match=r"Recorder\.helper has no @dispatch"):
        handle.helper()
    assert isinstance(handle, Recorder)
    assert Recorder(4).helper() == 4


def test_a_result_that_cannot_be_joined_is_refused() -> None:
    handle = bind(Recorder, LocalTransport(2, balanced=False))
    with pytest.raises(InternalError, match="returned int"):
        handle.count(rollouts(LENGTHS))


def test_split_balances_rollouts_by_cost_and_cuts_prompts_in_order() -> None:
    batch = rollouts([100, 1, 1, 98])
    in_order = split(batch, 2, balanced=False)
    assert [part.tolist() for part in in_order] == [[0, 1], [2, 3]]
    parts = [set(part.tolist()) for part in split(batch, 2, balanced=True)]
    assert sorted(len(part) for part in parts) == [2, 2]
    assert all(len(part & {0, 3}) == 1 for part in parts)
    assert [part.tolist() for part in split(prompts(4), 2, balanced=True)] == [[0, 1], [2, 3]]


def test_split_keeps_groups_together_where_each_worker_has_enough() -> None:
    lengths = torch.randint(1, 99, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = replace(rollouts(lengths), group=torch.arange(64) // 4)
    parts = split(batch, 2, balanced=True)
    assert sorted(torch.cat(parts).tolist()) == list(range(64))
    assert all(
        torch.equal(part.view(-1, 4) // 4 * 4, part.view(-1, 4)[:, :1].expand(-1, 4))
        for part in parts
    )
    first, second = (int(batch.num_tokens[part].sum()) for part in parts)
    assert abs(first - second) < 0.05 * (first + second)


def halves(group: Worker, text: str) -> list[str]:
    width = -(-len(text) // group.world_size)
    return [text[rank * width : (rank + 1) * width] for rank in range(group.world_size)]


class Speller(Worker):
    """A worker with functions of its own, and settings."""

    def __init__(self, rank_info: Any, mark: str, times: int = 1) -> None:
        super().__init__(rank_info)
        self.mark = mark * times

    @dispatch(dispatch_fn=halves, collect_fn=lambda _group, parts: "".join(parts))
    def upper(self, text: str, end: str = "") -> str:
        return text.upper() + end + self.mark

    @dispatch(dispatch_fn=lambda _group, text: [text])
    def one_part(self, text: str) -> str:
        return text

    @dispatch(collect_fn=lambda _group, results: sum(results))
    def total(self, number: int) -> int:
        return number + self.rank_info.rank


class TwoSpellers:
    """The transport without processes: two workers."""

    world_size = 2

    def __init__(self) -> None:
        self.workers = [Speller(rank_info(rank, 2), "!") for rank in range(2)]

    def send(self, method: str, mode: Dispatch, args: Any, kwargs: Any) -> Any: ...

    def send_each(self, method: str, calls: Any) -> list[Any]:
        return [
            getattr(worker, method)(*args, **kwargs)
            for worker, (args, kwargs) in zip(self.workers, calls, strict=True)
        ]


def test_functions_divide_the_first_argument_and_combine_the_results() -> None:
    handle = bind(Speller, TwoSpellers())
    assert handle.world_size == 2
    assert handle.upper("abcd", end=".") == "AB.!CD.!"
    assert handle.total(10) == 21


def test_wrong_functions_are_usage_errors() -> None:
    handle = bind(Speller, TwoSpellers())
    with pytest.raises(UsageError, match="1 parts for 2 workers"):
        handle.one_part("abcd")
    with pytest.raises(UsageError, match="not given by position"):
        handle.upper(text="abcd")
    for options in ({}, {"mode": Dispatch.EACH, "collect_fn": halves}):
        with pytest.raises(UsageError, match="either a mode"):
            dispatch(**options)


def test_groups_of_a_program_share_the_processes_of_a_pool() -> None:
    with ResourcePool(inline=True) as pool:
        first = spawn(Speller, pool, "a", times=2)
        second = spawn(Speller, pool, "b")
        assert (first.upper("x"), second.upper("x")) == ("Xaa", "Xb")
        assert first.total(1) == 1
        with pytest.raises(InternalError, match=r"Speller\.close has no @dispatch"):
            first.close()
    with pytest.raises(UsageError, match="Ray session"):
        ResourcePool(2)
    with pytest.raises(UsageError, match="one process, not 2"):
        ResourcePool(2, inline=True)


def test_the_documented_worker_runs() -> None:
    page = (ROOT / "docs" / "workers.md").read_text()
    block = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block[1].replace("session(num_cpus=2), ResourcePool(2)", "ResourcePool(inline=True)"), {})


@pytest.mark.parametrize("worker", [ActorWorker, CriticWorker, ReferenceWorker])
def test_the_protocol_methods_of_every_worker_carry_dispatch(worker: type[Worker]) -> None:
    """Each call that the controller makes is routed; `close` is the process's own."""
    sent: list[str] = []

    class Sent:
        def send(self, method: str, mode: Dispatch, args: Any, kwargs: Any) -> None:
            sent.append(method)

    handle = bind(worker, Sent())
    roles = [each for each in worker.__mro__ if each.__module__ == "rlctl.runtime.base.roles"]
    names = {name for role in roles for name in vars(role) if not name.startswith("_")}
    for name in names:
        getattr(handle, name)()
    assert set(sent) == names
    assert "pop_oom_retries" in names


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let no time pass but that of sleeps; return their seconds."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    monkeypatch.setattr(time, "perf_counter", lambda: sum(seconds))
    return seconds


def test_phases_exclude_nested_phases_and_add_up(slept: list[float]) -> None:
    phases: list[str] = []
    clock = Clock(phases.append)
    with clock.phase("outer"):
        time.sleep(0.02)
        with clock.phase("inner"):
            time.sleep(0.05)
        with clock.phase("inner"):
            time.sleep(0.01)
    seconds = clock.take()
    assert phases == ["outer", "inner", "inner"]
    assert seconds == pytest.approx({"inner": 0.06, "outer": 0.02})
    assert sum(seconds.values()) == pytest.approx(sum(slept))
    assert clock.take() == {}


class SlowWorker(Worker):
    """Takes 30 ms for a weight sync and 10 ms for log-probs."""

    @dispatch(Dispatch.BROADCAST, phase="update_weights")
    def sync(self) -> None:
        time.sleep(0.03)

    @dispatch(Dispatch.BROADCAST, phase=lambda weights: "ref" if weights == "base" else "old")
    def score(self, weights: str) -> None:
        time.sleep(0.01)


@timed("gen")
def generate(worker: SlowWorker) -> None:
    time.sleep(0.02)
    worker.score("base")


@pytest.mark.usefixtures("slept")
def test_calls_of_workers_are_phases_of_the_running_clock() -> None:
    phases: list[str] = []
    clock, worker = Clock(phases.append), SlowWorker(cast(Any, None))
    worker.sync()  # no clock runs
    with clock.running():
        worker.sync()
        generate(worker)
        worker.score("current")
        thread = threading.Thread(target=worker.sync)  # beside the step: none of its time
        thread.start()
        thread.join()
    worker.sync()
    assert phases == ["update_weights", "gen", "ref", "old"]
    assert clock.take() == pytest.approx(
        {"update_weights": 0.03, "gen": 0.02, "ref": 0.01, "old": 0.01}
    )
