"""Test of SwanLab's local mode through the HTTP interface of `swanlab watch`.

The dashboard needs its own environment.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

ROOT = Path(__file__).parents[2]
METRIC = "val-core/openai/gsm8k/acc/mean@1"
# It needs an older rich than rlctl, so it cannot share rlctl's environment.
DASHBOARD = ["swanlab[dashboard]==0.10.3"]

RUN = f"""
import sys
from pathlib import Path
from rlctl.tracking.fanout import Trackers
from rlctl.tracking.jsonl import JsonlTracker
from rlctl.tracking.async_tracker import TrackerTimeouts
from rlctl.tracking.swanlab import SwanLabTracker
from rlctl.tracking.tracker import RunInfo, Sample

print(SwanLabTracker.preflight(None))
ids = {{}}
for first, last, resume_step in ((0, 3, 0), (3, 5, 2)):
    folder = Path(sys.argv[1]) / "house" / "first"
    folder.mkdir(parents=True, exist_ok=True)
    if resume_step:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[:resume_step + 1]))
    both = {{"jsonl": JsonlTracker(), "swanlab": SwanLabTracker()}}
    trackers = Trackers(both, lambda *_, **__: None, TrackerTimeouts(100, 60, 60, 60))
    config = {{"lr": 0.5}}
    info = RunInfo("abc", "house", "first", folder, 5, config, ids, resume_step, num_samples=1)
    ids = trackers.start(info)
    for step in range(first, last + 1):
        trackers.log(step, {{{METRIC!r}: step / 8, "odd": float("nan")}})
        sample = Sample("1+1?", f"response of step {{step}}", "2", 1.0, {{}}, 4, "stop", "x")
        trackers.generations(step, [sample])
    trackers.finish("finished")
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install SwanLab's dashboard in a new environment and return its interpreter."""
    place = tmp_path_factory.mktemp("dashboard") / "venv"
    links = (
        ["--find-links", os.environ["PIP_FIND_LINKS"]] if os.environ.get("PIP_FIND_LINKS") else []
    )
    install = [
        "pip",
        "install",
        "--quiet",
        "--prerelease",
        "allow",
        "--python",
        str(place / "bin" / "python"),
        *links,
        *DASHBOARD,
    ]
    for arguments in (["venv", "--quiet", "--python", sys.executable, str(place)], install):
        done = subprocess.run(
            [sys.executable, "-m", "uv", *arguments],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    return place / "bin" / "python"


@pytest.fixture
def watch(python: Path, tmp_path: Path) -> Iterator[str]:
    """Yield the address of a dashboard that shows a resumed run."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(python), "-c", RUN, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("local: no key")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(python.parent / "swanlab"),
        "watch",
        str(tmp_path / "house" / "swanlog"),
        "-h",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    server = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        server.terminate()
        server.communicate(timeout=20)


def get(address: str) -> Any:
    """Return the dashboard's response; retry while it starts."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_swanlab_watch_shows_a_resumed_run_as_one_curve(watch):
    project = get(f"{watch}/project")
    assert (
        len(project["experiments"]) == 2
    )  # local mode cannot continue an experiment: the second one has the complete history
    newest = max(experiment["id"] for experiment in project["experiments"])
    curve = get(f"{watch}/experiment/{newest}/tag/{quote(METRIC, safe='')}")["list"]
    assert [(int(point["index"]), point["data"]) for point in curve] == [
        (step, step / 8) for step in range(6)
    ]
    answers = get(f"{watch}/experiment/{newest}/tag/{quote('val/generations', safe='')}")["list"]
    assert [int(point["index"]) for point in answers] == list(range(6))
    assert get(f"{watch}/experiment/{newest}/summary")  # NaN would make it fail
