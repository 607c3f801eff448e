"""Results of the trials `oldest` and `newest`, and the table of docs/compatibility.md from them."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.e2e.wheel import ROOT, requirements

FILE = Path(__file__).with_name("tried.json")
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN = "<!-- written by `python -m tests.abroad.tried` -->\n"
END = "<!-- end -->\n"


def ranges() -> dict[str, Requirement]:
    """Return what rlctl itself requires, by name."""
    return {each.name: each for each in requirements()}


def not_lowest(installed: Mapping[str, str]) -> list[str]:
    """Return the packages that are newer than the lower end of their range, as `name version`."""
    known = _by_name(installed)
    return [
        f"{name} {known[canonicalize_name(name)]}"
        for name, requirement in ranges().items()
        for bound in requirement.specifier
        if bound.operator == ">="
        and Version(Version(known[canonicalize_name(name)]).public) != Version(bound.version)
    ]


def _by_name(installed: Mapping[str, str]) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in installed.items()}


def note(trial: str, installed: Mapping[str, str], passed: int, failed: int) -> None:
    """Write versions and numbers of tests of a trial to `tried.json`, and the table."""
    known = _by_name(installed)
    results = read()
    results[trial] = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "passed": passed,
        "failed": failed,
        "versions": {name: known[canonicalize_name(name)] for name in sorted(ranges())},
    }
    FILE.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_page()


def read() -> dict[str, Any]:
    """Return the results by the trial's name."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    results = read()
    yield f"| package | range | {' | '.join(results)} |\n"
    yield f"|---|---|{'---|' * len(results)}\n"
    for name, requirement in sorted(ranges().items()):
        found = [result["versions"].get(name, "") for result in results.values()]
        yield f"| {name} | {requirement.specifier or 'any'} | {' | '.join(found)} |\n"
    ends = [f"{each['passed']} passed, {each['failed']} failed" for each in results.values()]
    yield f"| tests | | {' | '.join(ends)} |\n"
    dates = [f"{each['date']}, Python {each['python']}" for each in results.values()]
    yield f"| on | | {' | '.join(dates)} |\n"


def page() -> str:
    """Return the page with the table of the present results."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{''.join(table())}{END}{rest.partition(END)[2]}"


def write_page() -> None:
    """Write the table into the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write_page()
