"""Notices: a server that fails, a run that is killed, receivers that are wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import ConfigError
from rlctl.plugins.console import notices
from rlctl.plugins.console.notify import LOG_FILE, check_targets
from tests.processes import gone

# Drives a run without steps, and ends as its first argument says.
DRIVER = """
import sys
from pathlib import Path
from types import SimpleNamespace
from rlctl.plugins.console.notify import Notify
from rlctl.runs.run_dir import RunDir

run = RunDir.create(Path(sys.argv[2]), "p", "night", "ppo")
run.update(state="running", total_steps=10)
trainer = SimpleNamespace(notify=sys.argv[3:], notify_on=["finished", "failed", "alarm", "lost"])
watcher = Notify(run, SimpleNamespace(trainer=trainer)).watcher
run.event("alarm", name="kl", step=3, message="KL runaway", hint="try a lower learning rate")
run.event("alarm", name="kl", step=4, message="KL runaway", hint="try a lower learning rate")
if sys.argv[1] != "killed":
    run.finish(sys.argv[1], 0)
print(watcher.pid, flush=True)
sys.stdin.read()
"""


class Server(HTTPServer):
    """Receiver that answers 500 to the first `num_failures` posts."""

    def __init__(self, num_failures: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.num_failures = num_failures
        self.received: list[dict[str, Any]] = []
        self.num_posts = 0

    @property
    def address(self) -> str:
        return f"json://user:hunter2secret@127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        assert isinstance(server, Server)
        server.num_posts += 1
        is_refused = server.num_posts <= server.num_failures
        if not is_refused:
            server.received.append(body)
        self.send_response(500 if is_refused else 200)
        self.end_headers()

    def log_message(self, format: str, *_: object) -> None:
        pass


@contextmanager
def serving(num_failures: int = 0) -> Iterator[Server]:
    server = Server(num_failures)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def drive(
    end: str, root: Path, *targets: str, **variables: str
) -> tuple[subprocess.Popen[str], int]:
    """Start a run; return its process and the pid of its watcher."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, end, str(root), *targets],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def wait_for_exit(pid: int) -> None:
    while not gone(pid):
        time.sleep(0.05)


def log_of(root: Path) -> str:
    return (root / "p" / "night" / "attempts" / "1" / LOG_FILE).read_text()


def test_a_killed_run_is_reported_by_its_watcher(tmp_path: Path):
    with serving(num_failures=1) as server:
        process, watcher = drive("killed", tmp_path, "MY_HOOK", MY_HOOK=server.address)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        wait_for_exit(watcher)
    assert [notice["title"] for notice in server.received] == [
        "night has an alarm",
        "night was killed",
    ]
    assert "step 3: KL runaway" in server.received[0]["message"]
    assert "rlctl show night" in server.received[1]["message"]
    log = log_of(tmp_path)
    assert log.count("MY_HOOK try 1: sent") == 1
    assert "MY_HOOK try 2: sent" in log
    written = "".join(
        path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()
    )
    assert "hunter2secret" not in written


def test_a_command_gets_the_notice_and_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(notices, "PAUSES_S", (0.0, 0.0, 0.0))
    notice = notices.Notice("failed", "night", "night failed", "no\nmemory")
    file = tmp_path / "sent"
    command = f'printf "%s|" "$RLCTL_EVENT" "$RLCTL_RUN" "$RLCTL_TITLE" "$RLCTL_BODY" > {file}'
    assert notices.deliver(notice, command)
    assert file.read_text() == "failed|night|night failed|no\nmemory|"
    assert not notices.deliver(notice, f"echo x >> {tmp_path}/tries; exit 3")
    assert (tmp_path / "tries").read_text().count("x") == notices.TRIES


def test_a_command_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(notices, "COMMAND_S", 0.2)
    notice = notices.Notice("failed", "night", "night failed", "")
    assert notices.error_of(notice, "sleep 600") == "it took longer than 0.2 s"


def test_a_run_ends_while_its_receiver_is_away(tmp_path: Path):
    with serving() as closed:
        pass
    process, watcher = drive("finished", tmp_path, "MY_HOOK", "false", MY_HOOK=closed.address)
    process.communicate("")
    assert process.returncode == 0
    os.kill(watcher, signal.SIGTERM)  # the retries of all notices take a minute
    wait_for_exit(watcher)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("https://hooks.slack.com/services/T/B/x", "an address may be a secret"),
        ("NO_SUCH_VARIABLE", "the environment variable NO_SUCH_VARIABLE is not set"),
        ("MY_HOOK", "has no address that can be notified"),
    ],
)
def test_a_wrong_receiver_is_refused(target: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_HOOK", "nonsense")
    with pytest.raises(ConfigError, match=message):
        check_targets([target])


def test_addresses_of_chats_are_known(monkeypatch: pytest.MonkeyPatch):
    teams = "https://prod-1.westus.logic.azure.com:443/workflows/64/triggers/manual/paths/invoke"
    addresses = {
        "SLACK_URL": "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ",
        "DISCORD_URL": f"https://discord.com/api/webhooks/{'4' * 18}/{'A' * 64}",
        "TEAMS_URL": f"{teams}?api-version=2016-06-01&sp=%2Ftriggers&sv=1.0&sig=abcdef",
        "NTFY_URL": "ntfy://ntfy.sh/rlctl",
        "MAIL_URL": "mailto://user:password@example.com",
    }
    for name, address in addresses.items():
        monkeypatch.setenv(name, address)
    check_targets(list(addresses))
