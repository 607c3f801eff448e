"""Fixtures for all tests, and the check of those that were skipped."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import rlctl.runtime  # noqa: F401  # collects less often while the tests import
from rlctl import redaction
from rlctl.runtime.cluster.session import INTERFACES
from tests.plugin_folders import absent, is_there
from tests.skips import EXTRAS, may_skip

# A shell's background job and `nohup` ignore them, and so would every process of the tests.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose extra is not installed, or whose folder of `rlctl/plugins` was deleted."""
    for item in items:
        for marker in item.iter_markers("plugin"):
            for folder in marker.args:
                if not is_there(folder):
                    item.add_marker(pytest.mark.skip(reason=absent(folder)))
        for marker in item.iter_markers("extra"):
            if find_spec(EXTRAS[marker.args[0]]) is None:
                reason = f"the extra {marker.args[0]} is not installed: make test-extras"
                item.add_marker(pytest.mark.skip(reason=reason))


_not_allowed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a skipped test that `tests/skips.py` does not list."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not may_skip(report.nodeid, reason.removeprefix("Skipped: ")):
            _not_allowed.append(f"{report.nodeid}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if a test was skipped that may not be."""
    if _not_allowed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that were skipped and may not be."""
    if _not_allowed:
        terminalreporter.section("skipped, and not allowed here by tests/skips.py")
        for line in _not_allowed:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set TMPDIR, and the folder of the user's state, to one that is deleted after the tests.

    Its path is short because that of a socket is limited to 107 characters.
    """
    tmp_path_factory.getbasetemp()  # create pytest's folder outside
    with (
        tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setenv("XDG_STATE_HOME", f"{folder}/state")  # the list of the user's own runs
        yield


@pytest.fixture(autouse=True)
def untouched_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a process that knows no secrets and no network interfaces of other tests."""
    monkeypatch.setattr(redaction, "_registered", {})
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder for the test, and return it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
