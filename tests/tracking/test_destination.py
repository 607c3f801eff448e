"""Lines that say where the data of trackers are, and why."""

from __future__ import annotations

import logging
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlctl.cli.startup import print_summary
from rlctl.runs.events import read_events
from rlctl.tracking.destination import (
    Destination,
    announce,
    choices,
    commands,
    commands_of,
    destinations,
    line,
    no_key,
)
from tests.tracking.real import call, in_a_home, write
from tests.tracking.swanlab_server import swanlab_server
from tests.tracking.wandb_server import wandb_server

REASON = no_key("swanlab", "`swanlab watch` shows it")


class Located:
    """Tracker that says where its data are, or fails to."""

    def __init__(self, place: Destination | None) -> None:
        self.place = place

    def destination(self) -> Destination:
        if self.place is None:
            raise RuntimeError("no place")
        return self.place

    def start(self, run: Any) -> None: ...
    def log(self, *_: Any) -> None: ...
    def generations(self, *_: Any) -> None: ...
    def finish(self, state: str) -> None: ...


def offline(folder: Path) -> Destination:
    other = choices("swanlab", REASON, ("local", "offline"))
    return Destination("offline", REASON, str(folder), "", f"swanlab sync {folder}", other)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_start_prints_one_line_per_tracker_and_choices_only_on_a_terminal(
    is_terminal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(logging.getLogger("rlctl"), "propagate", True)
    caplog.set_level(logging.INFO, "rlctl")
    events: list[dict[str, Any]] = []
    secret = "http://user:hunter22@host:5000/#/runs/1"
    trackers = {
        "a": Located(offline(tmp_path / "runs/a")),
        "b": Located(Destination("server", place=secret)),
        "c": Located(None),
        "d": object(),
    }
    announce(trackers, lambda kind, **fields: events.append({"kind": kind, **fields}))  # type: ignore[arg-type]
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "a: offline (no key): runs/a; swanlab sync runs/a"
    terminal = [
        "  for the next run: swanlab login",
        "  for the next run: export SWANLAB_MODE=local",
        "  for the next run: export SWANLAB_MODE=offline",
    ]
    assert lines[1:4] == terminal if is_terminal else "b: server" in lines[1]
    assert lines[-1] == "no destination of logger c: no place"
    assert [event["tracker"] for event in events] == ["a", "b"]
    assert "hunter22" not in str(events) + str(lines)


def test_the_end_and_show_say_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    started = {"kind": "tracker_started", "tracker": "a", **offline(tmp_path / "x").as_event()}
    again = started | {"mode": "online", "reason": "key found", "place": "http://h/1", "send": ""}
    missed = {"kind": "tracker_off", "tracker": "b", "why": "3 failures"}
    other = started | {"tracker": "b"}
    found = destinations([started, other, missed, {"kind": "resume", "step": 1}, again])
    assert (line(found["a"]), found["a"]["off"]) == ("online (key found): http://h/1", None)
    assert (line(found["b"]), found["b"]["off"]) == ("offline (no key): x", "3 failures")
    assert commands(found["b"]) == ["swanlab sync x"]
    run = tmp_path / "runs/p/r"
    run.mkdir(parents=True)
    following = commands_of(found, "r")
    assert following == ["swanlab sync x", "rlctl runs sync r --logger b"]
    monkeypatch.setattr("rlctl.runs.events.read_events", lambda _: [started, other, missed, again])
    print_summary("finished", run, [], 1.0, [], following)
    err = capsys.readouterr().err
    assert "  a     online (key found): http://h/1\n" in err
    assert "  b     offline (no key): x\n" in err
    assert "rlctl runs sync r --logger b" in err


@pytest.mark.soak
def test_printed_commands_send_offline_files(tmp_path: Path) -> None:
    """Type the commands of real SDKs into a shell; their servers receive every step."""
    call(write, tmp_path, 1, 3, 0, ["swanlab", "wandb"], home=tmp_path)
    run = tmp_path / "runs/house/first"
    events = read_events(run)
    found = destinations(events)
    assert {name: line(place).split(":")[0] for name, place in found.items()} == dict.fromkeys(
        ("swanlab", "wandb"), "offline (no key)"
    )
    bin_folder = Path(sys.executable).parent
    with swanlab_server() as (swan, experiments), wandb_server() as (address, runs):
        variables = in_a_home(tmp_path) | {
            "SWANLAB_API_HOST": swan,
            "SWANLAB_WEB_HOST": swan,
            "SWANLAB_API_KEY": "k" * 21,
            "WANDB_BASE_URL": address,
            "WANDB_API_KEY": "k" * 40,
        }
        variables["PATH"] = f"{bin_folder}:{variables['PATH']}"
        for place in found.values():
            [command] = commands(place)
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path,
                env=variables,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    [experiment] = experiments.values()
    assert [step for step, _ in experiment.curves["lr"]] == [1, 2, 3]
    steps = [line["training/global_step"] for line in runs["abc123"].values() if "lr" in line]
    assert steps == [1, 2, 3]


@pytest.mark.plugin("bridges")
@pytest.mark.soak
def test_places_of_the_other_trackers_exist(tmp_path: Path) -> None:
    call(write, tmp_path, 1, 1, 0, ["tensorboard", "mlflow", "trackio"], home=tmp_path)
    found = destinations(read_events(tmp_path / "runs/house/first"))
    assert [place["mode"] for place in found.values()] == ["local"] * 3
    for name, place in found.items():
        assert Path(place["place"].removeprefix("sqlite:///")).exists(), name
        words = shlex.split(place["look"].removeprefix(f"TRACKIO_DIR={tmp_path / 'trackio'} "))
        assert not words or words[words[0] == "uvx"] == name  # TensorBoard may be missing


@pytest.mark.soak
def test_online_runs_have_an_address(tmp_path: Path) -> None:
    with swanlab_server() as (swan, _), wandb_server() as (address, _):
        keys = {"SWANLAB_API_KEY": "k" * 21, "WANDB_API_KEY": "k" * 40}
        hosts = {"SWANLAB_API_HOST": swan, "SWANLAB_WEB_HOST": swan, "WANDB_BASE_URL": address}
        call(write, tmp_path, 1, 1, 0, ["swanlab", "wandb"], home=tmp_path, **keys, **hosts)
    found = destinations(read_events(tmp_path / "runs/house/first"))
    assert line(found["swanlab"]).startswith(f"online (key found): {swan}/")
    assert line(found["wandb"]).startswith(f"online (key found): {address}/me/house/runs/abc123")
