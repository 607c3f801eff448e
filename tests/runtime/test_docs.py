"""The docs: pages are generated, blocks are valid, the site builds without warnings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from docs.generate import PAGES as GENERATED
from docs.generate import PARTS, with_parts
from rlctl.__main__ import main
from rlctl.explain.entries import error_entries, metric_entries

FOLDER = Path(__file__).parents[2] / "docs"
PAGES = sorted(FOLDER.glob("*.md"))
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LOADED = re.compile(
    r'<script[^>]+src="https?:|<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+https?:'
)


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """Yield page and text of the blocks in these languages."""
    for page in PAGES:
        for match in _FENCE.finditer(page.read_text(encoding="utf-8")):
            if match[1] in languages:
                yield page.name, match[2]


def test_generated_pages_have_every_entry() -> None:
    errors, metrics = GENERATED["errors.md"](), GENERATED["metrics.md"]()
    assert all(f"\n## {code}\n" in errors for code in error_entries())
    assert all(f"\n| `{entry.name}` |" in metrics for entry in metric_entries())
    keys = GENERATED["verl-keys.md"]()
    assert "| `ray_init*` | `ray_kwargs.ray_init\\1` |" in keys
    assert "## Keys without a counterpart" in keys


def test_no_generated_page_is_kept_and_every_part_is_used() -> None:
    assert not {page.name for page in PAGES} & set(GENERATED)
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    marks = {name: re.findall(r"<!-- generated: (.+) -->", text) for name, text in texts.items()}
    assert marks.pop("migrating.md") == ["trl", "openrlhf"]
    assert marks.pop("machines.md") == ["memory"]
    assert marks.pop("models.md") == ["models"]
    assert not any(marks.values())
    assert set(PARTS) == {"trl", "openrlhf", "memory", "models"}
    assert "| `num_generations` | `actor_rollout_ref.rollout.n` |" in with_parts(
        texts["migrating.md"]
    )


def test_pages_that_messages_name_exist() -> None:
    named = {entry.page.partition("#")[0] for entry in error_entries().values() if entry.page}
    sources = (FOLDER.parent / "rlctl").rglob("*.py")
    for path in sources:
        named |= set(re.findall(r"docs/([\w-]+\.md)", path.read_text(encoding="utf-8")))
    assert named <= {page.name for page in PAGES}


def test_blocks_are_valid() -> None:
    for _, text in blocks("yaml"):
        assert yaml.safe_load(text)
    for _, text in blocks("json"):
        for line in text.splitlines():
            json.loads(line)
    for page, text in blocks("python"):
        compile(text.replace("…", "..."), page, "exec")
    scripts = "\n".join(text.replace("…", "") for _, text in blocks("bash", "sh"))
    subprocess.run(["bash", "-n"], input=scripts, text=True, check=True)


def test_commands_of_scripts_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Parse commands that only a cluster, a hub or a GPU can run."""
    for page, text in blocks("bash", "sh"):
        for line in re.sub(r"\\\n|(?<=\s)# .*$|&$", "", text, flags=re.MULTILINE).splitlines():
            if line.startswith("rlctl "):
                words = line.replace("…", "").split()[1:]
                assert main([*words, "--help"]) == 0, f"{page}: {line}"
    capsys.readouterr()


@pytest.mark.soak
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")],
        cwd=FOLDER.parent,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page.name: page.read_text() for page in (tmp_path / "site").glob("*.html")}
    names = {page.name for page in PAGES if page.name != "README.md"} | set(GENERATED)
    assert set(pages) >= {name.replace(".md", ".html") for name in names}
    assert [name for name, text in pages.items() if _LOADED.search(text)] == []
    assert 'id="e-oom"' in pages["errors.html"]
    assert "num_generations" in pages["migrating.html"]
    assert not any("<!-- generated:" in text for text in pages.values())
    assert "rlctl.api.train" in pages["api.html"]
