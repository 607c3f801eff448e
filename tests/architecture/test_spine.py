"""The files that the architecture page names as PPO: few enough to be read at once."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_FILES, MOST_LINES = 8, 2_000


def test_the_spine_is_short() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.split("## The spine")[1].split("\n## ")[0]
    names = re.findall(r"^\| `(\S+\.py)`", section, re.MULTILINE)
    files = [ROOT / "rlctl/runtime" / name for name in names]
    assert len(files) == MOST_FILES
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= MOST_LINES
