"""The server that OpenEnv's own command makes, as the environment of a training run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.abroad.training import AGENT, NUM_EPISODES, train
from tests.ports import free_port
from tests.progress import wait_until


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Start the echo server of `openenv init`, for several sessions at a time."""
    command = [Path(sys.executable).parent / "openenv", "init", "echo_env", "-o", tmp_path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    app = next(tmp_path.rglob("server/app.py"))
    app.write_text(app.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=64"))
    port = free_port()
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "server.app:app", "--port", str(port)],
            cwd=app.parents[1],
            env={**os.environ, "PYTHONPATH": str(app.parents[1])},
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return urllib.request.urlopen(f"{address}/health", timeout=5).status == 200
        except OSError:
            return server.poll() is not None

    try:
        wait_until(answers, server.pid, "OpenEnv's server")
        assert server.poll() is None, (tmp_path / "server.log").read_text()
        yield address
    finally:
        server.terminate()
        server.wait()


def test_training_with_the_server(url: str, tmp_path: Path) -> None:
    found = train(
        tmp_path,
        *(f"{AGENT}.environment=openenv", f"{AGENT}.params={{url: '{url}'}}"),
        f"~{AGENT}.params.tools",
        "data.max_response_length=300",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
    )
    assert len(found.episodes) == NUM_EPISODES
    for episode in found.episodes:
        turns = [each for each in episode["messages"] if each["role"] == "assistant"]
        replies = [each for each in episode["messages"] if each["role"] == "user"]
        echoed = [json.loads(reply["text"])["echoed_message"] for reply in replies]
        assert echoed == [turn["text"] for turn in turns]
        for turn in turns:  # the newer template has an upper bound of 1
            length = len(turn["text"]) / 10
            assert turn["reward"] in (pytest.approx(length), pytest.approx(min(length, 1)))
