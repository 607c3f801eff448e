"""The page of tried versions names those of `make abroad`."""

from __future__ import annotations

import re

from tests.abroad.packages import TRIALS
from tests.e2e.wheel import ROOT


def test_the_page_has_the_versions_that_are_tried() -> None:
    page = (ROOT / "docs/compatibility.md").read_text()
    pins = {
        requirement for trial in TRIALS for requirement in trial.packages if "==" in requirement
    }
    assert len(pins) > 20
    for pin in pins:
        name, version = pin.split("==")
        name = name.split("[")[0]
        rows = [line for line in page.splitlines() if re.search(rf"\b{name}\b", line)]
        assert any(re.search(rf"\b{re.escape(version)}\b", row) for row in rows), pin


def test_the_files_of_tests_exist() -> None:
    files = [file for trial in TRIALS for file in trial.tests]
    assert all((ROOT / file).is_file() for file in files)
    here = {f"tests/abroad/{path.name}" for path in (ROOT / "tests/abroad").glob("on_*.py")}
    assert here <= {*files}
