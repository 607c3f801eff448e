"""The console tracker, through a pipe and on a pseudo-terminal."""

import os
import re
import sys
from collections.abc import Iterator

import pexpect
import pyte
import pytest

from rlctl.tracking.console_tracker import ConsoleTracker
from tests.processes import run_python

ACC = "val-core/arithmetic/acc/mean@1"

SCRIPT = """
import sys, time
from pathlib import Path
from rlctl.tracking.alarms import Alarm
from rlctl.tracking.console_tracker import ConsoleTracker
from rlctl.tracking.tracker import RunInfo
tracker = ConsoleTracker()
tracker.phase("starting Ray")
tracker.phase("building actor")
tracker.start(RunInfo("id", "project", "name", Path("."), 3, {}))
tracker.phase("testing")
tracker.log(0, {"ACC": 0.25})
for step in (1, 2, 3):
    tracker.phase("gen")
    tracker.episodes({"generating": 12, "processing_tools": 4})
    print("worker line", file=sys.stderr)
    print("data")
    tracker.log(step, {
        "critic/score/mean": 0.3 * step, "actor/kl_loss": 0.0021, "perf/throughput": 12345.6,
        "timing_s/step": 2.0, "timing_s/gen": 1.5, "timing_s/update_actor": 0.5,
        "response_length/mean": 100, "response_length/clip_ratio": 0.1,
    } | ({"ACC": 0.75} if step == 3 else {}))
    if step == 2:
        tracker.alarm(Alarm("truncation", 2, 0.1, 0.1, "truncation", "longer", over=False))
    time.sleep(0.3)
tracker.finish("finished")
""".replace("ACC", ACC)


def environment(**changes: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "LINES")
    }
    return kept | {"TERM": "xterm-256color"} | changes


@pytest.mark.parametrize("extra", [{}, {"FORCE_COLOR": "1"}])
def test_pipe_gets_one_plain_line_per_step(extra):
    done = run_python("-c", SCRIPT, env=environment(**extra))
    assert done.stdout == "data\n" * 3
    lines = [line for line in done.stderr.splitlines() if line != "worker line"]
    assert [line.partition(" s] ")[2] for line in lines[:2]] == ["starting Ray", "building actor"]
    figures = "kl 0.0021  length 100  tok/s 12.3k  2.0 s/step"
    assert lines[2] == "step 0/3  val acc 25.0 % (first 25.0 %)"
    assert lines[3].startswith(f"step 1/3  reward 0.300  {figures}  eta ")
    assert lines[4].startswith(f"step 2/3  reward 0.600  {figures}  eta ")
    assert (
        re.sub(r"\x1b\[[\d;]*m", "", lines[5]) == "alarm: step 2: truncation (longer)"
    )  # FORCE_COLOR makes it red
    assert lines[6] == f"step 3/3  reward 0.900  val acc 75.0 % (first 25.0 %)  {figures}"
    assert len(lines) == 7


def on_a_terminal(dimensions: tuple[int, int] = (30, 100), **changes: str) -> str:
    child = pexpect.spawn(
        sys.executable,
        ["-c", SCRIPT],
        env=environment(**changes),
        encoding="utf-8",
        dimensions=dimensions,
        timeout=300,
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    return child.before or ""


def screens(seen: str, rows: int, columns: int) -> Iterator[list[str]]:
    """Yield the lines of a terminal of this size after each redraw."""
    screen = pyte.Screen(columns, rows)
    stream = pyte.Stream(screen)
    for part in seen.split("\x1b[2K"):
        stream.feed(part)
        yield [line.rstrip() for line in screen.display if line.strip()]
        stream.feed("\x1b[2K")


@pytest.mark.parametrize("columns", [60, 100])
def test_panel_shows_series_and_restores_the_cursor(columns):
    seen = on_a_terminal((30, columns))
    assert seen.count("\x1b[?25l") == 1  # the cursor is hidden once
    assert seen.rindex("\x1b[?25h") > seen.rindex("step ")  # and shown again after the last drawing
    assert seen.count("worker line\r\n") == 3
    assert seen.count("✓") == 2  # once each for what starting up took
    assert "\x1b[32m" in seen  # green
    shown = [
        screen
        for screen in screens(seen, 30, columns)
        if any("step 3/3" in line for line in screen)
    ]
    panel = {line.split()[0]: line for line in shown[0][-8:]}
    assert "━" in next(line for line in shown[0] if "step 3/3" in line)
    assert panel["reward"].split() == ["reward", "0.900", "▁▅█"]
    assert panel["val"].split("  ")[-1].strip() == "first 25.0 %, best 75.0 % at step 3"
    assert panel["length"].split() == ["length", "100", "▁▁▁", "10.0%", "truncated"]
    assert panel["tok/s"].split() == ["tok/s", "12.3k", "▁▁▁"]
    time_line = panel["time"]
    assert time_line.split()[1:3] == ["2.0", "s"]
    assert "rollout 75%" in time_line
    assert "actor update" in time_line  # narrow, the rest is cut
    assert time_line.count("█") == (40 if columns > 90 else 12)
    assert panel["alarm"] == "alarm since step 2: truncation"
    assert any(
        line.startswith("alarm: step 2: truncation") for line in shown[0]
    )  # and above, where it stays
    assert all(len(line) <= columns for line in shown[0])


def test_episodes_are_counted_by_state_beside_the_phase():
    tracker = ConsoleTracker()
    tracker.phase("gen")
    tracker.episodes({"generating": 12, "processing_tools": 4})
    doing = tracker.doing()
    assert doing.startswith("rollout … ")
    assert doing.endswith(" s  12 generating, 4 processing tools")
    tracker.episodes({})
    assert tracker.doing().endswith(" s")
