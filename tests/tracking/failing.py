"""Attempts with real SDKs against a server that fails at a random moment, then one `runs sync`.

This process imports the SDKs once; a forked process makes each attempt and each sync.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from wandb.sdk.data_types._private import MEDIA_TMP  # each process removes it at its end

import rlctl.tracking.wandb  # noqa: F401
from rlctl.runs.run_dir import RunDir
from rlctl.runs.store import RunStore
from rlctl.runs.tracked import run_info
from rlctl.tracking.delivery import TrackerTimeouts
from rlctl.tracking.fanout import Trackers
from tests.tracking.failing_cases import NUM_STEPS, Case, row, samples


def create(root: Path, case: Case, finish_s: float) -> RunDir:
    """Create the folder of a run whose logger is the one of the case."""
    run = RunDir.create(root, "house", f"seed-{case.seed}", "ppo")
    tracking: dict[str, Any] = {"modes": {case.logger: "online"}, "tags": [], "description": None}
    tracking |= {"queue_size": 1000, "start_s": 60.0, "call_s": finish_s, "finish_s": finish_s}
    trainer = {"seed": 1, "log_val_generations": 2, "logger": [case.logger], "tracking": tracking}
    run.write_config(yaml.safe_dump({"trainer": trainer}), {})
    run.update(total_steps=NUM_STEPS)
    return run


def attempt(run: RunDir, case: Case, address: str, first: int = 1) -> None:
    """Log the steps of an attempt, while the server fails."""
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    tracking = config["trainer"]["tracking"]
    names = ("queue_size", "start_s", "call_s", "finish_s")
    timeouts = TrackerTimeouts(*(tracking[name] for name in names))
    trackers = Trackers.load([case.logger], run.event, timeouts)
    info = run_info(run.record, run.path, config, NUM_STEPS, first - 1)
    run.update(trackers={**run.record.trackers, **trackers.start(info)})
    trackers.begin()
    last = NUM_STEPS
    if first == 1:
        control(address, kind=case.fault, after=case.after, length=case.length)
        last = NUM_STEPS if case.end == "finished" else NUM_STEPS // 2
    for step in range(first, last + 1):
        if step % 2 == 0:
            trackers.generations(step, samples(step))
        trackers.log(step, row(step))
        time.sleep(0.05)
    if first == 1 and case.end != "finished":
        os.kill(os.getpid(), signal.SIGKILL)
    trackers.finish("finished", 0)


def control(address: str, **fault: Any) -> None:
    """Set the fault of a server, or repair it."""
    query = "&".join(f"{name}={value}" for name, value in fault.items())
    urllib.request.urlopen(f"{address}/fault?{query}", timeout=30).close()


def forked(log: Path, work: Callable[[], None]) -> int:
    """Call `work` in a process of its own, whose output goes to `log`; return its pid."""
    if pid := os.fork():
        return pid
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    MEDIA_TMP.name = tempfile.mkdtemp(dir=log.parent)
    code = 0
    try:
        work()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.exit(code)


def play(run: RunDir, case: Case, address: str, finish_s: float) -> None:
    """Make the attempts of a case and one sync, each in its process; write `result.json`."""
    host = {"wandb": "WANDB_BASE_URL", "swanlab": "SWANLAB_API_HOST"}[case.logger]
    os.environ |= {host: address, "SWANLAB_WEB_HOST": address}
    root = run.path.parent.parent
    log = run.path / "log.txt"

    def sync_once() -> None:
        from rlctl.plugins.console.sync import sync

        sent = sync(RunStore(root).find(run.path.name), case.logger)
        (run.path / "result.json").write_text(json.dumps(str(sent)))

    os.waitpid(forked(log, lambda: attempt(run, case, address)), 0)
    run = RunDir(run.path)
    if case.end == "resumed":
        run.event("resume", step=NUM_STEPS // 2)
        again = RunDir(run.path)
        os.waitpid(forked(log, lambda: attempt(again, case, address, NUM_STEPS // 2 + 1)), 0)
    control(address, kind="")
    patient = (run.path / "config.yaml").read_text().replace(f"_s: {finish_s}", "_s: 300.0")
    RunDir(run.path).write_config(patient, {})
    RunDir(run.path).finish("finished" if case.end != "killed" else "stopped", 0)
    os.waitpid(forked(log, sync_once), 0)


def main() -> None:
    """Play cases, given as JSON `[root, [[seed, address], …], finish_s, at once]`."""
    root, given, finish_s, at_once = json.loads(sys.argv[1])
    running: set[int] = set()
    for seed, address in given:
        while len(running) >= at_once:
            running.discard(os.wait()[0])
        case = Case.draw(seed)
        log = Path(root) / f"{seed}.log"
        run = create(Path(root) / "runs", case, finish_s)
        running.add(forked(log, lambda: play(run, case, address, finish_s)))  # noqa: B023
    while running:
        running.discard(os.wait()[0])


if __name__ == "__main__":
    main()
