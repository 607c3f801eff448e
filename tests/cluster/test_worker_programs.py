"""The programs of docs/examples/workers on one Ray session, with the shipped model."""

import json
import re
import runpy
import socket
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import ray

from rlctl.runtime.workers.trace import TraceSpec
from rlctl.workers import Dispatch, ResourcePool, Worker, dispatch, session, spawn
from tests.architecture.source import ROOT
from tests.warm_workers import warm_workers

EXAMPLES = ROOT / "docs" / "examples" / "workers"


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with warm_workers(), session(num_cpus=3):
        yield


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_a_program_is_short(path: Path):
    assert len(path.read_text().splitlines()) <= 120


@pytest.mark.soak
def test_online_dpo_runs_as_a_ray_task():
    main_task = runpy.run_path(str(EXAMPLES / "online_dpo.py"))["main_task"]
    first, second = ray.get(main_task.remote(num_steps=2, batch_size=8))
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3), "policy and reference are equal"
    assert 0 < first["score"] < 1
    assert second["loss"] != first["loss"]


@pytest.mark.slow
def test_ppo_runs_with_critic_and_reward_model(tmp_path: Path):
    main_task = runpy.run_path(str(EXAMPLES / "ppo.py"))["main_task"]
    settings = [f"trainer.run_dir={tmp_path}", "data.train_batch_size=4", "data.val_files=null"]
    settings += ["data.train_max_samples=8", "data.max_response_length=16"]
    settings += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "critic.ppo_mini_batch_size=4"]
    first, second = main_task(2, settings=settings)
    assert first["actor/grad_norm"] > 0
    assert first["critic/vf_loss"] != second["critic/vf_loss"]
    assert first["score"] != 0


class Doubling(Worker):
    """A worker that somebody debugs."""

    @dispatch(Dispatch.BROADCAST)
    def double(self, number: int) -> int:
        breakpoint()
        return 2 * number


@pytest.mark.soak
def test_a_worker_in_the_debugger_may_exceed_the_time_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    pytest.importorskip("debugpy")
    frames: list[str] = []

    def debug() -> None:
        client = DebugClient(tmp_path / "pool-0.log")
        frames.extend(client.frames())
        while "time limits are off" not in caplog.text:
            time.sleep(0.1)
        client.resume()

    with ResourcePool(1, logs=tmp_path) as pool:
        worker = spawn(Doubling, pool)
        pool.start_trace(TraceSpec(stacks=False, memory=False, shapes=False))
        limits = pool.pool.spec
        pool.pool.spec = replace(limits, call_timeout_s=5.0)
        debugger = Thread(target=debug)
        debugger.start()
        assert worker.double(21) == 42
        debugger.join()
        pool.pool.spec = limits
        (file,) = pool.write_trace(tmp_path / "traces" / "pool")
    assert frames[0] == "double"
    assert file.name == "pool-0.json"
    names = [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]
    assert "Doubling.double" in names


LISTENING = re.compile(r"Ray debugger is listening on ([\d.]+):(\d+)")


class DebugClient:
    """Debugger attached to the process that waits in a breakpoint and logs to `log`."""

    def __init__(self, log: Path) -> None:
        while not (found := LISTENING.search(log.read_text())):
            time.sleep(0.1)
        self.connection = socket.create_connection((found[1], int(found[2])))
        self.stream = self.connection.makefile("rb")
        self.number = 0
        self.send("initialize", adapterID="python", pathFormat="path")
        self.read("initialize")
        self.send("attach", justMyCode=False)
        self.read("initialized")
        self.send("configurationDone")
        self.thread = self.read("stopped")["body"]["threadId"]

    def frames(self) -> list[str]:
        """Return the functions of the stopped thread, the innermost first."""
        self.send("stackTrace", threadId=self.thread)
        return [frame["name"] for frame in self.read("stackTrace")["body"]["stackFrames"]]

    def resume(self) -> None:
        """Let the process continue, and detach."""
        self.send("continue", threadId=self.thread)
        self.read("continue")
        self.send("disconnect")
        self.connection.close()

    def send(self, command: str, **arguments: Any) -> None:
        """Send a request."""
        self.number += 1
        request = {"seq": self.number, "type": "request", "command": command}
        body = json.dumps(request | {"arguments": arguments}).encode()
        self.connection.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    def read(self, name: str) -> dict[str, Any]:
        """Return the next response to the command, or event, of this name."""
        while True:
            length = 0
            while header := self.stream.readline().strip():
                length = int(header.partition(b":")[2])
            message = json.loads(self.stream.read(length))
            if name in (message.get("event"), message.get("command")):
                return message
