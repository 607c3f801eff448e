"""The docs: generated parts are up to date, blocks are valid, the site builds without warnings."""

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

from docs.generate import FOLDER, with_parts
from rlctl.__main__ import main
from rlctl.recipes.compose import compose

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_parts(text) == text, "run: python -m docs.generate"


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


def test_the_recipe_for_users_of_trl_is_complete(tmp_path: Path) -> None:
    recipe = next(text for page, text in blocks("yaml") if page == "trl.md")
    (tmp_path / "mine.yaml").write_text(recipe)
    config = compose(tmp_path / "mine.yaml").config
    assert (config.actor_rollout_ref.rollout.n, config.algorithm.adv_estimator) == (8, "grpo")


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
    assert set(pages) >= {f"{page.stem}.html" for page in PAGES if page.name != "README.md"}
    assert [name for name, text in pages.items() if _LOADED.search(text)] == []
    assert 'id="e-oom"' in pages["errors.html"]
    assert "rlctl.api.train" in pages["api.html"]
