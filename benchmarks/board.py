"""Times of `rlctl board` in Chromium. Targets: 1 s for 10,000 runs, 1 s for 100,000 steps.

    python -m benchmarks.board [RUNS [STEPS [FOLDER]]]

Each time is from the request of a page to the end of the script that drew it, for the first and
the median of later visits. A quickstart is then watched and stopped through the page; FOLDER
receives pictures of it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from playwright.sync_api import Page, expect, sync_playwright

from benchmarks.runs import make_runs
from rlctl.runs.run_dir import RunDir
from tests.browser import CHROMIUM

_VISITS = 5
_TIMEOUT_MS = 300_000


def make_long_run(root: Path, steps: int) -> None:
    """Create a run of `steps` steps with 44 metrics."""
    run = RunDir.create(root, "long", "long", "ppo")
    names = [f"actor/metric_{k}" for k in range(40)]
    with run.metrics.open("w") as file:
        for step in range(steps):
            row = {"step": step, "critic/score/mean": step % 977 / 977, "timing_s/step": 1.5}
            row |= {"actor/entropy": step % 91 / 91, "perf/total_num_tokens": 1000}
            file.write(json.dumps(row | dict.fromkeys(names, 0.5)) + "\n")
    run.finish("finished", 0)


def visits(page: Page, url: str, shown: str, mark: str) -> list[float]:
    """Return the seconds of each visit of a page until it has set `mark`."""
    seconds: list[float] = []
    for _ in range(_VISITS):
        page.goto(url)
        page.wait_for_selector(shown)
        found = page.evaluate(f"performance.getEntriesByName('{mark}')[0].startTime")
        seconds.append(found / 1000)
    return seconds


def watch_quickstart(page: Page, url: str, root: Path, pictures: Path | None) -> None:
    """Watch a quickstart until its fourth step and stop it by its button."""
    words = ["train", "ppo", "--name", "watched", "trainer.total_training_steps=40"]
    run = subprocess.Popen(
        [sys.executable, "-m", "rlctl", *words, f"trainer.run_dir={root}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        page.goto(url)
        page.locator("a", has_text="quickstart/watched").click()
        reward = page.locator(".chart", has_text="Reward").first
        expect(reward).to_contain_text(re.compile(r"at ([4-9]|\d\d) step"))
        if pictures:
            page.screenshot(path=pictures / "board-run.png")
        page.get_by_role("button", name="stop watched").click()
        page.get_by_role("button", name="stop run").click()
        expect(page.locator(".badge")).to_have_text("stopped")
        run.wait(_TIMEOUT_MS / 1000)
    finally:
        run.kill()
        run.wait()
    print(f"a quickstart was watched and stopped with exit code {run.returncode}")


def main() -> None:
    """Measure and print."""
    given = sys.argv[1:]
    number, steps = (int(each) for each in [*given[:2], "10000", "100000"][:2])
    pictures = Path(given[2]) if len(given) > 2 else None
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        root = Path(folder) / "runs"
        if number:
            make_runs(root, number)
            make_long_run(root, steps)
        command = [sys.executable, "-m", "rlctl", "board", "--port", "0", "--json", "--no-open"]
        board = subprocess.Popen([*command, "--root", str(root)], stdout=subprocess.PIPE)
        assert board.stdout is not None
        try:
            url = json.loads(board.stdout.readline())["url"]
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.set_default_timeout(_TIMEOUT_MS)
            page.goto(url)  # with the token
            url = url.partition("?")[0]
            expect.set_options(timeout=_TIMEOUT_MS)
            if number:
                listed = visits(page, url, "#runs tbody tr", "listed")
                drawn = visits(page, f"{url}?run=long/long", ".scatterlayer .trace", "drawn")
                for name, found in ((f"{number} runs", listed), (f"{steps} steps", drawn)):
                    print(f"{name:14} first {found[0]:.2f} s, then {median(found[1:]):.2f} s")
            watch_quickstart(page, url, root, pictures)
        finally:
            board.terminate()
            board.wait()


if __name__ == "__main__":
    main()
