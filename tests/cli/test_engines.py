"""`rlctl engines` with a run that a thread of this process plays, and requests that Ray refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.__main__ import main
from rlctl.errors import ResourceError
from rlctl.runs.engine_requests import (
    REQUESTS,
    EngineRequest,
    EngineStatus,
    PoolStatus,
    Progress,
    RequestStatus,
    received,
    send,
)
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.cluster import membership, pool
from rlctl.runtime.cluster.membership import Membership

ENGINES = [
    EngineStatus(0, "10.0.0.1 abcd", "serving", {"CPU": 1.0, "GPU": 1.0}, 12, 34.5),
    EngineStatus(2, "10.0.0.2 ef01", "starting", {"CPU": 1.0, "GPU": 1.0}, 0, None),
]


@dataclass
class Stage:
    """A running run with two engines, and the requests that it received."""

    run: RunDir
    requests: list[EngineRequest] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def rlctl(self, *words: str) -> int:
        return main(["engines", words[0], "r", *words[1:], "--root", str(self.run.path.parents[1])])

    def reply(self, progress: Progress, message: str) -> Callable[[], None]:
        """Give every request this progress; return the function that ends it."""

        def work() -> None:
            while not self._ended.wait(0.01):
                for each in received(self.run.attempt):
                    self.requests.append(each)
                    done = RequestStatus(each.id, progress, message)
                    PoolStatus(ENGINES, [done]).write(self.run.attempt)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()

        def end() -> None:
            self._ended.set()
            thread.join()

        return end


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    run = RunDir.create(tmp_path, "p", "r", "ppo")
    PoolStatus(ENGINES, []).write(run.attempt)
    return Stage(run)


def test_list(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.rlctl("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["engine", "node", "state", "devices", "responses", "tokens/s"]
    assert lines[1].split("  ")[0] == "0"
    assert "10.0.0.1 abcd  serving   1 CPU, 1 GPU         12      34.5" in lines[1]
    assert stage.rlctl("list", "--json") == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == vars(ENGINES[0])
    assert (second["state"], second["tokens_per_s"]) == ("starting", None)


def test_add_and_drain_wait_for_the_run(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    end = stage.reply("done", "added engine 3")
    assert stage.rlctl("add") == 0
    assert "r: added engine 3" in capsys.readouterr().err
    assert stage.rlctl("drain", "2") == 0
    assert stage.rlctl("drain", "--count", "1") == 0
    end()
    asked = [(each.action, each.count, list(each.engines)) for each in stage.requests]
    assert asked == [("add", 1, []), ("drain", 0, [2]), ("drain", 1, [])]


def test_a_failed_request_is_an_error(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    end = stage.reply("failed", "0 of 2 engines started")
    assert stage.rlctl("add", "--count", "2") == 1
    end()
    assert "0 of 2 engines started" in capsys.readouterr().err


def test_a_request_goes_ahead_after_the_timeout(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stage.rlctl("add", "--timeout", "0") == 0
    assert "`rlctl engines list r` shows its progress" in capsys.readouterr().err
    assert [each.action for each in received(stage.run.attempt)] == ["add"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["drain", "7"], 4, "there is no engine 7"),
        (["drain", "0", "2"], 2, "the last engine cannot be drained"),
        (["drain", "--count", "2"], 2, "the last engine cannot be drained"),
        (["drain"], 2, "give either their numbers or --count"),
        (["drain", "0", "--count", "1"], 2, "give either their numbers or --count"),
        (["add", "--count", "0"], 2, "--count"),
    ],
)
def test_wrong_requests_never_reach_the_run(
    stage: Stage, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    assert stage.rlctl(*words) == code
    assert message in capsys.readouterr().err
    assert list(received(stage.run.attempt)) == []


def test_a_file_without_a_request_does_not_take_others_along(tmp_path: Path) -> None:
    send(tmp_path, EngineRequest("add", 2))
    for name in ["0.json", "z.json"]:
        (tmp_path / REQUESTS / name).write_text("")
    with pytest.raises(ValueError, match="Expecting value"):
        list(received(tmp_path))
    assert next(received(tmp_path)).count == 2


def test_runs_without_engines_to_change(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    (stage.run.attempt / "engines.json").unlink()
    assert stage.rlctl("add") == 5
    assert "trainer.placement.rollout=engines" in capsys.readouterr().err
    stage.run.finish("finished", 0)
    assert stage.rlctl("list") == 5
    assert "r is finished: it has no engines" in capsys.readouterr().err


def test_a_request_that_ray_refuses_has_failed_and_reserves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse the second of two placement groups."""
    made, removed, events = [], [], []

    def request_devices() -> str:
        if made:
            raise ValueError("no such resource")
        made.append("first")
        return "first"

    monkeypatch.setattr(membership, "remove_placement_group", removed.append)
    monkeypatch.setattr(Membership, "_serve", lambda _: None)  # the test calls `advance`
    processes: Any = SimpleNamespace(
        joined=[],
        engines=[],
        spec=SimpleNamespace(start_timeout_s=60.0),
        request_devices=request_devices,
    )
    spec: Any = SimpleNamespace()
    members = Membership(processes, spec, tmp_path, lambda kind, **_: events.append(kind))
    send(tmp_path, EngineRequest("add", 2))
    members.advance()
    status = PoolStatus.read(tmp_path)
    assert status is not None
    (told,) = status.requests
    assert (told.progress, removed) == ("failed", ["first"])
    assert told.message == "Ray did not accept the request: no such resource"
    assert events == ["engine_request", "engine_request_failed"]


def test_a_fault_that_lasts_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries, is_enough = [], threading.Event()

    def advance(_: Membership) -> None:
        tries.append(OSError("no space left on device"))
        if len(tries) == 3:
            is_enough.set()
        raise tries[-1]

    monkeypatch.setattr(membership, "_POLL_S", 0.001)
    monkeypatch.setattr(Membership, "advance", advance)
    unused: Any = None
    members = Membership(unused, unused, tmp_path, unused)
    assert is_enough.wait(600)
    members.close()
    (record,) = caplog.records
    assert record.getMessage() == "rlctl engines does not work: no space left on device"


def test_a_pool_without_devices_names_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    spec: Any = SimpleNamespace(name="engines", num_processes=2, share={}, start_timeout_s=0.0)
    group: Any = SimpleNamespace(wait=lambda _: False)
    for name in ("free_of", "remove_placement_group"):
        monkeypatch.setattr(pool, name, lambda _: {})
    with pytest.raises(ResourceError, match="pool 'engines' needs 2") as raised:
        pool.wait_for_groups([group], spec)
    assert "trainer.placement.pools.engines" in str(raised.value)
