"""Attempts with real SDKs whose server fails at the start; see `test_refusing_servers`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rlctl.errors import RlctlError
from rlctl.log import log_to_stderr
from rlctl.runs.run_dir import RunDir
from rlctl.runs.tracked import run_info
from rlctl.tracking.delivery import TrackerTimeouts
from rlctl.tracking.fanout import Trackers
from tests.tracking.failing import control, create, forked
from tests.tracking.failing_cases import Case, row, samples

TIMEOUTS = TrackerTimeouts(1000, 120.0, 5.0, 10.0)
AT_ONCE = 6


def attempt(run: RunDir, logger: str, mode: str, first: int, report: Path) -> None:
    """Start the logger, log two steps, finish; note the mode, or the error."""
    log_to_stderr()
    import yaml

    config = yaml.safe_load((run.path / "config.yaml").read_text())
    config["trainer"]["tracking"]["modes"] = {logger: mode} if mode else {}
    trackers = Trackers.load([logger], run.event, TIMEOUTS)
    info = run_info(run.record, run.path, config, 4, first - 1)
    began = time.monotonic()
    result, code = "", 0
    try:
        run.update(trackers={**run.record.trackers, **trackers.start(info)})
        off = trackers.threaded[logger].disabled_reason
        result = "off" if off else getattr(trackers.trackers[logger], "mode", "")
    except RlctlError as error:
        result, code = f"error: {error}", 1
    seconds = time.monotonic() - began
    for step in (first, first + 1) if not code else ():
        trackers.generations(step, samples(step))
        trackers.log(step, row(step))
    with report.open("a", encoding="utf-8") as file:
        file.write(json.dumps([result, seconds]) + "\n")
    trackers.finish("failed" if code else "finished", code)


def play(run: RunDir, case: list[Any]) -> None:
    """Make one attempt, or a good one and then another, while the server fails."""
    logger, fault, after, when, mode, address = case
    name = {"wandb": "WANDB_BASE_URL", "swanlab": "SWANLAB_API_HOST"}[logger]
    os.environ |= {name: address, "SWANLAB_WEB_HOST": address}
    console, report = run.path / "console.txt", run.path / "report.jsonl"
    if when == "resume":
        os.waitpid(forked(console, lambda: attempt(run, logger, mode, 1, report)), 0)
        run = RunDir(run.path)
        run.new_attempt()
    control(address, kind=fault, after=after)
    again, first = RunDir(run.path), 3 if when == "resume" else 1
    os.waitpid(forked(console, lambda: attempt(again, logger, mode, first, report)), 0)
    control(address, kind="")


def main() -> None:
    """Play the cases given as JSON `[root, cases]`, and write `results.json`."""
    root, cases = json.loads(sys.argv[1])
    running: set[int] = set()
    for number, case in enumerate(cases):
        while len(running) >= AT_ONCE:
            running.discard(os.wait()[0])
        log = Path(root) / f"{number}.log"
        run = create(Path(root) / "runs", Case(number, case[0], case[1], case[2], 0, ""), 5.0)
        running.add(forked(log, lambda: play(run, case)))  # noqa: B023
    while running:
        running.discard(os.wait()[0])
    results: list[Any] = []
    for number in range(len(cases)):
        folder = Path(root) / "runs" / "house" / f"seed-{number}"
        reports = [json.loads(line) for line in (folder / "report.jsonl").read_text().splitlines()]
        console = (folder / "console.txt").read_text()
        results.append([[result for result, _ in reports], reports[-1][1], console])
    (Path(root) / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
