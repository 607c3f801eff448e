"""Requests to the board: data, access rules, streams and actions."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import pytest

from rlctl.errors import UsageError
from rlctl.plugins.console.board.access import Access
from rlctl.plugins.console.board.actions import Actions
from rlctl.plugins.console.board.live_metrics import MetricsCache
from rlctl.plugins.console.board.serve import Listening
from rlctl.plugins.console.board.views import Views
from rlctl.plugins.console.report.curves import curves, rows_from
from rlctl.runs.labels import read_labels
from rlctl.runs.run import Run
from rlctl.runs.run_dir import RunDir
from rlctl.runs.store import RunStore
from tests.data_prep.test_images import picture
from tests.plugins.console.board.serving import Served, serving
from tests.plugins.console.test_report import ACC, write_run
from tests.plugins.console.test_thumbnails import NOISE, named
from tests.plugins.console.test_thumbnails import write_run as write_seen

TOKEN = "a-token-of-the-tests"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("board") / "runs"
    write_run(root, "first", 1e-5)
    write_run(root, "second", 2e-5)
    log = root / "demo" / "first" / "attempts" / "latest" / "all-0.log"
    log.write_text("building the actor\nkey sk-abcdefghijklmnopqrstuvwxyz123456\n\x1b[31mred\n")
    checkpoint = root / "demo" / "first" / "checkpoints" / "step_000010"
    checkpoint.mkdir()
    (checkpoint / "weights").write_bytes(b"0" * 1000)
    return root


def test_list_filters_and_sorts_as_the_command_does(board: Served) -> None:
    found = board.get("runs", where=f'best({ACC}) > 0.5 and like(name, "*")', sort="name")
    assert [row["key"] for row in found["runs"]] == ["demo/first", "demo/second"]
    assert (found["matching"], found["total"]) == (2, 2)
    assert found["runs"][0]["best"] == pytest.approx(0.8)
    assert board.get("runs", state="running")["matching"] == 0
    assert [row["key"] for row in board.get("runs", sort="-name", offset=1)["runs"]] == [
        "demo/first"
    ]
    status, text = board.request("/api/runs?where=stat%20==%201")
    assert status == 400
    assert "no run has a field or key 'stat'" in text


def test_view_is_the_content_of_a_report_without_samples(board: Served) -> None:
    found = board.get("view", run=["demo/first", "demo/second"])
    first = found["runs"][0]
    assert first["metrics"]["critic/score/mean"]["y"][-1] == pytest.approx(0.8)
    assert first["alarms"][0]["name"] == "truncation"
    assert first["checkpoints"] == [{"step": 10, "bytes": 1000, "path": "checkpoints/step_000010"}]
    assert (first["samples"], first["steps"]) == ([], [0, 10, 20])
    assert [row["key"] for row in found["settings"]] == [
        "actor_rollout_ref.actor.optim.lr",
        "trainer.seed",
    ]


def test_tokens_are_a_page_that_needs_the_token_of_the_board(board: Served, root: Path) -> None:
    folder = root / "demo" / "second" / "tokens"
    folder.mkdir()
    row = {"prompt": "p", "score": 1, "tokens": ["<b>"], "clip": [1.0], "advantage": [2.0]}
    (folder / "step_000001.jsonl").write_text(json.dumps(row) + "\n")
    try:
        assert board.get("view", run=["demo/second"])["runs"][0]["tokens"] is True
        status, text = board.request("/tokens?run=demo/second&by=clip")
        assert status == 200
        assert '<span title="1" style="background:rgba(220,0,0,1.00)">&lt;b&gt;</span>' in text
        assert board.request("/tokens?run=demo/first")[0] == 404
        assert board.request("/tokens?run=../../etc")[0] == 404
    finally:
        shutil.rmtree(folder)


def test_samples_are_searched_on_the_server(board: Served) -> None:
    found = board.get("samples", run="demo/first", step=20, verdict="wrong", text="onerror")
    assert found["matching"] == 10
    assert not any(sample["right"] for sample in found["samples"])
    assert len(board.get("samples", run="demo/first")["samples"]) == 20
    assert board.get("samples", run="demo/first", offset=20)["samples"][0]["index"] == 20


def test_thumbnails_are_served_by_digest_alone(tmp_path: Path) -> None:
    write_seen(tmp_path / "runs")
    (first, second) = named(NOISE, picture())
    with serving(tmp_path / "runs") as served:
        found = served.get("samples", run="demo/seen")
        assert sorted(found["thumbnails"]) == sorted([first, second])
        address = f"{served.url}/api/images?run=demo/seen&digest="
        with urllib.request.urlopen(address + first) as response:
            assert response.headers["Content-Type"] == "image/jpeg"
            assert response.read().startswith(b"\xff\xd8\xff")
        for wrong in ("0" * 64, "", "../step_000001", "%00"):
            assert served.request(f"/api/images?run=demo/seen&digest={wrong}")[0] == 404


def test_logs_have_no_secrets_and_no_control_characters(board: Served) -> None:
    found = board.get("logs", run="demo/first")
    assert found["lines"] == ["building the actor", "key <secret>", "\\x1b[31mred"]
    assert board.get("logs", run="demo/second")["problem"] == (
        "no process of this attempt has a log"
    )


@pytest.mark.parametrize(
    "key", ["demo", "demo/..", "../runs/demo", "demo/first/../second", "/etc/passwd", "demo/\0", ""]
)
def test_names_cannot_leave_the_folder_of_runs(board: Served, key: str) -> None:
    for path in ("view", "logs", "samples", "system", "images"):
        status, _ = board.request(f"/api/{path}?run={urllib.request.quote(key)}")
        assert status in (400, 404)


def test_another_host_name_is_refused(board: Served) -> None:
    assert board.request("/", headers={"Host": "attacker.example"})[0] == 403
    assert board.request("/", headers={"Host": "localhost:8420"})[0] == 200
    assert board.request("/", headers={"Host": "[::1]:8420"})[0] == 200


def test_headers_forbid_foreign_scripts(board: Served) -> None:
    with urllib.request.urlopen(board.url) as response:
        policy = response.headers["Content-Security-Policy"]
        assert "script-src 'self';" in policy
        assert "default-src 'none'" in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Access-Control-Allow-Origin"] is None


def test_actions_need_the_page_s_token_and_origin(board: Served, root: Path) -> None:
    body = {"run": "demo/first", "action": "tag", "text": "stolen"}
    assert board.request("/api/act", body)[0] == 403
    assert board.act("demo/first", "tag", "stolen", Origin="https://attacker.example")[0] == 403
    assert read_labels(root / "demo" / "first").tags == ()
    with serving(root, Access("127.0.0.1", None, read_only=True)) as other:
        assert other.act("demo/first", "tag", "x")[0] == 403


def test_tags_and_notes_are_written(board: Served, root: Path) -> None:
    assert board.act("demo/second", "tag", "good new")[1] == {"message": "tags: good, new"}
    assert board.act("demo/second", "tag", "^new", Origin=board.url)[0] == 200
    assert board.act("demo/second", "note", "<b>why</b>")[0] == 200
    labels = read_labels(root / "demo" / "second")
    assert (labels.tags, labels.note) == (("good",), "<b>why</b>")


def test_actions_that_the_state_forbids(board: Served) -> None:
    assert board.act("demo/first", "stop") == (
        409,
        {"error": "first is finished", "where": None, "hint": None},
    )
    assert board.act("demo/first", "export", "../../x")[0] == 400
    assert board.act("demo/first", "drop")[0] == 400
    assert board.request("/api/jobs/9")[0] == 404


@pytest.mark.parametrize("text", [b'"\\ud800"', b"[" * 30_000])
def test_text_that_is_not_valid_json_is_refused(board: Served, text: bytes) -> None:
    body = b'{"run": "demo/first", "action": "note", "text": ' + text + b"}"
    headers = {"X-CSRF-Token": board.access.csrf}
    status, said = board.request("/api/act", body, headers)
    assert (status, json.loads(said)["error"]) == (
        400,
        "an action takes JSON with run, action and text",
    )


def test_numbers_have_a_limit(board: Served) -> None:
    status, said = board.request(f"/api/runs?offset={10**23}")
    assert status == 400
    assert "at most 15 digits" in json.loads(said)["error"]


def test_commands_start_in_no_folder_that_a_record_names(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A copied run's record names a folder with a package `rlctl`."""
    evil = tmp_path / "evil"
    (evil / "rlctl").mkdir(parents=True)
    (evil / "rlctl" / "__main__.py").write_text("open('ran', 'w')")
    copy = tmp_path / "copied" / "demo" / "first"
    shutil.copytree(root / "demo" / "first", copy)
    record = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(record | {"cwd": str(evil)}))
    given = []

    class Started:
        def __init__(self, words: list[str], cwd: str | None, **_: object) -> None:
            given.append((words, cwd))

    monkeypatch.setattr("rlctl.plugins.console.board.actions.subprocess.Popen", Started)
    Actions().act(RunStore(copy.parents[1]).find("first"), "export", "model")
    ((words, cwd),) = given
    assert words[:4] == [sys.executable, "-P", "-m", "rlctl"]
    assert cwd is None


def test_resume_starts_the_command(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = RunStore(root).find("first")
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    actions = Actions()
    started = actions.act(run, "resume", "")
    actions.jobs[started["job"]].process.wait(60)
    assert actions.job(started["job"])["lines"] == [f"-P -m rlctl resume {run.path.resolve()}"]
    exported = actions.act(run, "export", "model")
    actions.jobs[exported["job"]].process.wait(60)
    (line,) = actions.job(exported["job"])["lines"]
    assert line.endswith(f"export {run.path.resolve()} {run.path.resolve()}/exports/model")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of states, empty."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "rlctl"


def token_of(host: str = "127.0.0.1") -> str:
    return Listening(host, 0, None, False).access().token or ""


def test_a_token_is_kept_in_a_file_of_the_user_alone(state: Path) -> None:
    first = token_of()
    file = state / "board-token"
    assert len(first) >= 32
    assert file.read_text() == f"{first}\n"
    assert (file.stat().st_mode & 0o777, state.stat().st_mode & 0o777) == (0o600, 0o700)
    assert token_of() == first
    assert token_of("0.0.0.0") not in ("", first)  # which others are given
    assert list(state.iterdir()) == [file]


@pytest.mark.parametrize("kind", ["readable", "short", "empty", "link", "pipe", "folder"])
def test_a_token_that_others_may_know_is_made_again(state: Path, kind: str) -> None:
    known = token_of()
    file = state / "board-token"
    if kind == "readable":
        file.chmod(0o644)
    elif kind in ("short", "empty"):
        file.write_text("abc" if kind == "short" else "")
    else:
        file.unlink()
    if kind == "link":
        (state / "other").write_text(known)
        file.symlink_to(state / "other")
    elif kind == "pipe":
        os.mkfifo(file, 0o600)
    elif kind == "folder":
        file.mkdir()
    found = token_of()
    assert len(found) >= 32
    assert found != known
    assert (file.read_text() == f"{found}\n") if kind != "folder" else file.is_dir()


def test_boards_that_start_together_have_one_token(state: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(lambda _: token_of(), range(16)))) == 1


def test_an_address_for_one_visit(root: Path) -> None:
    access = Access("127.0.0.1", TOKEN)
    with serving(root, access) as served:
        ticket = access.make_ticket()
        assert served.request("/api/runs")[0] == 401
        for value in ("", "None", "wrong"):
            assert served.request(f"/?token={value}")[0] == 401
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(f"{served.url}/?token={ticket}") as response:
            assert response.url == f"{served.url}/"
        assert served.request(f"/?token={ticket}")[0] == 401
        with opener.open(f"{served.url}/?run=demo/first&token={TOKEN}") as response:
            assert response.url == f"{served.url}/?run=demo/first"  # also when signed in


def test_a_token_is_required_where_others_can_connect(root: Path) -> None:
    assert len(Listening("0.0.0.0", 0, None, False).access().token or "") >= 32
    with pytest.raises(UsageError, match="could guess"):
        Listening("0.0.0.0", 0, "short", False).access()
    with serving(root, Access("0.0.0.0", TOKEN)) as served:
        assert served.request("/")[0] == 401
        assert served.request("/?token=wrong")[0] == 401
        assert served.request("/", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(f"{served.url}/?run=demo/first&token={TOKEN}") as response:
            assert response.url == f"{served.url}/?run=demo/first"
        connection = HTTPConnection(served.url.removeprefix("http://"))
        connection.request("GET", f"////attacker.example/?run=a&token={TOKEN}")
        signed_in = connection.getresponse()
        assert signed_in.headers["Location"] == "/?run=a"
        # A link of another site must also bring the cookie that it has just set.
        assert "SameSite=Lax" in signed_in.headers["Set-Cookie"]
        with opener.open(f"{served.url}/api/runs") as response:
            assert json.load(response)["total"] == 2


def test_stream_sends_the_rows_that_a_page_lacks(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs", "demo", "live", "ppo")
    run.metrics.write_text('{"step": 1, "a": 1.5}\n')
    with serving(tmp_path / "runs") as served:
        live = served.get("view", run="demo/live")["runs"][0]["live"]
        address = f"{served.url}/api/stream?run=demo/live&epoch={live['epoch']}&rows=1"
        with urllib.request.urlopen(address, timeout=60) as stream:
            with run.metrics.open("a") as file:
                file.write('{"step": 2, "a": 2.5, "b": 1}\n')
            update = _next(stream)
            assert (update["new"]["first"], update["new"]["rows"]) == (1, 2)
            assert update["new"]["x"]["step"] == [2]
            assert update["new"]["metrics"]["a"] == {"at": [0], "y": [2.5]}
            run.finish("finished", 0)
            assert _next(stream)["state"] == "finished"
            aside = run.metrics.with_name("aside")
            aside.write_text('{"step": 1, "a": 0}\n')
            aside.replace(run.metrics)  # a resume has discarded a step
            assert _next(stream)["new"] == {"reset": True}


def test_system_use_of_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{os.getpid()}, 1024'\necho '{os.getpid()}, [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = RunDir.create(tmp_path / "runs", "demo", "live", "ppo")
    run.update(state="running")
    with (run.attempt / "main-3.log").open("w") as log:
        worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, stdout=log)
    views = Views(tmp_path / "runs")
    try:
        names = [each["name"] for each in views.system("demo/live")["processes"]]
    finally:
        worker.kill()
        worker.communicate()
    assert "main-3" in names
    first = views.system("demo/live")["processes"][0]
    assert (first["pid"], first["name"], first["gpu_bytes"]) == (os.getpid(), "controller", 2**30)
    assert first["bytes"] > 2**20
    run.finish("finished", 0)
    assert views.system("demo/live") == {"processes": [], "problem": "live is finished"}


def _next(stream: object) -> dict:
    for line in stream:  # type: ignore[attr-defined]
        if line.startswith(b"data: "):
            return json.loads(line[6:])
    raise AssertionError("the stream has ended")


def test_rows_read_in_parts_equal_those_read_at_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": n, "timing_s/step": 2.0} | ({"x": n} if n % 3 else {"y": n}) for n in range(9)]
    live = MetricsCache().of(tmp_path)
    for row in rows:
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
        live.read()
    once = MetricsCache().of(tmp_path)
    assert curves(live.table) == curves(once.read())
    tail = rows_from(live.table, 7)
    assert tail["x"]["hours"] == pytest.approx([16 / 3600, 18 / 3600], rel=1e-4)
    assert tail["metrics"]["x"] == {"at": [0, 1], "y": [7, 8]}


def test_the_first_page_waits_for_the_reading_under_way(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end, readings = threading.Event(), threading.Event(), []
    read = RunStore.runs

    def slow(store: RunStore) -> list[Run]:
        readings.append(store)
        began.set()
        assert may_end.wait(60)
        return read(store)

    monkeypatch.setattr(RunStore, "runs", slow)
    listing = Views(root).listing
    with ThreadPoolExecutor(2) as threads:
        early = threads.submit(listing.read)
        assert began.wait(60)
        page = threads.submit(listing.current)
        may_end.set()
        assert early.result() == page.result()[0] == 1
    assert len(readings) == 1


def test_ctrl_c_ends_the_command_at_once(root: Path, state: Path) -> None:
    command = [sys.executable, "-m", "rlctl", "board", "--port", "0", "--json", "--no-open"]
    process = subprocess.Popen(
        [*command, "--root", str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    try:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert first["root"] == str(root)
        url, _, token = first["url"].partition("?token=")
        assert f"{token}\n" == f"{first['token']}\n" == (state / "board-token").read_text()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}api/stream", timeout=60)
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{url}api/stream", headers=headers)
        stream = urllib.request.urlopen(request, timeout=60)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        stream.close()
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
