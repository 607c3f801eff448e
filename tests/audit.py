"""Known vulnerabilities of the installed packages, by pip-audit: `make audit`.

Exits with 1 for a vulnerability that is not in `ACCEPTED`. Without access to a package index, from
which pip-audit and its data come, it prints that nothing was checked and exits with 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Id or alias of an accepted vulnerability, and the reason why it does no harm here.
ACCEPTED: Mapping[str, str] = {}
TIMEOUT_S = 300.0
_COMMAND = ("-m", "uv", "tool", "run", "--from", "pip-audit>=2.10,<3", "pip-audit")


def audit() -> Mapping[str, Any] | str:
    """Return the report of pip-audit on this environment, or the reason why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--path", sysconfig.get_path("purelib"), "--skip-editable", "--timeout", "20"]
        output = ["--format", "json", "--output", str(report), "--progress-spinner", "off"]
        try:
            done = subprocess.run(
                [sys.executable, *_COMMAND, *options, *output],
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"pip-audit did not finish within {TIMEOUT_S:g} s"
        if not report.is_file():
            return (done.stderr.strip().splitlines() or ["pip-audit wrote no report"])[-1]
        return json.loads(report.read_text(encoding="utf-8"))


def findings(report: Mapping[str, Any], accepted: Mapping[str, str] = ACCEPTED) -> list[str]:
    """Return a line for each vulnerability of a report that is not accepted."""
    return [
        f"{package['name']} {package['version']}: {found['id']}, "
        f"fixed in {', '.join(found['fix_versions']) or 'no version'}"
        for package in report["dependencies"]
        for found in package.get("vulns", ())
        if not {found["id"], *found.get("aliases", ())} & accepted.keys()
    ]


def main() -> int:
    """Print the result; return the exit code."""
    report = audit()
    if isinstance(report, str):
        print(f"audit: not done, vulnerabilities were not looked up: {report}")
        return 0
    found = findings(report)
    checked = sum("vulns" in package for package in report["dependencies"])
    skipped = len(report["dependencies"]) - checked
    if not checked:
        print("audit: not done, the package index has no advisories for any installed package")
        return 0
    for line in found:
        print(f"audit: {line}")
    print(f"audit: {len(found)} vulnerabilities in {checked} packages, {skipped} not looked up")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
