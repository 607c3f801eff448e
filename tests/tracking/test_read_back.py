"""A replay sends what a server lacks, and an attempt is delivered once the server has all of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.tracking import read_back
from rlctl.tracking.delivery import Call
from rlctl.tracking.threaded import ThreadedDelivery
from rlctl.tracking.tracker import SAMPLES, RunInfo, Sample
from tests.recorded import record
from tests.tracking.test_fanout import LONG, info

ROWS = {1: {"a": 1.0}, 2: {"a": 2.0, "b": 3.0}, 3: {"a": 3.0}}


@dataclass
class Server:
    """Tracker whose server has `known`; what it is sent arrives unless `loses`."""

    known: dict[str, set[int]] | None
    confirms: bool = True
    loses: bool = False
    calls: list[Any] = field(default_factory=list)

    def start(self, run: RunInfo) -> str:
        return run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append((step, dict(metrics)))
        if self.known is not None and not self.loses:
            for name in metrics:
                self.known.setdefault(name, set()).add(step)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        self.calls.append((step, SAMPLES))

    def finish(self, state: str) -> None: ...

    def received(self, names: Collection[str]) -> Mapping[str, Collection[int]] | None:
        if self.known is not None and "broken" in self.known:
            raise ConnectionError("no route")
        return self.known


def delivered(folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> ThreadedDelivery:
    monkeypatch.setattr(read_back, "_PAUSES_S", (0.0, 0.0))
    record(folder, ROWS)
    run = replace(info(folder), trackers={"s": "id"})
    delivery = ThreadedDelivery("s", server, LONG, run, steps=list(ROWS))
    delivery.wait_for_start()
    delivery.send(Call("finish", ("finished",)))
    delivery.wait_for_end(float("inf"))
    return delivery


def test_a_replay_sends_the_missing_metrics_of_each_step(tmp_path, monkeypatch):
    server = Server({"a": {1, 2}})
    delivery = delivered(tmp_path, server, monkeypatch)
    assert server.calls == [(2, {"b": 3.0}), (3, {"a": 3.0})]
    assert (delivery.sent, delivery.num_received, delivery.is_complete) == ({2, 3}, 3, True)


def test_what_a_server_lacks_after_the_end_is_missed(tmp_path, monkeypatch):
    delivery = delivered(tmp_path, Server({"a": {1, 3}}, loses=True), monkeypatch)
    assert (delivery.missed_steps, delivery.num_received) == ([2], 2)
    assert delivery.shortfall()["exact"]
    assert not delivery.is_complete


def test_a_server_that_does_not_answer_confirms_nothing(tmp_path, monkeypatch):
    server = Server({"broken": set()})
    delivery = delivered(tmp_path, server, monkeypatch)
    assert [step for step, _ in server.calls] == [1, 2, 3]
    assert (delivery.is_complete, delivery.shortfall()["exact"]) == (False, False)
    assert "no route" in delivery.shortfall()["why"]


def test_a_tracker_without_a_server_needs_no_confirmation(tmp_path, monkeypatch):
    delivery = delivered(tmp_path, Server(None), monkeypatch)
    assert (delivery.is_complete, delivery.num_received) == (True, None)
