"""Pages of the trackers and of rlctl's board in Chromium, on one short run that all of them log.

With `PICTURES=DIR` screenshots are written there, for the page of documentation on tracking.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from rlctl.tracking.jsonl import generations_file, read_generations
from tests.browser import chromium
from tests.e2e.command import environment, rlctl
from tests.ports import free_port
from tests.progress import wait_until

LOGGERS = ("swanlab", "tensorboard", "mlflow", "trackio")
LR = "0.000325"
LR_KEY = "actor_rollout_ref.actor.optim.lr"
LAST = 3  # step
SETTINGS = (
    *("trainer.tracking.modes={swanlab: local}", f"{LR_KEY}={LR}", "data.val_max_samples=4"),
    *(f"trainer.total_training_steps={LAST}", "trainer.test_freq=1", "trainer.save_freq=-1"),
    *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    *("actor_rollout_ref.rollout.n=2", "trainer.num_threads=1"),
)
PROJECT, NAME = "quickstart", "seen"


@dataclass(frozen=True)
class Trained:
    """Folder of the command, its environment, and a response of the last validation."""

    folder: Path
    env: Mapping[str, str]
    response: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A real run of three steps with all local trackers."""
    folder = tmp_path_factory.mktemp("seen")
    own = {"TRACKIO_DIR": str(folder / "trackio"), "XDG_STATE_HOME": str(folder / "state")}
    loggers = [word for logger in LOGGERS for word in ("--logger", logger)]
    words = ("train", "grpo", "--inline", "--name", NAME, *loggers, *SETTINGS)
    rlctl(*words, cwd=folder, more=own, process=True)
    samples = read_generations(generations_file(folder / "runs" / PROJECT / NAME, LAST))
    return Trained(folder, environment() | own, " ".join(samples[0].response.split()))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1100, "height": 640})
    expect.set_options(timeout=120_000)
    page.set_default_timeout(120_000)
    yield page
    page.close()


@contextmanager
def served(run: Trained, port: int, *words: object, **more: str) -> Iterator[str]:
    """Start a server on loopback, wait for its first reply, and end it with its children."""
    program = shutil.which(str(words[0]), path=str(Path(sys.executable).parent))
    assert program, words[0]
    url = f"http://127.0.0.1:{port}"
    log = run.folder / f"{words[0]}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [program, *map(str, words[1:])],
            cwd=run.folder,
            env={**run.env, **more},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: replies(url) or process.poll() is not None, process.pid, str(words))
        assert process.poll() is None, log.read_text()
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def replies(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def found(page: Page, what: str, *places: Locator) -> None:
    """Wait until each place is visible, and print what was found where."""
    for place in places:
        expect(place.first).to_be_visible()
    text = (places[-1].first.text_content() or "").strip()
    address = page.url.partition("?token")[0]
    print(f"\n{address} | {what} | {text[:60]!r}")


def picture(page: Page, name: str) -> None:
    if folder := os.environ.get("PICTURES"):
        page.wait_for_timeout(3000)  # charts are animated
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_swanlab(run: Trained, page: Page) -> None:
    port = free_port()
    logs = f"runs/{PROJECT}/swanlog"
    with served(run, port, "swanlab", "watch", logs, "-p", port) as url:
        page.goto(f"{url}/experiment/1/index", wait_until="domcontentloaded")
        found(page, "state", page.get_by_text("Finished", exact=True))
        lr = page.get_by_text(LR, exact=True)
        found(page, "learning rate", page.get_by_text(LR_KEY, exact=True), lr)
        page.goto(f"{url}/experiment/1/chart", wait_until="domcontentloaded")
        found(page, "response", page.get_by_text(run.response))
        found(page, "x axis", page.get_by_text("Step", exact=True))
        picture(page, "swanlab")


def test_tensorboard(run: Trained, page: Page) -> None:
    port = free_port()
    with served(run, port, "tensorboard", "--logdir", "runs", "--port", port) as url:
        page.goto(f"{url}/#text")
        found(page, "response", page.get_by_text(run.response))
        page.goto("about:blank")
        page.goto(f"{url}/#hparams")
        lr = page.get_by_text(f"{LR}00", exact=True)
        found(page, "learning rate", page.get_by_text(LR_KEY), lr)
        page.goto("about:blank")
        page.goto(f"{url}/#timeseries")  # TensorBoard knows no state of a run
        found(page, "run", page.get_by_text(f"{PROJECT}/{NAME}"))
        axis = page.get_by_text("Horizontal Axis", exact=True)
        found(page, "x axis", axis, page.locator("mat-select").get_by_text("Step", exact=True))
        picture(page, "tensorboard")


def test_mlflow(run: Trained, page: Page) -> None:
    port = free_port()
    store = ("--backend-store-uri", "sqlite:///runs/mlflow.db")
    with served(run, port, "mlflow", "ui", *store, "--port", port) as url:
        query = f"{url}/api/2.0/mlflow/runs/search"
        request = urllib.request.Request(
            query, b'{"experiment_ids": ["1"]}', {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            [shown] = json.load(response)["runs"]
        base = f"{url}/#/experiments/1/runs/{shown['info']['run_id']}"
        page.goto(base)
        found(page, "state", page.get_by_text("Finished", exact=True))
        found(page, "learning rate", page.get_by_text(LR_KEY), page.get_by_text(LR, exact=True))
        page.goto(f"{base}/artifacts/val_generations.json")
        found(page, "response", page.get_by_text(run.response))
        page.goto(f"{base}/model-metrics")
        found(page, "x axis", page.locator("svg").get_by_text("Step", exact=True))
        picture(page, "mlflow")


def test_trackio(run: Trained, page: Page) -> None:
    port = free_port()
    own = {"GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "False"}
    own["BROWSER"] = "true"  # it opens one
    with served(run, port, "trackio", "show", "--project", PROJECT, **own) as url:
        page.goto(f"{url}/runs?project={PROJECT}")
        page.locator("tr").get_by_text(NAME, exact=True).click()
        found(page, "learning rate", page.get_by_text(f'"{LR_KEY}": {LR}'))
        last = page.get_by_text("Last step")  # Trackio knows no state of a run
        found(page, "last step", last, page.get_by_text(str(LAST), exact=True))
        page.goto(f"{url}/media?project={PROJECT}")
        found(page, "response", page.get_by_text(run.response, exact=True))
        page.goto(f"{url}/?project={PROJECT}")
        expect(page.get_by_label("X-axis", exact=True)).to_have_value("step")
        found(page, "x axis", page.get_by_text("X-axis", exact=True))
        picture(page, "trackio")


def test_board(run: Trained, page: Page) -> None:
    port = free_port()
    with served(run, port, "rlctl", "board", "--no-open", "--port", port) as url:
        refused = page.goto(url)
        assert refused is not None
        assert refused.status == 401
        token = (run.folder / "state" / "rlctl" / "board-token").read_text().strip()
        page.goto(f"{url}/?token={token}")
        found(page, "curves", page.locator("#overlay .chart"))
        page.goto(f"{url}/?run={PROJECT}/{NAME}")
        found(page, "state", page.locator(".badge").get_by_text("finished"))
        found(page, "x axis", page.locator("svg").get_by_text("step", exact=True))
        picture(page, "board")
        found(page, "response", page.locator(".response").get_by_text(run.response))
        row = page.locator("#settings tr").filter(has_text=LR_KEY)
        found(page, "learning rate", row.get_by_text(LR))
