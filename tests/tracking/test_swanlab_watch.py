"""Tests of SwanLab's local mode through `swanlab watch`: its HTTP interface and its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.ports import free_port
from tests.processes import run_python
from tests.progress import wait_until
from tests.runs.browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[2]
METRIC = "val-core/openai/gsm8k/acc/mean@1"

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


class Watch:
    """Running `swanlab watch` and its address."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`; raise if the server ended or makes no progress."""

        def checked() -> bool:
            assert self.process.poll() is None, self.process.communicate()[0]
            return done()

        wait_until(checked, self.process.pid, "swanlab watch")

    def responds(self) -> bool:
        try:
            self.get("project")
        except urllib.error.HTTPError:
            raise
        except OSError:
            return False
        return True

    def get(self, path: str) -> Any:
        """Return the data of a response of the HTTP interface."""
        with urllib.request.urlopen(f"{self.address}/api/v1/{path}", timeout=60) as response:
            return json.load(response)["data"]


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    """Yield a dashboard that shows a resumed run."""
    home = tmp_path_factory.mktemp("watched")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "SWANLAB_MODE": "local",
    }
    done = run_python("-c", RUN, home, cwd=home, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("local: as requested")
    port = free_port()
    program = Path(sys.executable).parent / "swanlab"
    folder = home / "house" / "swanlog"
    server = subprocess.Popen(
        [str(program), "watch", str(folder), "-h", "127.0.0.1", "-p", str(port)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=home,
    )
    watch = Watch(server, f"http://127.0.0.1:{port}")
    try:
        watch.wait_until(watch.responds)
        yield watch
    finally:
        server.kill()
        server.communicate()


def newest(watch: Watch) -> int:
    return max(experiment["id"] for experiment in watch.get("project")["experiments"])


@pytest.mark.slow
def test_swanlab_watch_shows_a_resumed_run_as_one_curve(watch: Watch) -> None:
    # Local mode cannot continue an experiment: the second one has the complete history.
    assert len(watch.get("project")["experiments"]) == 2
    run = f"experiment/{newest(watch)}"
    curve = watch.get(f"{run}/tag/{quote(METRIC, safe='')}")["list"]
    assert [(int(point["index"]), point["data"]) for point in curve] == [
        (step, step / 8) for step in range(6)
    ]
    responses = watch.get(f"{run}/tag/{quote('val/generations', safe='')}")["list"]
    assert [int(point["index"]) for point in responses] == list(range(6))
    assert watch.get(f"{run}/summary")  # NaN would make it fail


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to read the dashboard's page")
def test_the_page_of_swanlab_watch_shows_the_run(watch: Watch, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    shown = ""

    def shows_the_run() -> bool:
        nonlocal shown
        shown = browser.ask("document.body.innerText")
        return METRIC.partition("/")[2] in shown and "response of step 5" in shown

    with Browser(CHROMIUM, tmp_path / "profile", "--window-size=1300,2000") as browser:
        browser.open(f"{watch.address}/experiment/{newest(watch)}/chart")
        try:
            watch.wait_until(shows_the_run)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the page shows only: {shown}")
        assert browser.ask("document.querySelectorAll('canvas').length") >= 1
