"""The audit reports what is not accepted, and never fails for lack of a network."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests import audit

REPORT: dict[str, Any] = {
    "dependencies": [
        {"name": "safe", "version": "1", "vulns": []},
        {
            "name": "old",
            "version": "2",
            "vulns": [
                {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["3"]},
                {"id": "PYSEC-2", "aliases": [], "fix_versions": []},
            ],
        },
        {"name": "local", "skip_reason": "not on the index"},
    ]
}


def test_vulnerabilities_are_found_unless_accepted() -> None:
    assert audit.findings(REPORT) == [
        "old 2: PYSEC-1, fixed in 3",
        "old 2: PYSEC-2, fixed in no version",
    ]
    assert audit.findings(REPORT, {"CVE-1": "not reached", "PYSEC-2": "not reached"}) == []


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(audit, "audit", lambda: REPORT)
    assert audit.main() == 1
    assert "2 vulnerabilities in 2 packages, 1 not looked up" in capsys.readouterr().out
    monkeypatch.setattr(audit, "audit", lambda: {"dependencies": REPORT["dependencies"][:1]})
    assert audit.main() == 0
    assert "0 vulnerabilities in 1 packages" in capsys.readouterr().out
    monkeypatch.setattr(audit, "audit", lambda: {"dependencies": REPORT["dependencies"][2:]})
    assert audit.main() == 0
    assert "not done" in capsys.readouterr().out


def test_no_network_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 2, "", "error: dns error: no such host\n")

    monkeypatch.setattr(subprocess, "run", offline)
    assert audit.main() == 0
    assert "not done" in (out := capsys.readouterr().out)
    assert "no such host" in out
